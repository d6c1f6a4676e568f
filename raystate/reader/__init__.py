"""Reading and writing checkpoints without Ray: a reader claims nothing and writes nothing; it is safe beside a running training."""

from raystate.inspection import ArrayMetadata, StepMetadata
from raystate.reader.loading import load, load_async, metadata
from raystate.reader.saving import save, save_async
from raystate.reader.steps import Reader

__all__ = ["ArrayMetadata", "Reader", "StepMetadata", "load", "load_async", "metadata", "save", "save_async"]
