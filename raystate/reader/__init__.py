"""Reading and writing checkpoints without Ray: a reader claims nothing and writes nothing; it is safe beside a running training."""

from raystate.reader.loading import load, metadata
from raystate.reader.saving import save
from raystate.reader.steps import Reader, StepMetadata

__all__ = ["Reader", "StepMetadata", "load", "metadata", "save"]
