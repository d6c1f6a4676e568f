"""The Coordinator actor: one per run, detached and named. It holds no accelerator and nothing that it can't rebuild."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorAlreadyExistsError, RayActorError, RayError

from raystate import log_lines
from raystate.actors.draining import DrainWatch
from raystate.actors.exporting import Exporter
from raystate.actors.hosts import RayHosts
from raystate.actors.kv_store import Kept, Tenant, cluster_token, is_dead, take_storage
from raystate.actors.local_ray import at_own_priority
from raystate.actors.log_routing import show_to
from raystate.actors.naming import NAMESPACE, coordinator_name, find_actor, host_name, protocol
from raystate.actors.places import Places
from raystate.actors.reporting import answers_within_s, record_folder
from raystate.actors.restarted import begin, is_restarted
from raystate.config.state_config import StateConfig
from raystate.core.coordinator.tenancy import Occupancy, Owner, Presence, admit, in_use, occupancy
from raystate.core.formats.errors import RunInUseError
from raystate.core.formats.messages import Event, Failure, HostId, Joined, JoinReply, ReleaseAsked, Reply, TrainerExited
from raystate.machine.own_time import own_time
from raystate.observe.ends import End, Told
from raystate.observe.metrics import samples
from raystate.observe.status import RunReport
from raystate.runtime.coordinator.one_storage import Claim
from raystate.waits import AGAIN_S, ANSWER_S, COORDINATOR_STARTS_S, GOODBYE_S, QUICK_ANSWER_S, RETRY_LAST_S, SOON_S

if TYPE_CHECKING:
    from raystate.runtime.coordinator.loop import CoordinatorLoop

logger = logging.getLogger("raystate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The asker may use the run.

    `outdated`: but this Coordinator has another configuration: field -> (its value, the asker's). The asker ends it and makes its own.
    """

    protocol: str
    outdated: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict[str, tuple[Any, Any]])


