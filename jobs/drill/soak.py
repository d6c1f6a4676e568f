"""The drill itself: a training that goes on and on, one fault after the other, and the same training without any."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raystate
from jobs.drill.fit import Trainings, through
from jobs.drill.judge import Judge
from jobs.drill.outcomes import NONE, Before, Outcome, Report, check, least_step, why_not_counted
from jobs.drill.plan import ANY, RANKS, Fault, Kind, faults
from jobs.drill.strikes import Armoury, Strike, limits
from jobs.drill.training import ASK_EVERY
from jobs.drill.watch import RECOVERING, Run, TooLate, Watch, phase_of

AIM_S = 3.0  # at most so long a fault waits for the Coordinator's phase that it aims at
AIM_POLL_S = 0.005
SAFE_POLL_S = 0.05
HOLD_POLL_S = 0.2
SAVE_EVERY = 20  # steps between durable saves
SLOW_START_S = 600.0
WARM_STEPS = 20
FEW = 5  # faults: about so many steps come of them, and the run without faults comes first and serves as warm-up, too
STEPS_EACH = 100
GOAL_STEPS = 2 * ASK_EVERY + 20  # beyond the newest: every rank has asked by then
MOST_UNCOUNTED = 3  # times as many as there are to be, and the drill gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a drill is told.

    Attributes:
        patience_s: by which the run has to be back after a fault; more on a slow machine.
        step_s: a step takes at least so long.
        elastic: the run may go on with fewer ranks, and grows again before the next fault.
        kinds: of faults, that can be injected here.
        left_out: kind -> why it can't be.
    """

    faults: int
    seed: int
    kinds: Sequence[Kind]
    left_out: dict[str, str]
    patience_s: float
    step_s: float
    elastic: bool = False


