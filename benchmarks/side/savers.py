"""The contestants, each behind the same four calls: save, wait, restore from storage, close."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.side.figures import OURS


class Saver(Protocol):
    """One contestant with a folder, or a URL, of its own."""

    def save(self, step: int, state: Any) -> None:
        """What a training loop calls: the next step may donate the state."""
        ...

    def wait(self) -> None:
        """Returns when the last step is where it is to be."""
        ...

    def restore(self, step: int, reference: Any) -> Any:
        """The last step from there, placed as the reference says."""
        ...

    def close(self) -> None: ...


class Raystate:
    """A StateManager; `Reader` for what comes from storage.

    Args:
        every: steps between durable saves.
        given: more of StateConfig.
    """

    def __init__(self, folder: Path | str, *, every: int = 1, **given: Any):
        import raystate

        self.folder = str(folder)
        name = f"bench-{os.getpid()}-{os.path.basename(self.folder)}"
        self.config = raystate.StateConfig(storage=self.folder, run=name, save_every_steps=every, keep_last=2, **given)
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
        return from_memory(self.manager, reference)

    def close(self) -> None:
        self.manager.close()


def from_memory(manager: Any, reference: Any) -> Any:
    """The state that a StateManager has in host memory."""
    restored = manager.restore(reference)
    if restored is None or restored.tier != "memory":
        raise RuntimeError(f"not restored from memory but from {restored.tier if restored else 'nowhere'}")
    return restored.state


class OrbaxManager:
    """Orbax v0's CheckpointManager, asynchronous as by default."""

    def __init__(self, folder: Path | str, *, compress: bool = True, keep: int = 2):
        import orbax.checkpoint as ocp

        self._ocp, self._compress = ocp, compress
        handler = None if compress else ocp.PyTreeCheckpointHandler(use_compression=False)
        self._manager = ocp.CheckpointManager(
            folder, item_handlers=handler, options=ocp.CheckpointManagerOptions(max_to_keep=keep)
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

    def __init__(self, folder: Path | str, *, compress: bool = True, keep: int = 2):
        from orbax.checkpoint import v1

        policy: Any = v1.training.preservation_policies.LatestN(keep)
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


class Stored:
    """raystate's own way to storage in one process: `raystate.save_async` into a folder for each step, of which one is kept."""

    def __init__(self, folder: Path | str):
        self._folder = Path(folder)
        self._pending: Any = None

    def save(self, step: int, state: Any) -> None:
        import raystate

        self._pending = raystate.save_async(self._folder / str(step), state)

    def wait(self) -> None:
        self._pending.result()

    def keep_only(self, step: int) -> None:
        """Remove all others; nobody is measured now."""
        for path in self._folder.iterdir():
            if path.name != str(step):
                shutil.rmtree(path)

    def restore(self, step: int, reference: Any) -> Any:
        import raystate

        return raystate.load(self._folder / str(step), reference)

    def close(self) -> None:
        """There is nothing to close."""


SAVERS: dict[str, Callable[[Path | str], Saver]] = {
    OURS: lambda folder: Raystate(folder, snapshot_every_steps=1),  # by default its first saves wait, to measure what one costs
    "Orbax v0": OrbaxManager,
    "Orbax v0, uncompressed": lambda folder: OrbaxManager(folder, compress=False),
    "Orbax v1": OrbaxV1,
    "Orbax v1, uncompressed": lambda folder: OrbaxV1(folder, compress=False),
}
# Beside an accelerator, where there may be no Ray.
STORED = "raystate.save_async"
OTHERS: dict[str, tuple[Callable[[Path], Saver], str]] = {  # name -> (what makes it, the package that it needs)
    "Orbax v0": (lambda folder: OrbaxManager(folder, keep=1), "orbax.checkpoint"),
    "Orbax v1": (lambda folder: OrbaxV1(folder, keep=1), "orbax.checkpoint"),
    STORED: (Stored, "pydantic"),
}
