"""What lies in storage: which steps, what each holds and how it is stored, and how two differ. Loads neither jax, orbax nor ray."""

from raystate.inspection.metadata import ArrayMetadata, StepMetadata, StoredArray, look
from raystate.inspection.places import Checkpoints, open_step

__all__ = ["ArrayMetadata", "Checkpoints", "StepMetadata", "StoredArray", "look", "open_step"]
