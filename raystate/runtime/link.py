"""How a trainer's process reaches its run: the narrow port between the manager and what carries its
calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raystate.core.formats.messages import HostId, Progress, Reply, TrainerExited
from raystate.runtime.host.doorbell import Hello


class Unreachable(Exception):  # noqa: N818 - a state, for this package only
    """The other end is away, and may come back: ask again until the deadline."""


class Gone(Exception):  # noqa: N818
    """The Coordinator has been ended on purpose: no answer will come."""


class HostCall(NamedTuple):
    """One call of a HostActor."""

    host: HostId
    method: str
    kwargs: dict[str, Any]


class Ringer(Protocol):
    """A connection to the HostActor: "look at the words", and by its end the news that this process is gone. See `doorbell.Bell`."""

    def connect(self, timeout_s: float) -> None: ...
    def introduce(self, hello: Hello) -> None: ...
    def ring(self) -> None: ...
    def close(self) -> None: ...


class Link(Protocol):
    """One process's calls. Ray's is `actors.link.RayLink`; the model of the public API has one without processes.

    Attributes:
        host: the node of this process.
    """

    host: HostId

    def check(self) -> None:
        """Raises RaystateError: this process can't reach its run any more. A local look: `save` asks each time."""
        ...

    def enter(self, *, takeover: bool) -> None:
        """Make this process a user of the run. RunInUseError, StorageError, BarrierTimeoutError."""
        ...

    def ask(self, event: Any, timeout_s: float) -> Reply:
        """Ask the Coordinator, once. Raises Unreachable, Gone."""
        ...

    def bell(self, arena_path: Path, hello: Hello) -> Ringer:
        """To the HostActor of this node; not connected yet."""
        ...

    def failed(self, event: TrainerExited, error: BaseException) -> None:
        """Tell the Coordinator that this trainer has raised `error`. Best effort."""
        ...

    def tell(self, progress: Progress) -> None:
        """Tell the Coordinator how far this process has come. It may get lost."""
        ...

    def call_host(self, host: HostId, method: str, timeout_s: float, kwargs: dict[str, Any]) -> Any:
        """Call a HostActor, once. Raises Unreachable, or the RaystateError that it raised."""
        ...

    def call_hosts(self, calls: Sequence[HostCall], timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Call HostActors, several at a time and each once; gives (index of the call, its answer) as they come. An answer may be an
        Unreachable, or the RaystateError that the host raised.

        Args:
            timeout_s: for each call.
        """
        ...

    def left(self, rank: int, world: int) -> None:
        """After the LeaveReply: the Coordinator may end. Rank 0 returns when all actors of the run are gone."""
        ...

    def clock(self) -> float:
        """Monotonic seconds."""
        ...

    def node_clock(self) -> float:
        """CLOCK_MONOTONIC, as the HostActor of this node reads it. A section asks twice: it takes no lock."""
        ...

    def rest(self, condition: threading.Condition | None = None, seconds: float = 0.002) -> None:
        """Let others work for a moment: until the condition is notified, or `seconds` have passed. No lock may be held."""
        ...

    def spawn(
        self, turn: Callable[[], bool], condition: threading.Condition, name: str, pause_s: float = ...
    ) -> Callable[[], None]:
        """Call `turn` again and again in the background: at once while it says True.

        Else when the condition is notified, or `pause_s` have passed: a few milliseconds by
        default.

        Returns:
            What ends it and waits until it has ended.
        """
        ...
