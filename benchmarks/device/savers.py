"""raystate's snapshots, and Orbax's two asynchronous checkpointers, behind the same calls."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.device.here import has
from benchmarks.device.slots import Copied, Snapshots

OURS = "raystate"


class Saver(Protocol):
    """One that saves a state beside the training."""

    def save(self, state: Any) -> None:
        """On the training thread: the next step may donate the state."""
        ...

    def wait(self) -> None:
        """Until the newest save is done: in its slot, or in its folder."""
        ...

    def restore(self, reference: Any) -> Any:
        """What was saved, from where `wait` has seen it."""
        ...


class Ours:
    """Snapshots in slots."""

    def __init__(self, snapshots: Snapshots):
        self._snapshots = snapshots
        self.newest: Copied | None = None

    def save(self, state: Any) -> None:
        self.newest = self._snapshots.take(state)

    def wait(self) -> None:
        if self.newest is not None:
            self.newest.wait()

    def restore(self, reference: Any) -> Any:
        assert self.newest is not None
        return self._snapshots.restore(self.newest, reference)


class OrbaxV0:
    """Orbax v0's AsyncCheckpointer."""

    def __init__(self, folder: Path):
        import orbax.checkpoint as ocp

        self._args, self._path = ocp.args, folder / "v0"
        self._saver = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(self, state: Any) -> None:
        self._saver.save(self._path, args=self._args.StandardSave(state), force=True)

    def wait(self) -> None:
        self._saver.wait_until_finished()

    def restore(self, reference: Any) -> Any:
        return self._saver.restore(self._path, args=self._args.StandardRestore(reference))


class OrbaxV1:
    """Orbax v1's `save_async`."""

    def __init__(self, folder: Path):
        from orbax.checkpoint import v1

        self._v1, self._path, self._response = v1, folder / "v1", None

    def save(self, state: Any) -> None:
        self._response = self._v1.save_async(str(self._path), state, overwrite=True)

    def wait(self) -> None:
        if self._response is not None:
            self._response.result()
            self._response = None

    def restore(self, reference: Any) -> Any:
        return self._v1.load(str(self._path), reference)


class Stored:
    """raystate's own way to storage in one process: `raystate.save_async` and `load`."""

    def __init__(self, folder: Path):
        import raystate

        self._raystate, self._path, self._future = raystate, folder / "raystate", None

    def save(self, state: Any) -> None:
        self._future = self._raystate.save_async(self._path, state, overwrite=True)

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None

    def restore(self, reference: Any) -> Any:
        return self._raystate.load(self._path, reference)


STORED = "raystate.save_async"


def savers(snapshots: Snapshots, folder: Path, room_bytes: int) -> dict[str, Saver]:
    """Those that this machine can run: Orbax needs its package, and twice the state on disk."""
    found: dict[str, Saver] = {OURS: Ours(snapshots)}
    others: dict[str, Callable[[Path], Saver]] = {"Orbax v0": OrbaxV0, "Orbax v1": OrbaxV1}
    if has("pydantic") and has("fsspec"):
        others[STORED] = Stored
    if not has("orbax.checkpoint"):
        return found
    if shutil.disk_usage(folder).free < 2 * len(others) * room_bytes:
        print("  the disk has no room for Orbax beside it", flush=True)
        return found
    for name, make in others.items():
        try:
            found[name] = make(folder)
        except Exception as error:
            print(f"  {name} is left out: {type(error).__name__}: {error}", flush=True)
    return found