class Soak:
    """A run on these machines, and what is done to it.

    Args:
        machines: `Simulated` or `Given`; this process has joined its cluster.
        folder: for Ray Train's own files.
        say: takes a line for people.
    """

    def __init__(self, machines: Any, settings: Settings, folder: Path, say: Callable[[str], None]):
        self._machines = machines
        self._settings = settings
        self._say = say
        self._tag = secrets.token_hex(3)
        self._trainings = Trainings(machines, folder, self._tag, elastic=settings.elastic)
        self._kept = NONE  # see `least_step`
        self._durable = NONE
        self._struck_at = NONE  # the newest step at the last fault
        self._unasked = 0
        self._outcomes: list[Outcome] = []
        self._not_counted: list[str] = []
        self._violations: list[str] = []
        self._steps = 0
        self._equal: bool | None = None
        self._same_order: bool | None = None
        self._not_durable: tuple[str, ...] = ()
        self._took_s = 0.0
        few = settings.faults <= FEW
        self._calm_steps = settings.faults * STEPS_EACH + GOAL_STEPS if few else WARM_STEPS  # of the run before the faults

    # ------------------------------------------------------------ all of it

    def go(self) -> Report:
        """Play the faults, end the run, and compare its end with that of a run that nobody disturbs."""
        try:
            calm = self._warm_up()
            self._begin(self._config(self._machines.storage, f"drill-{self._tag}"))
            began_s = time.monotonic()
            try:
                self._play()
            finally:
                self._took_s = time.monotonic() - began_s
            self._end()
            if self._steps != self._calm_steps:
                self._say("The same training without faults …")
                calm = self._trainings.calm("undisturbed", self._steps, SLOW_START_S + self._steps)
            equal, wrong = self._judge.compare(calm)
            self._equal = None if self._settings.elastic else equal
            self._same_order = not wrong
            self._violations.extend(wrong)
        except TooLate as error:
            self._violations.append(str(error))
        return self.report()

    def report(self) -> Report:
        """As far as it has come."""
        return Report(
            seed=self._settings.seed,
            wanted=self._settings.faults,
            outcomes=tuple(self._outcomes),
            not_counted=tuple(self._not_counted),
            left_out=self._settings.left_out,
            bit_equal=self._equal,
            same_order=self._same_order if self._settings.elastic else None,
            violations=tuple(self._violations),
            steps=self._steps,
            took_s=self._took_s,
            unasked=self._unasked,
            not_durable=self._not_durable,
            fit_s=self._fit.took_s,
        )

    def _config(self, storage: str, run: str) -> raystate.StateConfig:
        return raystate.StateConfig(
            storage=storage,
            run=run,
            save_every_steps=SAVE_EVERY,
            snapshot_every_steps=1,  # what each death costs is judged
            keep_last=4,
            keep_every_steps=50 * SAVE_EVERY,
            hang_timeout_s=self._limits.hang_s,
            host_timeout_s=self._limits.host_s,
            save_timeout_s=self._limits.save_s,
            host_memory="256MiB",
        )

    def _warm_up(self) -> Watch:
        """A training without faults, which compiles the programs and shows how fast this machine is."""
        began_s = time.monotonic()
        watch = self._trainings.calm("warm", self._calm_steps, SLOW_START_S + self._calm_steps)
        firsts = [event["t"] for event in watch.events if event["event"] == "first"]
        starts = [event["t"] for event in watch.events if event["event"] == "start"]
        self._limits = limits(max(firsts) - began_s, max(firsts) - min(starts), self._settings.patience_s)
        return watch

    def _begin(self, config: raystate.StateConfig) -> None:
        self._watch, self._fit = self._trainings.struck(config, step_s=self._settings.step_s)
        self._judge = Judge(config.storage, self._watch)
        self._run = Run(config.run)
        self._armoury = Armoury(self._machines, self._watch, self._run, self._limits)
        self._wait(lambda: self._watch.newest > 0 and self._run.find(), "first step", SLOW_START_S)

    def _wait(self, condition: Callable[[], Any], what: str, timeout_s: float | None = None) -> Any:
        return self._watch.wait(condition, what, timeout_s or self._limits.patience_s, self._fit.why_ended)

    # ------------------------------------------------------------ faults

    def _play(self) -> None:
        wanted = self._settings.faults
        for fault in faults(self._settings.seed, self._settings.kinds):
            if len(self._outcomes) == wanted:
                return
            if len(self._not_counted) > MOST_UNCOUNTED * wanted:
                raise TooLate(f"{len(self._not_counted)} faults did not count")
            try:
                self._one(fault)
            except TooLate as error:
                now = f"the newest step is {self._watch.newest}, the Coordinator says {self._run.status()}"
                raise TooLate(f"fault {fault.number} ({fault.kind.name}): {error}; {now}") from None

    def _one(self, fault: Fault) -> None:
        time.sleep(fault.gap_s)
        self._watch.look()
        sizes = self._watch.sizes()
        strike, before = self._aim(fault)
        why = "its target was not found" if strike is None else why_not_counted(before, self._struck_at)
        began_s, struck_s = time.monotonic(), time.time()
        old = {event["trainer"] for event in self._watch.events if event["event"] == "start"}
        if strike is None or why or not strike.begin():
            self._not_counted.append(f"fault {fault.number} ({fault.kind.name}): {why or 'its target was not alive'}")
            self._struck_at = before.trained
            self._wait(lambda: self._watch.newest > before.trained, "new step")
            return
        self._struck_at = before.trained
        outcome = Outcome(
            number=fault.number,
            kind=fault.kind.name,
            aim=fault.aim,
            target=strike.target,
            before=before,
            node=strike.node,
            rank=fault.rank,
            struck_s=struck_s,
        )
        self._outcomes.append(outcome)
        ended = threading.Event()
        if strike.hold_s:
            timer = threading.Thread(target=self._hold, args=(strike, ended), name="hold", daemon=True)
            timer.start()
        else:
            ended.set()
        try:
            self._recover(fault, strike, outcome, began_s, old, ended)
        finally:
            ended.wait(strike.hold_s + 1.0)
            outcome.over_s = time.time()
            self._unasked += outcome.note_sizes(sizes, self._watch.sizes(), also=fault.aim == RECOVERING)
        self._say_outcome(outcome)

    def _hold(self, strike: Strike, ended: threading.Event) -> None:
        end_s = time.monotonic() + strike.hold_s
        try:
            while time.monotonic() < end_s and not strike.until():
                time.sleep(min(HOLD_POLL_S, max(0.0, end_s - time.monotonic())))
        finally:
            strike.end()
            ended.set()

    def _aim(self, fault: Fault) -> tuple[Strike | None, Before]:
        """The strike, and what is known as late as possible before it."""
        durable = self._judge.newest_durable()
        status = self._run.status()
        stable = NONE if status is None else status.memory_step
        if fault.aim == RECOVERING:
            rank = self._watch.of_ranks()[1 - fault.rank]
            self._machines.send(rank["node"], rank["pid"], signal.SIGKILL)  # the fault meets what this one leads to
        strike = None if fault.aim == RECOVERING else self._armoury.strike(fault)
        end_s = time.monotonic() + AIM_S
        while True:
            self._watch.look()
            status = self._run.status()
            stable = max(stable, -1 if status is None else status.memory_step)
            phase = phase_of(status, self._watch.newest)
            if fault.aim in (ANY, phase) or time.monotonic() > end_s:
                break
            time.sleep(AIM_POLL_S)
        strike = strike or self._armoury.strike(fault)
        self._kept = max(self._kept if fault.kind.spares_memory else NONE, stable)
        alive = strike is not None and strike.is_alive()
        return strike, Before(alive=alive, trained=self._watch.newest, stable=stable, durable=durable, phase=phase)

    def _recover(
        self, fault: Fault, strike: Strike, outcome: Outcome, began_s: float, old: set[str], ended: threading.Event
    ) -> None:
        """Wait until it trains again, and what it trains is safe; then look at what must hold."""
        watch, kept = self._watch, self._kept
        patience_s = self._limits.patience_s + strike.hold_s
        restarts = fault.kind.restarts or fault.aim == RECOVERING

        def reached() -> int:
            return max(
                (event["step"] for event in watch.events if event["event"] == "step" and event["trainer"] in old), default=NONE
            )

        def new() -> dict[str, Any] | None:
            """The first new step after it: of new workers, where they have to be new."""
            beyond = reached() if restarts else outcome.before.trained
            for event in watch.events:
                if event["event"] == "step" and event["step"] > beyond and (event["trainer"] not in old or not restarts):
                    return event
            return None

        first = self._wait(new, "new step", patience_s)
        outcome.seconds = max(0.0, first["t"] - began_s)
        self._wait(ended.is_set, "end of the fault", patience_s)
        strike.settle()
        if self._settings.elastic:
            self._wait(lambda: watch.sizes()[-1] == RANKS, f"group of {RANKS} ranks again", patience_s)
        watch.look()
        trained, end_s = watch.newest, time.monotonic()
        self._wait(lambda: self._is_safe(trained, strike), f"step after {trained} that is safe again", patience_s)
        outcome.safe_s = time.monotonic() - end_s
        starts = [event for event in watch.events if event["event"] == "start" and event["trainer"] not in old]
        if starts:
            went_on = [event for event in starts if event["t"] <= first["t"]] or starts
            outcome.start, outcome.tier, outcome.reached = went_on[-1]["step"], went_on[-1]["tier"], reached()
        self._check(fault, outcome, kept)

    def _is_safe(self, trained: int, strike: Strike) -> bool:
        """Whether something newer is safe now."""
        status = self._run.status()
        if status is None:
            return False
        step = status.durable_step if strike.durable else status.memory_step
        self._kept = max(self._kept, status.memory_step)
        if step <= trained:
            time.sleep(SAFE_POLL_S)
        return step > trained

    # ------------------------------------------------------------ what must hold

    def _check(self, fault: Fault, outcome: Outcome, kept: int) -> None:
        least = least_step(outcome.before, spares_memory=fault.kind.spares_memory, kept=kept)
        check(outcome, least=least, durable_after=self._judge.newest_durable(), restored_wrong=self._judge.wrong())

    def _say_outcome(self, outcome: Outcome) -> None:
        where = f"from {outcome.tier} {outcome.start}, {outcome.steps_lost} lost" if outcome.start is not None else "no restart"
        number = f"{len(self._outcomes):4}/{self._settings.faults}"
        took = f"{outcome.seconds:5.1f} s" if outcome.seconds is not None else "      -"
        bad = f"  {len(outcome.violations)} VIOLATIONS" if outcome.violations else ""
        self._say(f"{number}  {outcome.kind:16} {outcome.before.phase:10} {took}  {where}{bad}")

    # ------------------------------------------------------------ the end

    def _end(self) -> None:
        import ray

        goal = max(self._watch.newest + GOAL_STEPS, self._calm_steps)
        ray.get(self._trainings.scribe.set_goal.remote(goal), timeout=60.0)
        hash_ = self._run.hash
        steps_s = (goal - self._watch.newest) * self._settings.step_s
        self._not_durable = through(self._watch, self._fit, self._limits.patience_s + SLOW_START_S + steps_s)
        self._steps = max((end["step"] for end in self._watch.ends().values()), default=NONE)
        wrong = self._judge.wrong()
        newest = self._judge.newest_durable()
        if newest != self._steps:
            wrong.append(f"the run ended at step {self._steps}, and the newest durable step is {newest}")
        left = [*self._run.actors(), *self._machines.left_behind(hash_)]
        if left:
            wrong.append(f"left behind: {', '.join(left)}")
        self._violations.extend(wrong)