class CoordinatorActor:
    """A thin shell: the core machine decides, `CoordinatorLoop` carries out, this class makes it callable."""

    def __init__(self, config: StateConfig, run_hash: str, owner: Owner, ahead: tuple[HostId, ...] = ()):
        # Orbax imports JAX here, for small files only: it must never take an accelerator.
        os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
        for name in [name for name in os.environ if name.startswith("TPU_")]:
            del os.environ[name]
        log_lines.begin(config.run)
        self._config = config
        self._run_hash = run_hash
        self._kept_owner = Kept(f"raystate:owner:{run_hash}")
        self._kept_attempt = Kept(f"raystate:attempt:{run_hash}")
        self._restarted = is_restarted()
        self._owner = owner
        self._owner_s = own_time()  # when it last said hello
        self._given_up = ""  # why this use of the run ends: another one begins when it has
        self._places = Places(config, run_hash)
        self._lefts: set[int] = set()
        self._left_all = threading.Event()
        self._kill_me = ray.get_runtime_context().current_actor
        self._service: CoordinatorLoop | None = None
        begin(
            functools.partial(self._begin, ahead),
            on_failure=self._start_failed,
            pause_at_most_s=RETRY_LAST_S,
            for_s=COORDINATOR_STARTS_S,
        )
        if self._service is None:
            threading.Thread(target=self._end_unless_started, name="raystate-turn", daemon=True).start()

    def _begin(self, ahead: tuple[HostId, ...]) -> None:
        # A killed Coordinator comes back with the arguments of its first start: the run may have changed hands since.
        if self._restarted and (kept := self._kept_owner.get()) is not None:
            self._owner, ahead = kept, ()  # what has been kept says which of these still wait
        show_to(self._owner.job_id, self._owner.log_level)
        self._hosts = RayHosts(self._config, self._run_hash, lambda: self._owner.job_id, ahead)
        self._start()

    def _start_failed(self, error: BaseException, pause_s: float) -> None:
        logger.warning("the Coordinator can't start again yet (%r); another try in %g s", error, pause_s)

    def _start(self) -> Tenant | None:
        """Take the storage and begin; or, if another run of this cluster has it, that one."""
        mine = Tenant(run=self._config.run, run_hash=self._run_hash)
        other = take_storage(self._config.storage, mine, lambda one: find_actor(coordinator_name(one.run_hash)) is not None)
        if other is not None:
            return other
        from raystate.observe.record import Recorder
        from raystate.runtime.coordinator.loop import CoordinatorLoop
        from raystate.runtime.coordinator.retention import orbax_keep
        from raystate.storage import open_storage

        self._hosts.keep_waiting()
        self._kept_owner.put(self._owner)
        identity = f"{cluster_token()}.{self._run_hash}"
        known_hosts = self._hosts.known()
        before = self._kept_attempt.get() if self._restarted or known_hosts else None  # without hosts: of an ended use
        service = CoordinatorLoop(
            settings=dataclasses.replace(self._config.core_settings(), launched=self._owner.launched),
            keep=orbax_keep(self._config),
            storage=open_storage(self._config.storage),
            hosts=self._hosts,
            known_hosts=known_hosts,
            writer=f"{identity}.{secrets.token_hex(4)}",
            is_dead=functools.partial(is_dead, identity, self._config),
            on_end=self._on_end,
            on_crash=_crash,
            known_attempt=before or 0,
            on_claim=self._kept_attempt.put,
            restarted=self._restarted,
            run_metadata=self._config.run_metadata,
            recorder=Recorder(record_folder(self._config, self._run_hash)),
        )
        service.start()
        self._service = service
        Exporter(self._config.run, lambda: samples(service.status_to_export()), known_before=frozenset(known_hosts))
        DrainWatch(service.post, lambda: service.ended).start()
        return None

    def _end_unless_started(self) -> None:
        time.sleep(COORDINATOR_STARTS_S)
        if self._service is None:
            self._hosts.end_waiting()
            ray.kill(self._kill_me, no_restart=True)

    def _on_end(self, _reason: str) -> None:
        threading.Thread(target=self._end, name="raystate-end", daemon=True).start()

    def _end(self) -> None:
        self._left_all.wait(GOODBYE_S)
        self._kept_owner.delete()
        self._kept_attempt.delete()
        ray.kill(self._kill_me, no_restart=True)

    async def hello(self, owner: Owner, takeover: bool) -> Welcome | Failure:
        """Who is asking, and with which configuration. See `tenancy.admit` for who gets in."""
        if self._service is None and (other := self._start()) is not None:
            return await self._other_uses(other, takeover)
        service = self._started
        presence, now_s = await self._presence(service), own_time()
        if self._given_up or (service.ended and service.failed is None):
            return self._again(self._given_up or f"run {self._config.run!r} has been released, and its actors are about to end")
        if service.failed is not None:
            return service.failed
        admission = admit(self._owner, owner, presence, config=self._config, owner_s=self._owner_s, now_s=now_s, takeover=takeover)
        if admission.failure is not None:
            if admission.rests_on and not await self._trains(admission.rests_on):
                return dataclasses.replace(admission.failure, details={**admission.failure.details, "starting": True})
            return admission.failure
        before = self._owner
        if owner.identity != before.identity and (gone := await self._why_log_is_gone(service)):
            return self._without_log(service, gone, takeover or not presence.keeps)
        if self._owner is not before or self._given_up:
            return self._again(f"another process was faster to get run {self._config.run!r}")
        if owner.job_id != self._owner.job_id:
            show_to(owner.job_id, owner.log_level)
        if owner.identity != self._owner.identity or owner.rank == 0:
            self._owner = owner
            self._kept_owner.put(owner)
        self._owner_s = now_s
        return Welcome(protocol=protocol(), outdated=admission.replaces)

    @staticmethod
    async def _presence(service: CoordinatorLoop) -> Presence:
        """Before the claim, which may wait for storage, no event has told of a trainer."""
        if service.attempt < 0:
            return Presence()
        return await asyncio.wrap_future(service.look(lambda machine, now_s: machine.presence(now_s)))

    async def _trains(self, hosts: tuple[HostId, ...]) -> bool:
        """Whether trainers are connected to these hosts, by what they see now. Of one that does not answer, its last report counts."""

        async def connected(host: HostId) -> bool:
            try:
                actor = find_actor(host_name(self._run_hash, host))
                return actor is None or await asyncio.wait_for(actor.trainers.remote(), QUICK_ANSWER_S) > 0
            except (RayError, TimeoutError):
                return True

        return any(await asyncio.gather(*map(connected, hosts)))

    @staticmethod
    async def _why_log_is_gone(service: CoordinatorLoop) -> str:
        try:
            return await asyncio.wait_for(asyncio.to_thread(service.why_log_is_gone), ANSWER_S)
        except TimeoutError:  # storage is slow: nothing says that the log is gone
            return ""

    def _again(self, why: str) -> Failure:
        """The asker asks once more in a moment."""
        return Failure(error="RunInUseError", message=why, details={"run": self._config.run, "starting": True})

    def _without_log(self, service: CoordinatorLoop, gone: str, takeover: bool) -> Failure:
        """Another launch comes, and the folder of the run whose steps the hosts hold is gone."""
        if takeover:
            self._give_up(service, f"run {self._config.run!r} was given up: {gone}")
            return self._again(self._given_up)
        ways_out = (
            "bring it back; or pass takeover=True to give up what this cluster's memory holds of the run, and begin anew "
            "(StateManager and fit take it)"
        )
        details = {"operation": "start", "begun": False, "gone": True}
        return Failure(error="StorageError", message=f"{gone}; {ways_out}", details=details)

    def _give_up(self, service: CoordinatorLoop, why: str) -> None:
        self._given_up = why
        service.give_up(why)

    async def forget(self, why: str) -> None:
        """End, and give up what memory holds: the caller has seen that no process trains."""
        self._give_up(self._started, why)

    async def refuse(self, failure: Failure) -> None:
        """End, with this error for all who ask: for the launcher, before a trainer has joined."""
        self._started.refuse(failure)

    async def _other_uses(self, other: Tenant, takeover: bool) -> Failure:
        """Why another run has the storage; with `release`, the asker may end it first."""
        actor = find_actor(coordinator_name(other.run_hash))
        try:
            if actor is None:
                raise RayActorError
            state, owner, age_s = await asyncio.wait_for(actor.use.remote(), ANSWER_S)
        except (RayError, TimeoutError) as error:
            text = f"run {other.run!r} uses {self._config.storage}, and its Coordinator does not answer ({type(error).__name__})"
            return Failure(error="RunInUseError", message=text, details={"run": other.run, "starting": True})
        refusal = in_use(owner, state, age_s=age_s, storage=self._config.storage, run=other.run, asked_run=self._config.run)
        if state == "free" or takeover:
            return dataclasses.replace(refusal, details={**refusal.details, "release": other.run_hash})
        return refusal

    async def use(self) -> tuple[Occupancy, Owner, float]:
        """(whether the run's trainers are alive, whose they are, seconds since something was heard of them)."""
        presence, now_s = await self._presence(self._started), own_time()
        state = occupancy(self._owner, presence, owner_s=self._owner_s, now_s=now_s)
        age_s = now_s - max(self._owner_s, presence.heard_s)
        if self._started.ended or (state == "in use" and presence.hosts and not await self._trains(presence.hosts)):
            state = "starting"  # or free, as soon as its end is told
        return state, dataclasses.replace(self._owner, config=None), age_s

    async def status(self) -> RunReport:
        """What the run is doing. TimeoutError: its thread does not answer."""
        config, owner = self._config, dataclasses.replace(self._owner, config=None)
        report = RunReport(run=config.run, storage=config.storage, owner=owner, release_s=answers_within_s(config))
        if self._service is None:
            return report
        status, going = await asyncio.wait_for(asyncio.wrap_future(self._service.told()), ANSWER_S)
        status = await asyncio.to_thread(self._service.observers.with_goodput, status)
        return dataclasses.replace(report, status=status, going=going, said=log_lines.newest())

    @property
    def _started(self) -> CoordinatorLoop:
        if self._service is None:
            raise RunInUseError(f"run {self._config.run!r} has not got {self._config.storage}: another run of this cluster uses it")
        return self._service

    async def ask(self, event: Any) -> Reply:
        service = self._started
        if isinstance(event, Joined):
            self._places.joins(event)
        reply = await asyncio.wrap_future(service.ask(event))
        if isinstance(event, Joined) and isinstance(reply, JoinReply):
            assert service.claimed is not None
            refusal, is_final = await self._places.refusal(event.group, service.claimed)
            if refusal is not None and not await self._why_log_is_gone(service):  # else the folder is gone for everybody
                if is_final:
                    service.refuse(refusal)
                return refusal
        return reply

    async def claimed(self) -> tuple[Claim, str] | Failure:
        """What it has written to the storage first, and its node: for the launcher, who looks for it there. Or why it could not."""
        service = self._started
        while service.claimed is None:
            if service.failed is not None:
                return service.failed
            await asyncio.sleep(AGAIN_S)
        return service.claimed, ray.get_runtime_context().get_node_id()

    async def expect(self, hosts: tuple[HostId, ...]) -> None:
        """The launcher's word on where trainers of the next group start, if it is somewhere else than before."""
        if self._service is not None:
            for host in hosts:
                self._service.expect(host)

    async def prepare(self, hosts: tuple[HostId, ...]) -> None:
        """The launcher's word on where trainers of the next group could start: HostActors wait there, and are no hosts yet."""
        if self._service is not None:
            await asyncio.to_thread(self._hosts.prepare, hosts)

    async def tell(self, event: Event) -> None:
        if self._service is not None:
            self._service.post(event)

    async def failed(self, event: TrainerExited, end: End) -> None:
        """A trainer has raised an exception, and leaves."""
        if self._service is not None:
            self._service.ledger.raised(event.lineage, end)
            self._service.post(event)

    async def ended(self, group: str, seen: tuple[End, ...], within_s: float) -> Told:
        """The launcher's question how a worker group ended, of which it ends the other ranks next.

        It waits for the news of those that the launcher misses.
        """
        service = self._service
        if service is None or service.attempt < 0:
            return Told(ends=seen, has_joined=False)
        end_s = own_time() + within_s
        service.ledger.seen(group, seen, own_time())
        leaving: frozenset[HostId] = frozenset()
        with contextlib.suppress(TimeoutError):
            looked = service.look(lambda machine, _: machine.notices.hosts)
            leaving = await asyncio.wait_for(asyncio.wrap_future(looked), within_s)
        while not (told := service.ledger.ends(group)).is_all and own_time() < end_s:
            await asyncio.sleep(SOON_S)
        service.ledger.sweeps(group)
        return dataclasses.replace(told, newest_step=service.machine.joins.newest, leaving=leaving)

    async def news(self, after: tuple[int, int]) -> tuple[Any, ...]:
        return () if self._service is None else self._service.ledger.news(after)

    async def release(self, launch: str | None, event: ReleaseAsked) -> Reply:
        """End the run, if it belongs to this launch. None: also if it belongs to another."""
        if launch is not None and launch != self._owner.launch:
            text = f"run {self._config.run!r} belongs to another launch, by Ray job {self._owner.job_id}: it is not released"
            return Failure(error="RunInUseError", message=text, details={"job_id": self._owner.job_id})
        return await self.ask(event)

    async def left(self, rank: int, world: int) -> None:
        """A trainer, or the driver that asked for a release (as 0 of 1), has read its last reply."""
        self._lefts.add(rank)
        if len(self._lefts) >= world:
            self._left_all.set()

    async def protocol(self) -> str:
        return protocol()

    async def pid(self) -> int:
        return os.getpid()

    async def newest_step(self) -> int:
        return self._started.machine.joins.newest


