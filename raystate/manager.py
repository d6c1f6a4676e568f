"""`StateManager`: what a training script holds. One per JAX process."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import json
import logging
import operator
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import numpy as np
import ray

from raystate import fault_points
from raystate._memory import MemorySnapshot, content_from_memory
from raystate._session import Session
from raystate._stager import Job, Stager
from raystate.actors.own_ray import start_ray
from raystate.arrays import Described, Plan, Spare, describe, hold, pack_items
from raystate.config import StateConfig
from raystate.core.errors import (
    BarrierTimeoutError,
    ConfigError,
    CorruptCheckpointError,
    Interrupted,
    RaystateError,
    StepNotFoundError,
    StorageError,
)
from raystate.core.messages import (
    DeleteAsked,
    FlushAsked,
    FlushReply,
    LeaveAsked,
    LeaveReply,
    ReleaseAsked,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
)
from raystate.core.trainer import SaveDecision, Trainer
from raystate.launch_context import check_world, current, note
from raystate.reader import Reader
from raystate.restored import STATE, ReadOptions, Restored, content_from_storage, open_step
from raystate.storage import open_storage

logger = logging.getLogger("raystate")
T = TypeVar("T")

CONFIRM_POLL_S = 0.002  # while a trainer waits at an agreed step for the others
GRANT_WAIT_S = 5.0  # then training begins without; slots come when the HostActor is back
TABLE_ROOM_BYTES = 256 << 10  # room for items, metrics and custom beyond what the first step needs


class StateManager:
    """Owns the training state's way from the devices to host memory and storage, and back.

    Collective, in the same order on all processes: construction, `restore*`, `close`. All else is local.

    Args:
        config: None: the one that `fit` or `RayTrainCallback` set.
        takeover: end another Ray job's use of the same run.

    Raises:
        ConfigError: no config, or the world size does not match `jax.process_count()`.
        RunInUseError, StorageError, BarrierTimeoutError.
    """

    def __init__(self, config: StateConfig | None = None, *, takeover: bool = False):
        context = current()
        given = config if config is not None or context is None else context.config
        if given is None:
            raise ConfigError("StateManager() needs a StateConfig outside of raystate.fit and RayTrainCallback", field="config")
        self.config: StateConfig = given
        self._launched = context is not None
        if not ray.is_initialized():
            start_ray()
        rank, world, group = _membership(context)
        launch = context.launch if context is not None else None if world == 1 else group
        self._session = Session(given, rank=rank, world=world, group=group, launch=launch, takeover=takeover)
        self._rank, self._world = rank, world
        self._storage = open_storage(given.storage)
        self._lock = threading.RLock()  # guards the machine, which the stager's thread also uses
        self._machine = self._new_machine()
        self._stager: Stager | None = None
        self._spare = Spare()
        self._plan: Plan | None = None  # of the last description; the description itself would keep a second state on the devices
        self._capacity: tuple[int, int, int] = (0, 0, 0)  # data and table bytes of a slot, bytes of buffers for writing it
        self._last: tuple[int, Any, dict[str, Any]] | None = None  # newest save() call, to stage it at the end if it wasn't
        self._interrupted: Interrupted | None = None
        self._closed = False
        self._durable_step = -1  # as wait_until_finished learned it; the host's word may be a moment behind
        self._reader = Reader(given.storage)

    def __enter__(self) -> StateManager:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        del kind, traceback
        if error is None:
            self.close()
        elif isinstance(error, Interrupted):
            self._detach()
        else:
            self._fail(error)

    def _new_machine(self) -> Trainer:
        return Trainer(
            self._rank,
            self._world,
            self._session.lineage,
            snapshot_every=self.config.snapshot_every_steps,
            save_every_steps=self.config.save_every_steps,
            slots=self.config.snapshot_slots,
        )

    # ------------------------------------------------------------ restore

    def restore(
        self,
        reference: Any = None,
        *,
        step: int | None = None,
        items: Mapping[str, Any] | None = None,
        partial: bool = False,
        cast: bool = False,
        shapes: Literal["match", "checkpoint"] = "match",
        transforms: Callable[[Any], Any] | None = None,
        rollback: bool = False,
    ) -> Restored | None:
        """Collective: the newest step of all tiers (or exactly `step`), placed as `reference` says. None if the run has no step.

        Raises:
            StepNotFoundError: `step` was given and is in no tier.
            ReferenceMismatchError: all differences between reference and step in one error.
            BarrierTimeoutError: names the ranks that did not call.
        """
        options = ReadOptions(partial=partial, cast=cast, shapes=shapes, transforms=transforms)
        set_aside: list[tuple[int, str]] = []
        reply = self._session.ask(
            lambda ask: RestoreAsked(ask=ask, lineage=self._session.lineage, rank=self._rank, step=step, rollback=rollback),
            timeout_s=self.config.barrier_timeout_s + self.config.host_timeout_s,
            phase="restore",
        )
        while True:
            assert isinstance(reply, RestoreChoice), reply
            choice = reply
            set_aside = list(choice.set_aside) or set_aside
            restored: Restored | None = None
            problem: RaystateError | None = None
            mistake: RaystateError | None = None
            try:
                restored = self._restore_choice(choice, reference, items, options)
            except (CorruptCheckpointError, StepNotFoundError, StorageError, BarrierTimeoutError) as error:
                problem = error
            except RaystateError as error:
                mistake = error  # the caller's: every rank will tell its own, nothing is wrong with the step
            reply = self._try_settle(choice, restored, problem)
            if mistake is not None:
                raise mistake
            if isinstance(reply, RestoreSettled):
                break
        with self._lock:
            self._machine.restored(choice.step)
            self._session.write_word(self._machine.word())
        if restored is None:
            return None
        for bad_step, reason in set_aside:
            logger.warning("step %d was set aside: %s", bad_step, reason)
        return _replace(restored, tier=reply.tier or restored.tier, set_aside=set_aside)

    def _try_settle(self, choice: RestoreChoice, restored: Restored | None, problem: RaystateError | None) -> Any:
        tier = restored.tier if restored is not None else "init"
        return self._session.ask(
            lambda ask: RestoreTried(
                ask=ask,
                lineage=self._session.lineage,
                rank=self._rank,
                step=choice.step,
                ok=problem is None,
                error=str(problem or ""),
                damaged=isinstance(problem, CorruptCheckpointError | StepNotFoundError),
                tier=tier,
            ),
            timeout_s=self.config.restore_timeout_s,
            phase="restore",
        )

    def _restore_choice(
        self, choice: RestoreChoice, reference: Any, items: Mapping[str, Any] | None, options: ReadOptions
    ) -> Restored | None:
        if choice.tier == "none":
            return None
        fault_points.reached("restoring")
        if choice.tier == "memory":
            snapshot = MemorySnapshot(self._session, choice)
            try:
                content = content_from_memory(snapshot, choice)
                return content.restore(reference, items, options, world=self._world, process_index=self._rank)
            finally:
                snapshot.close()
        content = content_from_storage(open_step(self._storage, choice.step), choice.step)
        return content.restore(reference, items, options, world=self._world, process_index=self._rank)

    def restore_or_init(
        self,
        init_fn: Callable[[], Any],
        shardings: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        source: Any = None,
        source_select: Callable[[Any], Any] | None = None,
        partial: bool = False,
    ) -> Restored:
        """Collective: the newest step of this run, else of `source`, else `jax.jit(init_fn, out_shardings=shardings)()`.

        Args:
            init_fn: makes the state; traced, and only run when there is nothing to restore.
            shardings: a pytree (or prefix) of shardings, a callable (abstract state) -> pytree, or None: what jit(init_fn) gives.
            items: iterators are set in place; trees are references.
            source: another run or a plain Orbax step to start from when this run has no step.
            source_select: picks the part of the abstract state that `source` has; the rest is initialized.
            partial: paths that the checkpoint lacks are initialized.
        """
        reference, init = _abstract_state(init_fn, shardings)
        if partial:
            # Leaves that the checkpoint lacks keep the reference's value: they need real ones.
            reference = init()
        restored = self.restore(reference, items=items, partial=partial)
        if restored is not None:
            self._prepare(restored.state, items)
            return restored
        if source is not None:
            restored = self._restore_from_source(source, source_select, reference, init)
        else:
            restored = Restored(step=0, state=init(), items=dict(items or {}), tier="init")
        self._prepare(restored.state, items)
        return restored

    def _restore_from_source(self, source: Any, select: Any, reference: Any, init: Callable[[], Any]) -> Restored:
        """Weights of another run; the step count starts anew."""
        wanted = select(reference) if select is not None else reference
        got = Reader(source).restore(wanted)
        state = got.state
        if select is not None:
            state = _overlay(init(), select, got.state)
        return Restored(step=0, state=state, metrics=got.metrics, custom=got.custom, tier="source")

    def _prepare(self, state: Any, items: Mapping[str, Any] | None) -> None:
        """Slots before the first step, so that the loop never waits for them."""
        packed = pack_items(items or {}, process_index=self._rank)
        self._describe(state, packed.trees)

    def _describe(self, state: Any, item_trees: Mapping[str, Any]) -> Described:
        described = describe({STATE: state, **item_trees}, process_index=self._rank, previous=self._plan)
        if described.plan is not self._plan:
            layout = described.layout
            need = (layout.data_bytes, 12 * len(layout.pieces) + TABLE_ROOM_BYTES, layout.write_buffer_bytes)
            if self._stager is None or any(map(operator.gt, need, self._capacity)):
                self._allot(*need)
        self._plan = described.plan
        return described

    def _allot(self, data_bytes: int, table_bytes: int, buffer_bytes: int) -> None:
        if self._stager is not None:
            self._stager.drain(self.config.save_timeout_s)
            self._stager.close()
        with self._lock:
            self._session.allot(
                data_bytes=data_bytes, table_bytes=table_bytes, buffer_bytes=buffer_bytes, slots=self.config.snapshot_slots
            )
            self._machine.new_slots(self.config.snapshot_slots)
            self._capacity = (data_bytes, table_bytes, buffer_bytes)
            self._session.write_word(self._machine.word())
        self._wait_for_grants()
        self._stager = Stager(self._session, take_slot=self._take_slot, on_staged=self._on_staged, on_failed=self._on_stage_failed)

    def _wait_for_grants(self) -> None:
        """The HostActor grants new slots within milliseconds; without them the first steps would be skipped."""
        deadline_s = time.monotonic() + GRANT_WAIT_S
        while time.monotonic() < deadline_s:
            word = self._session.host_word()
            if word is not None and any(word.grants):
                return
            time.sleep(CONFIRM_POLL_S)

    # ------------------------------------------------------------ save

    def save(
        self,
        step: int,
        state: Any,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        custom: Any = None,
        force: bool = False,
    ) -> bool:
        """After every step, on every process. Returns at once; the next step may donate `state`.

        Args:
            step: number of completed steps.
            state: any pytree of arrays and Python scalars.
            items: iterators (`get_state`/`set_state`), trees with arrays, or JSON values; serialized before this returns.
            metrics: numbers (or 0-d arrays, which may still be computing).
            custom: anything JSON.
            force: make this step durable although none is due.

        Returns:
            True exactly when this step will be durable; the same on every process.

        Raises:
            StepOrderError, CapacityError, BarrierTimeoutError (names the ranks that don't save), StaleAttemptError, Interrupted.
        """
        self._check_open()
        step = int(step)
        if self._stager is None:  # the first save of a loop that didn't begin with restore_or_init
            self._prepare(state, items)
        decision = self._keep(step, state, items, metrics, custom, force=force)
        self._last = (step, state, {"items": items, "metrics": metrics, "custom": custom})
        if decision.stop:
            self._interrupted = Interrupted(decision.reason, step=step, rank=self._rank)
            self.wait_until_finished()
            raise self._interrupted
        return decision.durable

    def _keep(self, step: int, state: Any, items: Any, metrics: Any, custom: Any, *, force: bool) -> SaveDecision:
        """Decide about a step and hold it if the decision says so."""
        stager = self._stager
        if stager is not None and self._machine.held is not None and (force or self._machine.would_be_durable(step)):
            # A loop that runs ahead of its devices: the durable step before this one is still being computed. Two copies of the state
            # beside it would be too many, and giving one up would break a promise; so the loop waits for its own computation.
            stager.wait_for_turn(self.config.save_timeout_s)
        decision = self._decide(step, force)
        if decision.wait:
            decision = self._wait_for_agreement(step, force)
        if decision.dropped is not None:
            assert stager is not None
            stager.drop(decision.dropped)
        if decision.action in ("stage", "hold"):
            self._stage(step, state, items, metrics, custom, decision)
        return decision

    def _decide(self, step: int, force: bool) -> SaveDecision:
        with self._lock:
            busy = self._stager is not None and self._stager.busy
            decision = self._machine.on_save(step, force=force, host_word=self._session.host_word(), stager_busy=busy)
            self._session.write_word(decision.word)
            return decision

    def _wait_for_agreement(self, step: int, force: bool) -> SaveDecision:
        """At an agreed step: wait until all ranks have acknowledged it, or it is withdrawn."""
        return self._poll(lambda: self._decide(step, force), lambda decision: not decision.wait, step)

    def _poll(self, look: Callable[[], T], done: Callable[[T], bool], step: int) -> T:
        deadline_s = time.monotonic() + self.config.barrier_timeout_s
        while not done(found := look()):
            if time.monotonic() > deadline_s:
                raise BarrierTimeoutError(
                    f"rank {self._rank} (host {self._session.host[:8]}) waited {self.config.barrier_timeout_s:.0f} s at step {step} "
                    "for the other ranks",
                    rank=self._rank, step=step, phase="agreement", waited_s=self.config.barrier_timeout_s,
                )  # fmt: skip
            time.sleep(CONFIRM_POLL_S)
        return found

    def _stage(self, step: int, state: Any, items: Any, metrics: Any, custom: Any, decision: SaveDecision) -> None:
        slot = decision.slot
        try:
            packed = pack_items(items or {}, process_index=self._rank)
            custom = _json_only("custom", custom)
            stager = self._stager
            described = self._describe(state, packed.trees)
        except BaseException:
            self._on_stage_failed(slot, step)
            raise
        if self._stager is not stager:  # the state has grown: other slots, and this step's went with the old ones
            slot = None
            if not decision.durable:
                return
            with self._lock:
                self._machine.hold_again(step)
        assert self._stager is not None
        self._stager.put(
            Job(
                step=step,
                slot=slot,
                held=hold(described, self._spare),
                values=described.values,
                durable=decision.durable,
                iterators=packed.iterators,
                json_items=packed.json_items,
                metrics=dict(metrics or {}),
                custom=custom,
            )
        )

    def _take_slot(self, step: int) -> int | None:
        with self._lock:
            taken = self._machine.take_slot(self._session.host_word()) if self._machine.held == step else None
            return None if taken is None else taken[0]

    def _on_staged(self, slot: int, step: int) -> None:
        with self._lock:
            self._machine.staged(slot, step)
            self._session.write_word(self._machine.word())

    def _on_stage_failed(self, slot: int | None, step: int) -> None:
        with self._lock:
            if slot is not None:
                self._machine.released(slot)
            elif self._machine.held == step:
                self._machine.held = None
            self._session.write_word(self._machine.word())

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would make the step durable by the step rule."""
        with self._lock:
            return self._machine.would_be_durable(int(step))

    def reached_preemption(self, step: int) -> bool:
        """True on all processes at the same step, before and after its `save`: the attempt ends there."""
        self._check_open()

        def look() -> tuple[bool, bool]:
            with self._lock:
                found = self._machine.reached(int(step), self._session.host_word())
                self._session.write_word(self._machine.word())
                return found

        return self._poll(look, lambda found: not found[1], int(step))[0]

    # ------------------------------------------------------------ steps

    def latest_step(self) -> int | None:
        """The newest durable step, None if there is none."""
        word = self._session.host_word()  # shared memory: a loop may ask at every step
        known = max(self._durable_step, word.durable_step if word is not None else -1)
        return known if known >= 0 else self._reader.latest_step()

    def best_step(self) -> int | None:
        """The durable step with the best `best_metric`."""
        return self._reader.best_step(self.config.best_metric, self.config.best_mode)

    def all_steps(self) -> list[int]:
        """Durable steps, ascending."""
        return self._reader.all_steps()

    def metadata(self, step: int) -> Any:
        return self._reader.metadata(step)

    def delete(self, step: int) -> None:
        """Remove a durable step, and return when it is gone. One process may call, or each of them.

        Raises:
            StepNotFoundError: there is no such step.
            StorageError: it is the newest one, it is being read, or it could not be removed.
        """
        self._check_open()
        self._session.ask(lambda ask: DeleteAsked(ask=ask, step=int(step)), timeout_s=self.config.save_timeout_s, phase="delete")

    def check_for_errors(self) -> None:
        """Raise StorageError if a due step could not be made durable since the last durable one."""
        word = self._session.host_word()
        errors = [*(self._stager.errors if self._stager is not None else []), *(word.save_errors if word is not None else ())]
        if errors:
            raise StorageError("not durable: " + "; ".join(errors), errors=tuple(errors))

    def wait_until_finished(self) -> None:
        """Return when the durable saves begun so far are durable. Raises StorageError naming what isn't."""
        self._check_open()
        self._drain()
        reply = self._session.ask(
            lambda ask: FlushAsked(ask=ask, lineage=self._session.lineage, rank=self._rank, step=self._machine.newest),
            timeout_s=self.config.save_timeout_s + self.config.barrier_timeout_s,
            phase="flush",
        )
        assert isinstance(reply, FlushReply), reply
        self._durable_step = max(self._durable_step, reply.durable_step)
        if reply.errors:
            raise StorageError("not durable: " + "; ".join(reply.errors), errors=reply.errors)

    def _drain(self) -> None:
        if self._stager is not None and not self._stager.drain(self.config.save_timeout_s):
            raise BarrierTimeoutError(
                f"rank {self._rank}: staging did not end within {self.config.save_timeout_s:.0f} s",
                rank=self._rank, phase="staging", waited_s=self.config.save_timeout_s,
            )  # fmt: skip

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """Collective, a clean end: the newest saved step is durable, then the run is released.

        Raises:
            Interrupted: the attempt was told to end (again, if `save` raised it and it was swallowed).
            StorageError: the last step could not be made durable.
            BarrierTimeoutError: names the ranks that did not call.
        """
        if self._closed:
            return
        if self._interrupted is not None:
            self._detach()
            raise self._interrupted
        try:
            self._stage_last()
            self._drain()
            reply = self._session.ask(
                lambda ask: LeaveAsked(ask=ask, lineage=self._session.lineage, rank=self._rank, step=self._machine.newest_kept),
                timeout_s=self.config.save_timeout_s + self.config.barrier_timeout_s,
                phase="close",
            )
            assert isinstance(reply, LeaveReply), reply
            self._note_end(reply)
        except BaseException as error:
            self._fail(error)
            raise
        self._detach()
        self._session.leave()

    def _note_end(self, reply: LeaveReply) -> None:
        """For `fit`'s result."""
        if self._launched and self._rank == 0:
            metrics: dict[str, Any] = dict(self._last[2]["metrics"] or {}) if self._last is not None else {}
            note(
                step=max(reply.step, 0),
                metrics={name: float(np.asarray(value)) for name, value in metrics.items()},
                recoveries=self._session.recoveries(),
            )

    def _stage_last(self) -> None:
        """The newest saved step may not have been due for a snapshot; its arrays still exist unless they were donated."""
        if self._last is None:
            return
        step, state, extras = self._last
        if self._machine.newest_kept >= step:
            return
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree_util.tree_leaves(state)):
            logger.warning("step %d was donated after its save and not snapshotted; the newest snapshot is the last step", step)
            return
        self._drain()  # nothing is in a hurry any more: no earlier durable step has to give way
        self._keep(step, state, extras["items"], extras["metrics"], extras["custom"], force=True)

    def _detach(self, failed: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        self._last = None
        with self._lock:
            if failed:
                self._machine.failed(failed)
            else:
                self._machine.closing()
            with contextlib.suppress(Exception):
                self._session.write_word(self._machine.word())
        if self._stager is not None:
            self._stager.close()
        self._session.close()

    def _fail(self, error: BaseException) -> None:
        """The training failed here. The others must not wait for this rank; what was saved stays."""
        if self._closed:
            return
        reason = f"rank {self._rank} failed: {type(error).__name__}: {error}".splitlines()[0]
        # First leave, then tell: whoever is still attached is ended with the group, and this process has an exception to report.
        self._detach(failed=reason)
        with contextlib.suppress(Exception):
            self._session.say_failed(reason, error)
            if not self._launched:  # nobody restarts this script: what is in memory becomes durable now
                self._session.ask(
                    lambda ask: ReleaseAsked(ask=ask, reason=reason), timeout_s=self.config.save_timeout_s, phase="release"
                )
                self._session.leave()

    def _check_open(self) -> None:
        if self._closed:
            raise RaystateError("this StateManager is closed", rank=self._rank)


def _membership(context: Any) -> tuple[int, int, str]:
    """(rank, world, group token) of this process."""
    rank, world = jax.process_index(), jax.process_count()
    if context is not None:
        check_world(context.world)
        return rank, world, context.group
    if world == 1:
        return 0, 1, secrets.token_hex(8)
    from jax.experimental import multihost_utils

    token = np.frombuffer(secrets.token_bytes(8), np.uint8)
    return rank, world, bytes(np.asarray(multihost_utils.broadcast_one_to_all(token))).hex()


def _abstract_state(init_fn: Callable[[], Any], shardings: Any) -> tuple[Any, Callable[[], Any]]:
    """(reference for a restore, a function that makes the fresh state)."""
    abstract = jax.eval_shape(init_fn)
    if callable(shardings):
        shardings = shardings(abstract)
    if shardings is None:
        compiled = jax.jit(init_fn).lower().compile()
        shardings = compiled.output_shardings
        init: Callable[[], Any] = compiled
    else:
        init = jax.jit(init_fn, out_shardings=shardings)
    full = jax.tree_util.tree_broadcast(shardings, abstract) if not _same_tree(shardings, abstract) else shardings

    def leaf(shape: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree_util.tree_map(leaf, abstract, full), init


def _same_tree(a: Any, b: Any) -> bool:
    return bool(jax.tree_util.tree_structure(a) == jax.tree_util.tree_structure(b))


def _overlay(state: Any, select: Callable[[Any], Any], part: Any) -> Any:
    """`state` with the leaves that `select` picks replaced by `part`'s, matched by identity of the selected leaves."""
    picked = jax.tree_util.tree_leaves(select(state))
    new = {id(old): value for old, value in zip(picked, jax.tree_util.tree_leaves(part), strict=True)}
    return jax.tree_util.tree_map(lambda leaf: new.get(id(leaf), leaf), state)


def _json_only(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be JSON: {error}", field=name) from None


def _replace(restored: Restored, **changes: Any) -> Restored:
    import dataclasses

    return dataclasses.replace(restored, **changes)
