"""raystate's snapshots, Orbax's two asynchronous checkpointers and `raystate.save_async`, behind the same calls."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from benchmarks.device.figures import Teller
from benchmarks.device.here import has
from benchmarks.device.slots import Copied, Snapshots

OURS = "raystate"
STORED = "raystate.save_async"


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
        assert self.newest is not None
        self.newest.wait()

    def restore(self, reference: Any) -> Any:
        assert self.newest is not None
        return self._snapshots.restore(self.newest, reference)


class InFolders:
    """One that saves each state into a new folder, as a training does, and here keeps the newest only."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self._paths: Iterator[Path] = (folder / str(number) for number in itertools.count())
        self._path = folder / "none"
        self._future: Any = None

    def save(self, state: Any) -> None:
        self._previous, self._path = self._path, next(self._paths)
        self._future = self.begin(self._path, state)

    def wait(self) -> None:
        self._future.result()

    def clear(self) -> None:
        """Remove what is not the newest; nobody is measured now."""
        shutil.rmtree(self._previous, ignore_errors=True)

    def restore(self, reference: Any) -> Any:
        return self.load(self._path, reference)

    def begin(self, path: Path, state: Any) -> Any:
        raise NotImplementedError

    def load(self, path: Path, reference: Any) -> Any:
        raise NotImplementedError


class OrbaxV0(InFolders):
    """Orbax v0's AsyncCheckpointer."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        import orbax.checkpoint as ocp

        self._args, self._saver = ocp.args, ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def begin(self, path: Path, state: Any) -> None:
        self._saver.save(path, args=self._args.StandardSave(state))

    def wait(self) -> None:
        self._saver.wait_until_finished()

    def load(self, path: Path, reference: Any) -> Any:
        return self._saver.restore(path, args=self._args.StandardRestore(reference))


class OrbaxV1(InFolders):
    """Orbax v1's `save_async`."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        from orbax.checkpoint import v1

        self._v1 = v1

    def begin(self, path: Path, state: Any) -> Any:
        return self._v1.save_async(str(path), state)

    def load(self, path: Path, reference: Any) -> Any:
        return self._v1.load(str(path), reference)


class Stored(InFolders):
    """raystate's own way to storage in one process."""

    def begin(self, path: Path, state: Any) -> Any:
        import raystate

        return raystate.save_async(path, state)

    def load(self, path: Path, reference: Any) -> Any:
        import raystate

        return raystate.load(path, reference)


def others_of(tell: Teller, folder: Path, room_bytes: int) -> dict[str, InFolders]:
    """Those that this machine can run: each needs its package, and room on the disk for two states."""
    kinds: dict[str, tuple[Callable[[Path], InFolders], str]] = {
        "Orbax v0": (OrbaxV0, "orbax.checkpoint"),
        "Orbax v1": (OrbaxV1, "orbax.checkpoint"),
        STORED: (Stored, "pydantic"),
    }
    found: dict[str, InFolders] = {}
    for name, (make, needs) in kinds.items():
        if not has(needs):
            tell.note(f"{name} is left out: there is no {needs}")
        elif shutil.disk_usage(folder).free < 2 * len(kinds) * room_bytes:
            tell.note(f"{name} is left out: the disk has no room for it")
        else:
            try:
                found[name] = make(folder / name.replace(" ", "-"))
            except Exception as error:
                tell.note(f"{name} is left out: {type(error).__name__}: {error}")
    return found
