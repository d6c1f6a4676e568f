"""Reading and writing checkpoints without Ray: a reader claims nothing and writes nothing; it is safe beside a running training."""

from raystate.inspection import ArrayMetadata, StepMetadata
from raystate.reader.loading import load, metadata
from raystate.reader.saving import save
from raystate.reader.steps import Reader

__all__ = ["ArrayMetadata", "Reader", "StepMetadata", "load", "metadata", "save"]
