"""What a HostActor's machine is told, and what it asks for. Shells translate: they read shared memory and sockets, and never decide."""

from __future__ import annotations

from dataclasses import dataclass

from raystate.core.formats.commands import Write
from raystate.core.formats.declared import Event, Failure
from raystate.core.formats.events import Tick
from raystate.core.formats.names import HostId, SnapshotId
from raystate.core.formats.orders import Advice, HostOrder, Invalidate
from raystate.core.formats.reports import HostWord, Staged, TrainerWord

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFound:
    """A slot set is there: adopted from an earlier HostActor, or allotted now. A set that is handed on is found again.

    A trainer whose state has grown has another set already. That one has been read (SetRead) just
    before: otherwise the step that was staged last would not count.

    Attributes:
        index: of the set, for ever.
        trainer: the incarnation that it belongs to; "": none has it.
        word: its trainer's word, read before `contents`.
        contents: what each slot's header says, None where nothing is complete.
        host_word: what an earlier HostActor wrote last to its trainer; None for a set that has just been allotted.
        copies_of: the rank whose pieces, copied from another host, it is for; None: it is a trainer's.
    """

    index: int
    trainer: str
    word: TrainerWord | None
    contents: tuple[Staged | None, ...]
    host_word: HostWord | None = None
    copies_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRemoved:
    """A slot set's files are gone."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRead:
    """A set's word has changed, or its trainer is gone.

    Attributes:
        word: None: no process holds the set's lock or is about to take it. Its trainer is dead, or has let it go.
        contents: all headers, read after that.
    """

    index: int
    word: TrainerWord | None
    contents: tuple[Staged | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """A trainer has said on its connection who it is. It says so again when it gets other slots (`set_index`, -1: none yet)."""

    connection: int
    pid: int
    rank: int
    world: int
    lineage: str  # of its worker group, see `group_of`
    trainer: str  # incarnation
    set_index: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The connection has ended. Its set has been read before this event.

    Attributes:
        said_bye: its trainer has detached on purpose.
        alive: its trainer still holds its slots' lock. It calls again, or a SetRead without a word tells of its end.
    """

    connection: int
    said_bye: bool = False
    alive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Where the Python of the trainer on this connection was, before its Kill; "" if it could not say."""

    connection: int
    stack: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldAsked:
    """Somebody wants to read a snapshot's pieces of these ranks. Answered with Hold."""

    reader: str
    snapshot: SnapshotId
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldEnded:
    """A reader is done, or gone. A save reads under its id."""

    reader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMeasured:
    """The piece that FetchCopy named is there, and set `index` has room for it: has it a free slot? Answered with FillCopy or EndCopy."""

    transfer: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEnded:
    """The transfer has ended. Answered with EndCopy if it has brought something.

    Attributes:
        content: its bytes are in the slot and match their checksums; the header is not written. None: there is no copy.
        error: why not.
        no_memory: this host has no room for one.
    """

    transfer: int
    content: Staged | None = None
    error: str = ""
    no_memory: bool = False


HostEvent = (
    SetFound | SetRemoved | SetRead | Connected | Disconnected | Examined | HoldAsked | HoldEnded
    | CopyMeasured | CopyEnded | Tick | Write | HostOrder
)  # fmt: skip


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAddress:
    """One slot: `slot` of set `index`, with the piece of `rank`."""

    rank: int
    index: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speak:
    """Write the host's word into the set's cell."""

    index: int
    word: HostWord


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """Invalidate the slot's header."""

    index: int
    slot: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember:
    """Keep this where a restarted HostActor finds it: what it must know although no arena says so.

    Attributes:
        restore: the newest Invalidate that was applied.
        advice: the newest Advice: with its proposal, which a new Coordinator learns from the hosts alone.
    """

    restore: Invalidate | None = None
    advice: Advice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End this trainer's process with SIGKILL.

    Attributes:
        examine: a connection: find out first where the Python of its trainer is; then Examined, also if that failed.
    """

    pid: int
    rank: int
    reason: str
    examine: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The answer to HoldAsked and to Write. These slots stay as they are until HoldEnded; what isn't here is missing.

    An order that was given before gets no command. Its answer is the outcome of that one execution.

    Attributes:
        order: write their pieces; None: a reader has asked.
        refused: why the order is not carried out: then nothing is held.
    """

    addresses: tuple[SlotAddress, ...]
    order: Write | None = None
    refused: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveSet:
    """Give the set's memory back, if it is still that trainer's.

    The trainer has another set, and what this one holds isn't needed.
    """

    index: int
    trainer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCopy:
    """Begin to copy the rank's piece from another host: find out how large it is, and find or make a set for it; then CopyMeasured."""

    transfer: int
    source: HostId
    snapshot: SnapshotId
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FillCopy:
    """Bring the bytes of this transfer into this slot, header last of all; then CopyEnded."""

    transfer: int
    address: SlotAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCopy:
    """The transfer is over.

    Attributes:
        address: write the header there: from now on the slot holds the piece. None: nothing comes of it.
        reason: why not.
    """

    transfer: int
    address: SlotAddress | None = None
    reason: str = ""


# An event is for the Coordinator. It may get lost: what matters is repeated.
HostCommand = Event | Speak | Empty | Remember | Kill | Hold | RemoveSet | FetchCopy | FillCopy | EndCopy
