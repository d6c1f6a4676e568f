"""The vocabulary between the decisions in core and the shells that carry them out.

Everything here is a frozen value of the standard library's types, so that it pickles, prints, compares and can be replayed. Events go
into `Coordinator.handle`, commands come out of it. A shell translates: it never decides.

Words: see docs/concepts.md. A `group` is one start of the worker group, drawn by the launcher. The
Coordinator answers it with a `Lineage`, and each restore of the group with the next one. A save id
is `a<attempt>k<counter>`, unique per save try.
"""

# ruff: noqa: F401 - each name is here for those who import it
# pyright: reportUnusedImport=false

from __future__ import annotations

from raystate.core.formats.commands import (
    Advice,
    Advise,
    Answer,
    Append,
    BuildPackage,
    CarryOut,
    Command,
    Copy,
    Discard,
    EndTrainers,
    Finish,
    Invalidate,
    Log,
    Proposal,
    Superseded,
    Write,
)
from raystate.core.formats.entries import Intent, LiveStep, LogEntry
from raystate.core.formats.events import (
    Appended,
    AttemptDead,
    CarriedOut,
    Claimed,
    DeleteAsked,
    Event,
    FlushAsked,
    GivenUp,
    HostDown,
    HostReported,
    Joined,
    LeaveAsked,
    Packaged,
    Progress,
    ReleaseAsked,
    RestoreAsked,
    RestoreTried,
    StopAsked,
    Tick,
    TrainerExited,
    Written,
)
from raystate.core.formats.names import (
    NOWHERE,
    Ask,
    HostId,
    Lineage,
    SaveId,
    SnapshotId,
    Tier,
    group_of,
    lineage_order,
    save_order,
)
from raystate.core.formats.replies import (
    TIERS,
    Failure,
    FlushReply,
    JoinReply,
    LeaveReply,
    Reply,
    RestoreChoice,
    RestoreSettled,
)
from raystate.core.formats.reports import (
    HostSummary,
    HostWord,
    Staged,
    TrainerSeen,
    TrainerWord,
)
from raystate.core.formats.settings import Settings
