"""How a Coordinator gets its run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StorageError
from raystate.core.formats.messages import Failure, LogEntry
from raystate.runtime.coordinator.one_storage import Claim
from raystate.runtime.coordinator.storing import Storing
from raystate.storage import LogGoneError
from raystate.waits import ASKED_AGAIN_S, RETRY_FIRST_S

logger = logging.getLogger("raystate.coordinator")


class Claiming:
    """Becomes the run's newest attempt, and tries again while storage is out.

    Args:
        storing: has the log.
        is_dead: tells whether the process behind a log writer id is known to be dead.
        known_attempt, on_claim, restarted: see `CoordinatorLoop`.
        clock: monotonic seconds.

    Attributes:
        attempt: -1 before the claim.
        claimed: set once, with `attempt`.
    """

    def __init__(
        self,
        storing: Storing,
        is_dead: Callable[[str], bool],
        known_attempt: int,
        on_claim: Callable[[int], object],
        clock: Callable[[], float],
        *,
        restarted: bool,
    ):
        self._storing = storing
        self._is_dead = is_dead
        self._known_attempt = known_attempt
        self._on_claim = on_claim
        self._clock = clock
        self.restarted = restarted
        self._next_s = float("-inf")  # when to try (again)
        self._look_s = 0.0  # when to look next for attempts that are assumed dead
        self._gone = ""  # why the run can't be claimed now: its log is not there
        self.attempt = -1
        self.claimed: Claim | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is time to try."""
        return self._clock() >= self._next_s

    def claim(self) -> tuple[LogEntry, tuple[int, ...]] | Failure | None:
        """Try.

        Returns:
            The claim entry and the attempts that are known to be dead; or why there will be none; None: it is to be tried again.
        """
        try:
            entry, dead = self._storing.claim(self._is_dead, known_attempt=self._known_attempt)
        except LogGoneError as error:
            if error.message != self._gone:
                logger.warning("the run can't be claimed: %s; it is tried again", error)
            self._next_s, self._gone = self._clock() + RETRY_FIRST_S, error.message
            return None
        except (StorageError, CorruptCheckpointError, ConfigError) as error:  # the last two: a log that can't be read
            if self.restarted and isinstance(error, StorageError):
                self._next_s = self._clock() + RETRY_FIRST_S
                logger.warning("the run can't be claimed again yet: %s", error)
                return None
            kind = StorageError if isinstance(error, StorageError) else type(error)
            return Failure(error=kind.__name__, message=error.message, details=error.details | {"begun": False})
        self.attempt, self._gone, self.claimed = entry.attempt, "", Claim(seq=entry.seq, writer=entry.writer)
        self._on_claim(entry.attempt)
        return entry, dead

    def take_back(self) -> None:
        """Leave nothing in a folder that was only looked at, such as one of stock Orbax's steps."""
        if self.claimed is not None:
            self._storing.take_back(self.claimed)

    def why_log_is_gone(self) -> str:
        """Why the run has no log any more, "" if it has, or if storage doesn't say. For any thread; it asks storage."""
        return self._gone if self.attempt < 0 else self._storing.why_log_is_gone()

    def look_for_dead(self) -> None:
        """Look, from time to time, whether older attempts have died."""
        if self._clock() >= self._look_s:
            self._look_s = self._clock() + ASKED_AGAIN_S
            self._storing.look_for_dead()
