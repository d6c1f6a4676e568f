"""`StateManager`: what a training script holds. One per JAX process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from raystate.actors.launch_context import begins_now, count_save, current, note
from raystate.arrays.checks import check_asked, check_custom, check_metrics, check_step, hold_metrics
from raystate.arrays.items import pack_items, real_items
from raystate.arrays.transforms import Transforms
from raystate.config.hints import KnowsOthers
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import Interrupted, RaystateError, StorageError, lost_steps
from raystate.core.formats.messages import LeaveReply, RestoreSettled
from raystate.core.formats.reports import RESTORE, SAVES
from raystate.manager.cadence import Cadence
from raystate.manager.calls import alone
from raystate.manager.ending import Departure
from raystate.manager.fresh import abstract_state, check_init
from raystate.manager.monitored import RunEvents
from raystate.manager.newest import DurableSteps, NewestSave, Ranking
from raystate.manager.opening import given_config, is_launched, membership, open_managers, ray_link
from raystate.manager.pipeline import Pipeline
from raystate.manager.restoring import Restoring, Wanted
from raystate.manager.section import section_of
from raystate.manager.session import Session
from raystate.manager.sourcing import Select, Source, check_source, restore_from_source
from raystate.manager.staging import SaveArguments
from raystate.reader import StepMetadata
from raystate.restored import ReadOptions, Restored
from raystate.runtime.link import Link
from raystate.storage import open_storage


class StateManager(KnowsOthers):
    """Owns the training state's way from the devices to host memory and storage, and back.

    Collective, in the same order on all processes: construction, `restore*`, `close`. All else is local.

    Args:
        config: None: the one that `fit` or `RayTrainCallback` set.
        takeover: end another Ray job's use of the same run; give up what memory holds of it if its folder is gone from storage.

    Raises:
        ConfigError: no config, or the world size does not match `jax.process_count()`.
        RunInUseError, StorageError, BarrierTimeoutError.

    A second manager of the same run closes the first; with several processes that is a RaystateError. Other runs' are independent.
    """

    def __init__(self, config: StateConfig | None = None, *, takeover: bool = False):
        begins_now()
        context = current()
        given = given_config(config, context)
        open_managers.close_earlier(given, takeover=takeover)
        rank, world, group, launch = membership(context, given)
        link, launched = ray_link(given, launch, rank), is_launched(given, context)
        self._open(given, link, rank, world, group, launched=launched, takeover=takeover)

    def _open(self, config: StateConfig, link: Link, rank: int, world: int, group: str, *, launched: bool, takeover: bool) -> None:
        self.config: StateConfig = config
        self._rank = rank
        self._interrupted: Interrupted | None = None
        self._storage = open_storage(config.storage)
        link.enter(takeover=takeover)
        self._session = Session(link, config, rank=rank, world=world, group=group)
        self._pipeline = Pipeline(self._session)
        self._cadence = Cadence(config, self._session, self._pipeline)
        self._last = NewestSave(self._pipeline)
        self._durable = DurableSteps(self._session, self._cadence.show_life)
        self._restoring = Restoring(self._session, self._pipeline, self._storage, self._settled)
        self._ranking = Ranking(config, rank)
        self._events = RunEvents(self._storage.url, rank=rank)
        self._ending = Departure(self._session, self._pipeline, launched=launched)
        open_managers.add(config, self, launched=launched)  # the next one closes it, if this is interrupted
        try:
            self._session.ring()
        except BaseException:  # the caller gets no manager that it could close
            self._detach()
            raise

    def __enter__(self) -> StateManager:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        with open_managers.sigterm.instead_of(error) as end:
            if self._ending.closes(end):
                with self._ending.ends_well(end):
                    self.close()
            elif isinstance(end, Interrupted):
                self._detach()
            elif end is not None:
                self._fail(end)

    # ------------------------------------------------------------ restore

    @alone(RESTORE)
    def restore(
        self,
        reference: object = None,
        *,
        step: int | None = None,
        items: Mapping[str, object] | None = None,
        partial: bool = False,
        cast: bool = False,
        shapes: Literal["match", "checkpoint"] = "match",
        transforms: Transforms | None = None,
        rollback: bool = False,
    ) -> Restored | None:
        """Collective: the newest step of all tiers (or exactly `step`), placed as `reference` says. None if the run has no step.

        Training goes on from there, at any time. It gives up later steps that are staged or promised
        and not durable; the next `wait_until_finished` or `close` names them.

        Args:
            reference: any pytree. Leaves: abstract or real arrays, Python values, shardings (in place of a subtree, for all of it),
                `...` (left out). None: the raw tree, with arrays on the devices they were saved on, else numpy.
            items: iterators are set in place; trees are references.
            partial: paths that only the reference has keep its value.
            cast: convert dtypes instead of refusing.
            shapes: "checkpoint" takes the checkpoint's shape where the reference has another.
            transforms: of the state: a function on the raw tree in host memory, or a mapping of new path to old path.
            step: exactly this one. Newer ones stay in storage, and their numbers can't be saved again, unless `rollback`.
            rollback: with `step`: the newer steps of all tiers are retired once every process has this one.

        Raises:
            StepNotFoundError: `step` was given and is in no tier.
            ReferenceMismatchError: all differences between reference and step in one error.
            CapacityError: there is no reference, and the raw tree is larger than the memory that is free.
            BarrierTimeoutError: names the ranks that did not call.
        """
        self._check_open()
        options = ReadOptions(partial=partial, cast=cast, shapes=shapes, transforms=transforms)
        step = check_asked(reference, step=step, items=items)
        wanted = Wanted(reference=reference, items=items, options=options, step=step, rollback=rollback)
        return self._events.restoring(lambda: self._restoring.restore(wanted))

    def _settled(self, reply: RestoreSettled) -> None:
        """A restore has begun a new lineage: the run's close does not save an older step again."""
        self._last.forget()
        self._durable.settled(reply)

    @alone(RESTORE)
    def restore_or_init(
        self,
        init_fn: Callable[[], Any],
        shardings: object = None,
        *,
        items: Mapping[str, object] | None = None,
        source: Source | None = None,
        source_select: Select | None = None,
        partial: bool = False,
        transforms: Transforms | None = None,
    ) -> Restored:
        """Collective: the newest step of this run, else of `source`, else `jax.jit(init_fn, out_shardings=shardings)()`.

        Args:
            init_fn: makes the state. It is traced, and runs only if nothing is to restore, or if only that tells where arrays lie.
            shardings: a pytree (or prefix) of shardings, a callable (abstract state) -> pytree, or None: where init_fn itself puts it.
            items: iterators are set in place; trees are references.
            source: the start, at step 0, of a run without a step. Another run (its newest step), (run, step), or the folder of one
                step or checkpoint. Or a function that gives one of these (or None); or {key of a state that is a dict: one of these}.
            source_select: picks the part that `source` has; the rest is initialized. A function of the abstract state gives that part
                as it lies in the source. Or a regular expression for paths joined by "/" ("params" takes all below it).
            partial: paths that the checkpoint, or the source, lacks are initialized.
            transforms: as of `restore`, for the source, and for a step of this run that hasn't the state's form as it is.

        Raises:
            ReferenceMismatchError: this run's step, or the source's, has other leaves. StepNotFoundError: there is no such source.
        """
        self._check_open()
        check_asked(items=items, call="restore_or_init")
        check_init(init_fn)
        check_source(source, source_select)
        abstract, init = abstract_state(init_fn, shardings)
        # Leaves that the checkpoint lacks keep the reference's value: they need real ones.
        reference, options = init() if partial else abstract, ReadOptions(partial=partial, transforms=transforms)
        wanted = Wanted(reference=reference, items=items, options=options, older_form=True)
        restored = self._events.restoring(lambda: self._restoring.restore(wanted))
        if restored is None and source is not None:
            restored = restore_from_source(source, source_select, abstract, init, options=options, items=items)
        if restored is None:
            restored = Restored(step=0, state=init(), items=dict(items or {}), tier="init")
        self._pipeline.prepare(restored.state, pack_items(real_items(items or {}, restored.items), process_index=self._rank))
        return restored

    # ------------------------------------------------------------ save

    @alone(SAVES)
    def save(
        self,
        step: int,
        state: object,
        *,
        items: Mapping[str, object] | None = None,
        metrics: Mapping[str, object] | None = None,
        custom: object = None,
        force: bool = False,
    ) -> bool:
        """After every step, on every process. Returns at once; the next step may donate `state`.

        A save that raises leaves no trace: the corrected call does what it would have done.

        Args:
            step: number of completed steps.
            state: any pytree of arrays and Python scalars.
            items: iterators (`get_state`/`set_state`), Orbax v1's checkpointables (`async` `save`/`load`), trees with arrays, or JSON
                values. All are serialized before this returns; states above 1 MiB only if it captures the step, else at `close`.
            metrics: numbers (or 0-d arrays, which may still be computing).
            custom: anything JSON.
            force: make this step durable although none is due. Where it is captured already, as after an evaluation, that capture becomes
                durable, with the metrics and custom values of this call.

        Returns:
            True exactly when this call makes the step durable; the same on every process. False for a step that is promised, or durable,
            already: a step number names one state. Step 0 is due only with `force`, or by a policy.

        Raises:
            ConfigError: an argument that can't be saved; names it. ReferenceMismatchError: no restart could take it (`check_saves`).
            StepOrderError: the step is older than the newest, or lies in storage from another past.
            CapacityError, BarrierTimeoutError (names the ranks that don't save), StaleAttemptError, Interrupted.
        """
        self._check_open()
        began_s = time.time()
        passes = self._cadence.begin(step := check_step(step), state, force=force)
        given = SaveArguments(
            step=step,
            state=state,
            metrics=hold_metrics(check_metrics(metrics)),
            custom=check_custom(custom),
            items=self._last.pack(items, passes=passes),
        )
        decided = functools.partial(self._last.decided, given.kept())
        decision = self._cadence.pass_by(step, decided) if passes else self._pipeline.save(given, force=force, decided=decided)
        count_save(time.time() - began_s)
        if decision is not None and decision.promised:
            self._events.saved(given.step, began_s, self._pipeline.data_bytes)
            self._ranking.look(given)
        self._events.durable(self._durable.told())
        if decision is not None and decision.stop:
            raise self._interrupt(decision.reason)
        return decision is not None and decision.promised

    def _interrupt(self, reason: str) -> Interrupted:
        """The training ends here, with this step durable; if it is not, that is named, and makes no failure of it."""
        step = self._last.step
        self._interrupted = Interrupted(reason, step=step, rank=self._rank)
        try:
            self._wait()
        except StorageError as error:
            if missing := self._ending.missing_at(step, error):
                self._interrupted = Interrupted(f"{reason}; {missing}", step=step, rank=self._rank, errors=error.errors)
                self._interrupted.__cause__ = error
        return self._interrupted

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would make the step durable by the step rule."""
        self._cadence.show_life()
        with self._pipeline.lock:
            return self._pipeline.machine.would_be_durable(check_step(step))

    @alone(SAVES)
    def reached_preemption(self, step: int) -> bool:
        """True on all processes at the same step, before and after its `save`: the training ends there."""
        self._check_open()
        return self._pipeline.reached(check_step(step))

    def section(self, name: str, *, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """`with manager.section("data"):` names what a loop does beside its steps, for goodput, slow ranks and the hang watch.

        Sections nest, and their times are exclusive. They count on the thread that has made the manager, and do nothing on others.

        Args:
            name: any text; of each the first 60 characters, and of a process 16 names. Later ones are "other".
            timeout_s: seconds, in place of `hang_timeout_s` while the rank is in it: an evaluation takes longer than a step.

        Raises ConfigError: the name is empty, or the time-out is no number above 0.
        """
        return section_of(self._session, self._pipeline, name, timeout_s)

    # ------------------------------------------------------------ steps

    def latest_step(self) -> int | None:
        """The newest durable step, None if there is none."""
        return self._durable.latest()

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> int | None:
        """The durable step with the best value of a metric. See `Reader.best_step`.

        Args:
            metric: None: the config's `best_metric`, else the only one that was saved.
            mode: None: the config's `best_mode`.
        """
        return self._durable.best(metric or self.config.best_metric, mode or self.config.best_mode)

    def all_steps(self) -> list[int]:
        """Durable steps, ascending."""
        return self._durable.list()

    def metadata(self, step: int | None = None) -> StepMetadata:
        """The items, trees, metrics and times of a durable step; None: the newest."""
        return self._durable.metadata(step)

    def delete(self, step: int) -> None:
        """Remove a durable step, and return when it is gone. One process may call, or each; a second call does nothing.

        Raises:
            StepNotFoundError: there is no such step. StorageError: it is the newest, is being read, or could not be removed.
        """
        self._check_open()
        self._durable.delete(check_step(step))

    def check_for_errors(self) -> None:
        """Raise StorageError if a due step could not be made durable since the last durable one."""
        self._cadence.show_life()
        if error := lost_steps((*self._pipeline.errors, *self._session.save_errors())):
            raise error

    def is_saving_in_progress(self) -> bool:
        """Whether a step for which `save` returned True is not durable yet, and may still become so.

        One process may call alone. It costs at most one question to the Coordinator in 0.1 s, and nothing when all is decided. False
        does not mean that all went well: `wait_until_finished` names what was lost, and it has a deadline.
        """
        self._check_open()
        self._cadence.show_life()
        return self._ending.is_saving()

    @alone(SAVES)
    def wait_until_finished(self) -> None:
        """Return when the durable saves begun so far are durable.

        Raises:
            StorageError: names the steps that are not, once: the next call waits for later saves.
        """
        self._check_open()
        self._wait()

    def _wait(self) -> None:
        reply = self._ending.flush()
        self._durable.answered(reply.durable_step)
        self._events.durable(reply.durable_step)

    # ------------------------------------------------------------ ends

    @alone(SAVES)
    def close(self) -> None:
        """Collective, a clean end: the newest saved step is durable, then the run is released.

        Raises:
            Interrupted: the training was told to end, by `reached_preemption` or by a `save` whose exception was swallowed.
            StorageError: the newest step could not be made durable. An older step that gave way is a warning, and in `RunResult.lost`.
            BarrierTimeoutError: names the ranks that did not call.
        """
        if not self._ending.begin() or self._ending.detached:
            return self._detach()
        try:
            if self._interrupted is None:
                self._last.make_durable()
                if reason := self._pipeline.machine.answers.told_to_stop:  # and the loop was left before that step's save
                    self._interrupt(reason)
                else:
                    self._ending.leave(self._note_end)
        except BaseException as error:
            self._fail(error)
            raise
        self._detach()
        if self._interrupted is not None:
            raise self._interrupted

    def _note_end(self, reply: LeaveReply) -> None:
        """For `fit`'s result."""
        self._events.durable(reply.step)
        if self._ending.launched and self._rank == 0:
            note(step=reply.step, metrics=self._last.metrics())

    def _detach(self) -> None:
        self._ending.detach()
        self._forget()

    def _fail(self, error: BaseException) -> None:
        self._ending.fail(error)
        self._forget()

    def _forget(self) -> None:
        self._last.forget()
        open_managers.remove(self.config, self)

    def _check_open(self) -> None:
        if self._session.is_the_parents:
            raise RaystateError("this StateManager is the parent's: this process was forked from it", rank=self._rank)
        if self._ending.detached:
            why = "this process has opened another one" if open_managers.has_another(self.config, self) else "a new one goes on"
            raise RaystateError(f"this StateManager of run {self.config.run!r} is closed: {why}", rank=self._rank)
        self._session.link.check()
