"""Calls of existing code: `raystate.compat.flax_checkpoints` in the place of `flax.training.checkpoints`."""