def _crash() -> None:
    """End this process, and no other: if it still is the run's Coordinator, Ray starts it again. By its handle it might be the next one."""
    os.kill(os.getpid(), signal.SIGKILL)


def _kind(run_hash: str, owner: Owner, *, get_if_exists: bool) -> Any:
    return ray.remote(CoordinatorActor).options(
        name=coordinator_name(run_hash),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=get_if_exists,
        num_cpus=0,
        max_restarts=-1,
        # Not in the caller's placement group, such as a Tune trial's: Ray removes it with the trial, and
        # could never start this actor again. (test_isolation.test_a_run_outlives_the_placement_group_that_began_it)
        scheduling_strategy="DEFAULT",
        **({} if owner.launched else at_own_priority()),
    )


def ensure_coordinator(config: StateConfig, run_hash: str, owner: Owner) -> Any:
    """The run's Coordinator, made if there is none. Its process starts while the caller goes on."""
    return _kind(run_hash, owner, get_if_exists=True).remote(config, run_hash, owner)


def make_coordinator(config: StateConfig, run_hash: str, owner: Owner, ahead: tuple[HostId, ...]) -> Any | None:
    """The run's Coordinator, made by this very call; None: there is one.

    Args:
        ahead: nodes without a HostActor, on which the caller then has one made that waits.
    """
    try:
        return _kind(run_hash, owner, get_if_exists=False).remote(config, run_hash, owner, ahead)
    except ActorAlreadyExistsError:
        return None
