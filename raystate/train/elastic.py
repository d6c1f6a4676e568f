"""Elastic worker groups: raystate's answers to Ray Train's question how many workers there should be.

Ray Train's own elastic policy counts a node that is dying, and waits a minute for it. It ends the
workers in mid-step when it finds room for more. So the controller of an elastic run asks `Elastic`
(raystate/core) instead. A shrink needs nothing but the right number: the group has ended. A growth
begins in the Coordinator: all ranks stop at one step, as for a preemption, and the next group is
larger.

The policy is a class of Ray's, made in the driver and asked in the controller's process: `ElasticGroups.install` replaces its two
decisions there, for this one run. It still asks Ray's autoscaler for the most workers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from raystate.actors.draining import draining_nodes
from raystate.core.coordinator.context import ranks_text
from raystate.core.formats.texts import counted
from raystate.core.launcher.elastic import Elastic, Newest, Sizes, Wish, room_of
from raystate.machine.own_time import own_time
from raystate.patching import patch
from raystate.train import nodes
from raystate.train.rays import scaling_policy
from raystate.waits import LOOK_EVERY_S

logger = logging.getLogger(__name__)


class ElasticGroups:
    """The sizes of one controller's worker groups.

    Args:
        scaling: Ray Train's ScalingConfig; its `elastic_resize_monitor_interval_s` is the least time from a start to a growth.
        sizes: that the run may have.
        leaving: gives the nodes that are to go away.
        grow: asks the ranks to stop, for this reason.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        scaling: Any,
        sizes: Sizes,
        *,
        leaving: Callable[[], frozenset[str]],
        grow: Callable[[str], None],
        clock: Callable[[], float] = own_time,
    ):
        self._clock = clock
        self._scaling = copy.copy(scaling)  # as the user gave it: the controller's own soon says where each rank is to run
        self._leaving = leaving
        self._grow = grow
        self._decides = Elastic(sizes, float(scaling.elastic_resize_monitor_interval_s))
        self._held: list[str] = []  # node id of each worker of the present group: its places are its own
        self._looked_s = float("-inf")
        self.given_up = ""  # the size that was taken back last, in words, for an error of the smaller one

    def install(self) -> None:
        """Have this process's controller ask here."""
        groups = self

        def not_running(self: Any) -> Any:
            groups._request_most(self)
            size = groups._decides.size_for(groups._room(self, leaving=groups._leaving()), groups._clock())
            return scaling_policy.ResizeDecision(
                num_workers=size, resources_per_worker=groups._scaling._resources_per_worker_not_none
            )

        def running(self: Any, worker_group_state: Any, worker_group_status: Any) -> Any:  # noqa: ARG001
            groups._request_most(self)
            groups._look(self, groups._clock())
            return scaling_policy.NoopDecision()

        # tests/cluster/test_train_internals.py
        patch(scaling_policy.ElasticScalingPolicy, "make_decision_for_non_running_worker_group", not_running)
        patch(scaling_policy.ElasticScalingPolicy, "make_decision_for_running_worker_group", running)

    def _request_most(self, policy: Any) -> None:
        """Of Ray's autoscaler, wherever there can be any: it is not to be asked for the places of the present, smaller group."""
        policy.scaling_config = self._scaling
        policy._maybe_send_resource_request()

    # ------------------------------------------------------------ what the callback tells

    def holds(self, rank_nodes: Sequence[str]) -> None:
        """A group has its workers' places; none: it has given them back."""
        self._held = list(rank_nodes)

    def not_placed(self) -> None:
        """The group found no place."""
        self._decides.not_placed()

    def ended(self, newest: Newest, *, failed: bool) -> None:
        """The group has ended. `newest`: the newest step. `failed`: it counts as a failure."""
        if not failed:
            self.given_up = ""
        self._decides.ended(newest, failed=failed)

    def take_back(self, reason: str, cause: str) -> bool:
        """The group has failed for good, for this reason, the last time because of this. Whether the run goes on with fewer workers."""
        taken_back = self._decides.take_back(self._clock())
        if taken_back:
            size = counted(self._decides.tried, "worker")
            logger.warning("gave up on %s, %s", size, reason)
            self.given_up = f"{size} had been given up before, {reason}: {cause}"
        return taken_back

    def outcome(self, rank_nodes: Sequence[str]) -> str:
        """What becomes of the run's size in a group on these nodes, which doesn't hold them yet; in words for "the run …"."""
        told = self._decides.outcome(len(rank_nodes))
        without = {rank: node[:8] for rank, node in enumerate(self._held) if node not in rank_nodes}
        if told and without and len(rank_nodes) < len(self._held):
            return f"{told}, without the node of {ranks_text(without, without)}"
        return told

    def started(self, newest: Newest) -> None:
        """The group trains. `newest`: the newest step."""
        self._decides.started(self._clock(), newest)

    # ------------------------------------------------------------ room

    def _look(self, policy: Any, now_s: float) -> None:
        if self._decides.is_full or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            wish = self._decides.look(self._room(policy, leaving=frozenset(draining_nodes()), sure=False), now_s)
            if wish is not None and self._is_there(policy, wish, now_s):
                self._decides.asked(wish, now_s)
                self._grow(wish.reason)
        except Exception as error:  # Ray's head is out of reach for a moment: the training is fine
            logger.warning("can't look for room for more workers: %s: %s", type(error).__name__, error)

    def _is_there(self, policy: Any, wish: Wish, now_s: float) -> bool:
        """Ray may take seconds to notice that a node is gone."""
        room = self._room(policy, leaving=self._leaving())
        if room >= wish.workers:
            return True
        self._decides.look(room, now_s)  # it has to be there for a while again
        return False

    def _room(self, policy: Any, *, leaving: frozenset[str], sure: bool = True) -> int:
        per_worker = self._scaling._resources_per_worker_not_none
        most = self._decides.sizes.most
        places = nodes.places(per_worker, held=self._held, own=self._scaling.label_selector, most=most)
        places = {node: count for node, count in places.items() if node not in leaving}
        if sure:
            reachable = nodes.reachable(frozenset(places))
            places = {node: count for node, count in places.items() if node in reachable}
        room = min(room_of(places, self._scaling.placement_strategy), most)
        if self._scaling.use_tpu and self._scaling.topology and self._scaling.accelerator_type:
            return policy._get_strict_tpu_worker_count(room)  # whole slices
        return room
