"""The contestants, each behind the same four calls: save, wait, restore from storage, close."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

OURS = "raystate"


def folder_name(name: str) -> str:
    """What a contestant's folder is called."""
    return name.replace(" ", "-").replace(",", "")


class Saver(Protocol):
    """One contestant with a folder, or a URL, of its own."""

    def save(self, step: int, state: Any) -> None:
        """What a training loop calls."""
        ...

    def wait(self) -> None:
        """Returns when the last step is durable."""
        ...

    def restore(self, step: int, reference: Any) -> Any:
        """A step from storage, placed as the reference says."""
        ...

    def close(self) -> None: ...


class Raystate:
    """A StateManager; `Reader` for what comes from storage."""

    def __init__(self, folder: Path | str, arena_dir: Path | None = None):
        import raystate

        self.folder = str(folder)
        self.config = raystate.StateConfig(
            storage=self.folder, run=f"bench-{os.getpid()}-{os.path.basename(self.folder)}", save_every_steps=1, keep_last=2,
            arena_dir=None if arena_dir is None else str(arena_dir),
        )  # fmt: skip
        self.manager = raystate.StateManager(self.config)
        self.bytes_read = 0

    def save(self, step: int, state: Any) -> None:
        self.manager.save(step, state)

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def restore(self, step: int, reference: Any) -> Any:
        import raystate

        restored = raystate.Reader(self.folder).restore(reference, step)
        self.bytes_read = restored.bytes_from.get("storage", 0)
        return restored.state

    def restore_from_memory(self, reference: Any) -> Any:
        """The newest step, out of host memory. Training goes on from there."""
        restored = self.manager.restore(reference)
        if restored is None or restored.tier != "memory":
            raise RuntimeError(f"not restored from memory but from {restored.tier if restored else 'nowhere'}")
        return restored.state

    def close(self) -> None:
        self.manager.close()


class OrbaxManager:
    """Orbax v0's CheckpointManager, asynchronous as by default."""

    def __init__(self, folder: Path | str, *, compress: bool = True):
        import orbax.checkpoint as ocp

        self._ocp, self._compress = ocp, compress
        handler = None if compress else ocp.PyTreeCheckpointHandler(use_compression=False)
        self._manager = ocp.CheckpointManager(
            folder, item_handlers=handler, options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )  # fmt: skip

    def save(self, step: int, state: Any) -> None:
        args = self._ocp.args
        self._manager.save(step, args=args.StandardSave(state) if self._compress else args.PyTreeSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, step: int, reference: Any) -> Any:
        args = self._ocp.args
        if self._compress:
            return self._manager.restore(step, args=args.StandardRestore(reference))
        how = self._ocp.checkpoint_utils.construct_restore_args(reference)
        return self._manager.restore(step, args=args.PyTreeRestore(reference, restore_args=how))

    def close(self) -> None:
        self._manager.close()


class OrbaxV1:
    """Orbax v1's training.Checkpointer."""

    def __init__(self, folder: Path | str, *, compress: bool = True):
        from orbax.checkpoint import v1

        policy: Any = v1.training.preservation_policies.LatestN(2)
        context = v1.Context()
        context.array.saving.use_compression = compress
        self._checkpointer = v1.training.Checkpointer(str(folder), context=context, preservation_policy=policy)
        self._response: Any = None

    def save(self, step: int, state: Any) -> None:
        self.wait()  # as v0 does by itself
        self._response = self._checkpointer.save_async(step, state)

    def wait(self) -> None:
        if self._response is not None:
            self._response.result()
            self._response = None

    def restore(self, step: int, reference: Any) -> Any:
        return self._checkpointer.load(step, reference)

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


SAVERS: dict[str, Callable[[Path | str], Saver]] = {
    OURS: Raystate,
    "Orbax v0": OrbaxManager,
    "Orbax v0, uncompressed": lambda folder: OrbaxManager(folder, compress=False),
    "Orbax v1": OrbaxV1,
    "Orbax v1, uncompressed": lambda folder: OrbaxV1(folder, compress=False),
}
