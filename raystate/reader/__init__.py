"""Reading and writing checkpoints without Ray: a reader claims nothing and writes nothing; it is safe beside a running training."""

from raystate.reader.loading import load, metadata
from raystate.reader.loading_ahead import load_async
from raystate.reader.saving import save, save_async
from raystate.reader.steps import Reader, StepMetadata

__all__ = ["Reader", "StepMetadata", "load", "load_async", "metadata", "save", "save_async"]
