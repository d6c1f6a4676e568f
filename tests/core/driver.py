"""Drives a Coordinator by hand: short names for events, and a look at what it commands."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import (
    Advice,
    Answer,
    Append,
    Appended,
    Ask,
    BuildPackage,
    CarriedOut,
    CarryOut,
    Claimed,
    DeleteAsked,
    EndTrainers,
    FlushAsked,
    HostDown,
    HostId,
    HostReported,
    HostSummary,
    Intent,
    Invalidate,
    Joined,
    JoinReply,
    LeaveAsked,
    LiveStep,
    Log,
    LogEntry,
    Packaged,
    Proposal,
    ReleaseAsked,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    Settings,
    SnapshotId,
    Staged,
    Tick,
    TrainerExited,
    TrainerWord,
    Write,
    Written,
)
from tests.steps import keep_newest

C = TypeVar("C")
AB = ["a", "b"]


class Driver:
    """A Coordinator, its hosts as this test says they are, and everything it has commanded since the last `take`.

    Its trainers number their words, and each question names the rank's last one.
    """

    def __init__(
        self,
        *,
        tail: LogEntry | None = None,
        dead: tuple[int, ...] = (),
        hosts: tuple[str, ...] = (),
        keep_last: int | None = 3,
        **settings: Any,
    ):
        settings.setdefault("host_timeout_s", 1e6)  # hosts speak only when a test lets them
        settings.setdefault("replicas", 0)  # its hosts make no copies
        self.core = Coordinator(Settings(run="r", storage="s", **settings))
        self.keep = keep_newest(keep_last)
        self.now_s = 100.0
        self.out: list[Any] = []
        self.seq: dict[str, int] = {}
        self.staged: dict[str, list[Staged]] = {}
        self.seen: dict[str, list[TrainerWord]] = {}
        self.advised: dict[str, tuple[int, int]] = {}  # host -> the newest Advice it has got
        self.restores: dict[str, Invalidate] = {}  # host -> the newest order to discard that it has carried out
        self.numbers: dict[int, int] = {}  # rank -> number of its last word
        self.lineage = ""
        self.world = 0
        self.host_of: dict[int, str] = {}
        self.asks = 0
        self.auto = True  # storage does at once what it is told
        self.appends = True  # the same for the log
        self.storage_error = ""  # how requests of the Coordinator's process fail
        entry = claim_entry(tail, "w", "r")
        names = tuple(HostId(host) for host in hosts)
        self.send(Claimed(entry=entry, dead=dead, hosts=names))

    # ---------------------------------------------------------------- events

    def send(self, event: Any) -> list[Any]:
        commands = self.core.handle(event, self.now_s)
        self.took(commands)
        return commands

    def settle(self) -> None:
        """Pass on what waits; here nothing does."""

    def took(self, commands: list[Any]) -> None:
        """What was commanded, and what comes of it."""
        self.out += commands
        self.advised |= {one.host: one.stamp for one in commands if isinstance(one, Advice)}
        if self.auto:
            for command in commands:
                self._obey(command)

    def _obey(self, command: Any) -> None:
        if isinstance(command, Append) and self.appends:
            self.send(Appended(seq=command.entry.seq, outcome="ok"))
        elif isinstance(command, CarryOut):
            self.send(CarriedOut(intent=command.intent))
        elif isinstance(command, BuildPackage):
            self.send(self.packaged(command))
        elif isinstance(command, Invalidate):
            held = self.staged.get(command.host, [])
            self.staged[command.host] = [one for one in held if command.spares(one.lineage, one.step)]
            self.restores[command.host] = command
            self.report(command.host)
        elif isinstance(command, Write):
            self.send(Written(host=command.host, save=command.save))
        elif isinstance(command, Advice):
            self.report(command.host)

    def packaged(self, command: BuildPackage, **more: Any) -> Packaged:
        """The package is built; the retention policy has looked at the live steps and the new one."""
        live = sorted((*command.live, LiveStep(step=command.step, save=command.save)), key=lambda one: one.step)
        return Packaged(save=command.save, kept=tuple(self.keep(live)), **more)

    def tick(self, seconds: float = 0.0) -> list[Any]:
        self.now_s += seconds
        return self.send(Tick(storage_error=self.storage_error))

    def live(self, seconds: float, *hosts: str) -> None:
        """Time passes, and these hosts (none: all that have a rank) report every second or so."""
        while seconds > 0:
            self.tick(step_s := min(1.0, seconds))
            seconds -= step_s
            for host in hosts or sorted({*self.host_of.values()}):
                self.report(host, self.core.memory.hosts[HostId(host)].incarnation.removeprefix(host))

    def ask(self) -> Ask:
        self.asks += 1
        return Ask(f"q{self.asks}")

    def host_up(self, host: str, incarnation: str = "i1") -> None:
        self.report(host, incarnation)

    def report(self, host: str, incarnation: str = "i1") -> list[Any]:
        return self.send(HostReported(summary=self.summary(host, incarnation)))

    def report_both(self) -> None:
        """Hosts a and b."""
        for host in AB:
            self.report(host)

    def summary(self, host: str, incarnation: str = "i1") -> HostSummary:
        """What the host would report now."""
        self.seq[host] = self.seq.get(host, 0) + 1
        return HostSummary(
            host=HostId(host),
            incarnation=f"{host}{incarnation}",
            machine=f"machine-{host}",
            seq=self.seq[host],
            staged=tuple(self.staged.get(host, ())),
            trainers=tuple(self.seen.get(host, ())),
            advised=self.advised.get(host),
            restore=self.restores.get(host),
        )

    def join(self, hosts: list[str], group: str = "g") -> str:
        """All ranks join, one per entry of `hosts`; the lineage."""
        self.world = len(hosts)
        self.host_of = dict(enumerate(hosts))
        for host in dict.fromkeys(hosts):
            if host not in self.seq:
                self.host_up(host)
            self.seen[host] = []
            self.report(host)
        for rank, host in enumerate(hosts):
            self.send(Joined(ask=self.ask(), group=group, rank=rank, world=self.world, host=HostId(host)))
        self.settle()
        reply = self.replies(JoinReply)[-1]
        self.lineage = reply.lineage
        self.say(-1)
        return self.lineage

    def restore(self, *, step: int | None = None, rollback: bool = False, ok: bool = True) -> RestoreChoice:
        """All ranks ask, try and succeed; they are in the lineage that begins then."""
        self.ask_all(step=step, rollback=rollback)
        self.settle()
        choice = self.replies(RestoreChoice)[-1]
        if ok:
            self.tried(choice)
        return choice

    def ask_all(self, **more: Any) -> None:
        """All ranks ask for a restore."""
        for rank in range(self.world):
            self.ask_restore(rank, **more)

    def ask_restore(self, rank: int, **more: Any) -> Ask:
        ask = self.ask()
        self.send(RestoreAsked(ask=ask, lineage=self.lineage, rank=rank, word=self.numbers.get(rank, 0), **more))
        return ask

    def tried(self, choice: RestoreChoice, **bad: Any) -> None:
        for rank in range(self.world):
            self.send(self.try_of(choice, rank, **({"ok": False, **bad} if bad and rank == 0 else {"ok": True})))
        self.settle()
        if self.replies(RestoreSettled):
            self.goes_on(choice)

    def try_of(self, choice: RestoreChoice, rank: int, **more: Any) -> RestoreTried:
        said = {"step": choice.step, "begins": choice.begins, **more}
        return RestoreTried(ask=self.ask(), lineage=self.lineage, rank=rank, **said)

    def goes_on(self, choice: RestoreChoice) -> None:
        """All ranks have heard that the restore is settled."""
        self.lineage = choice.begins
        self.say(choice.step)

    def word(self, rank: int, newest: int, *, report: bool = True, **more: Any) -> None:
        """The rank's word as its host will report it."""
        host = self.host_of[rank]
        self.numbers[rank] = number = self.numbers.get(rank, 0) + 1
        mine = [one for one in self.seen.setdefault(host, []) if one.rank != rank]
        mine.append(TrainerWord(rank=rank, world=self.world, lineage=self.lineage, number=number, newest_step=newest, **more))
        self.seen[host] = mine
        if report:
            self.report(host)

    def say(self, newest: int, **more: Any) -> None:
        """Each rank's word."""
        for rank in range(self.world):
            self.word(rank, newest, **more)

    def key(self, step: int) -> SnapshotId:
        """A snapshot of the present lineage."""
        return SnapshotId(self.lineage, step)

    def hold(
        self,
        rank: int,
        step: int,
        *,
        promised: bool = False,
        layout: str = "L",
        host: str | None = None,
        local: int = 0,
    ) -> None:
        """The rank has staged the step."""
        where = host or self.host_of[rank]
        self.staged.setdefault(where, []).append(
            Staged(
                rank=rank,
                world=self.world,
                lineage=self.lineage,
                step=step,
                layout=layout,
                promised=promised,
                local=local,
            )
        )
        self.word(rank, step)

    def stage(self, step: int, *, promised: bool = False) -> None:
        """All ranks have staged the step."""
        for rank in range(self.world):
            self.hold(rank, step, promised=promised)

    def flush(self, rank: int, *promised: SnapshotId, word: int | None = None) -> Ask:
        """wait_until_finished()."""
        ask = self.ask()
        number = self.numbers.get(rank, 0) if word is None else word
        self.send(FlushAsked(ask=ask, lineage=self.lineage, rank=rank, promised=promised, word=number))
        return ask

    def leave(self, last: SnapshotId | None, *promised: SnapshotId, ranks: list[int] | None = None) -> None:
        """close()."""
        for rank in range(self.world) if ranks is None else ranks:
            self.send(
                LeaveAsked(
                    ask=self.ask(), lineage=self.lineage, rank=rank, last=last, promised=promised, word=self.numbers.get(rank, 0)
                )
            )

    def delete(self, step: int) -> Ask:
        ask = self.ask()
        self.send(DeleteAsked(ask=ask, step=step))
        return ask

    def release(self, reason: str = "gave up", **more: Any) -> None:
        self.send(ReleaseAsked(ask=self.ask(), reason=reason, **more))

    def exits(self, *ranks: int, clean: bool = False, **more: Any) -> None:
        """The processes of these ranks end."""
        for rank in ranks:
            said = {"reason": "left" if clean else "died", **more}
            self.send(TrainerExited(host=HostId(self.host_of[rank]), lineage=self.lineage, rank=rank, clean=clean, **said))

    def all_die(self) -> None:
        """Their words go with them."""
        self.exits(*self.host_of)
        self.seen = {host: [] for host in self.host_of.values()}

    def lose(self, host: str, reason: str = "cut off") -> None:
        self.send(HostDown(host=HostId(host), reason=reason))

    def agree(self, *, at: int) -> Proposal:
        """All ranks are at that step, and agree to act at the proposed one."""
        asked = self.proposal
        self.say(at, ack_id=asked.id, ack_ok=True, ack_step=at)
        self.settle()
        return self.proposal

    def write(self) -> str:
        """The hosts carry out what they were told to write; the save's id."""
        writes = self.take(Write)
        for one in writes:
            self.send(Written(host=one.host, save=one.save))
        return writes[-1].save

    def commit(self, **more: Any) -> LogEntry:
        """The hosts write, the package is built; the commit entry that comes of it."""
        self.write()
        self.send(self.packaged(self.take(BuildPackage)[-1], **more))
        return self.take(Append)[-1].entry

    # ---------------------------------------------------------------- what came out

    def take(self, kind: type[C]) -> list[C]:
        """The commands of this kind so far; they are forgotten."""
        found = [one for one in self.out if isinstance(one, kind)]
        self.out = [one for one in self.out if not isinstance(one, kind)]
        return found

    def orders(self, kind: str) -> list[Intent]:
        """What the shell has been told to publish ("commit") or to remove ("retire") since the last call."""
        found = [one for one in self.out if isinstance(one, CarryOut) and one.intent.kind == kind]
        self.out = [one for one in self.out if one not in found]
        return [one.intent for one in found]

    def replies(self, kind: type[C]) -> list[C]:
        return [one.reply for one in self.out if isinstance(one, Answer) and isinstance(one.reply, kind)]

    def advice(self) -> Advice:
        """The newest advice."""
        return [one for one in self.out if isinstance(one, Advice)][-1]

    @property
    def proposal(self) -> Proposal:
        """The one that the newest advice tells of."""
        found = self.advice().proposal
        assert found is not None
        return found

    @property
    def lines(self) -> list[str]:
        """The run's log."""
        return [one.text for one in self.out if isinstance(one, Log)]

    def said(self, pattern: str) -> None:
        """Whether a line of the log matches."""
        assert any(re.search(pattern, line) for line in self.lines), self.lines

    def ended(self) -> set[str]:
        """The hosts that were told to end their trainers."""
        return {one.host for one in self.out if isinstance(one, EndTrainers)}


def running(**settings: Any) -> Driver:
    """Two ranks on two hosts that have restored nothing."""
    driver = Driver(**settings)
    driver.join(AB)
    assert driver.restore().tier == "none"
    driver.out.clear()
    return driver


def training(**settings: Any) -> Driver:
    """The same, and step 4 is in memory."""
    driver = running(**settings)
    driver.stage(4)
    return driver


def adopted(*steps: int, tail: LogEntry | None = None, ranks: int = 2, lineage: str = "1.1.x", **settings: Any) -> Driver:
    """A new Coordinator of a run with these durable steps, whose trainers go on."""
    hosts = AB[:ranks]
    driver = Driver(tail=tail or history(*steps), dead=(1,), hosts=tuple(hosts), **settings)
    driver.world, driver.lineage, driver.host_of = ranks, lineage, dict(enumerate(hosts))
    return driver


def history(*steps: int, intents: tuple[Intent, ...] = (), attempt: int = 1) -> LogEntry:
    live = tuple(LiveStep(step=step, save=f"a{attempt}k{step}") for step in steps)
    return LogEntry(seq=10, attempt=attempt, writer="old", kind="close", run="r", live=live, intents=intents)
