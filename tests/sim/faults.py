"""What can go wrong in a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raystate.core.formats.host_messages import Remember
from tests.sim.nodes import Node
from tests.sim.trainers import TrainerProc

if TYPE_CHECKING:
    from tests.sim.world import World


def _some_node(world: World) -> Node | None:
    nodes = [node for node in world.nodes if node.up]
    return nodes[int(world.random() * len(nodes))] if nodes else None


def _some_trainer(world: World) -> TrainerProc | None:
    living = [member for member in world.group.members if member.alive] if world.group is not None else []
    return living[int(world.random() * len(living))] if living else None


def kill_trainer(world: World) -> None:
    trainer = _some_trainer(world)
    if trainer is not None:
        trainer.die("killed")


def hang_trainer(world: World) -> None:
    """It sleeps, is replaced, and wakes up later as a zombie."""
    trainer = _some_trainer(world)
    if trainer is not None:
        trainer.wake_s = world.now_s + 3.0 + 10.0 * world.random()
        world.at(2.0, world.group_broken, trainer.group)


def stand_still(world: World) -> None:
    """It makes no step any more, and the Coordinator alone finds out. Every other one is in a section that may take longer."""
    trainer = _some_trainer(world)
    if trainer is not None and not world.healed:
        if trainer.rank % 2 and trainer.stage == "train":
            trainer.enter("eval", 9.0)
        trainer.wake_s = 1e9


def kill_actor(world: World) -> None:
    node = _some_node(world)
    if node is not None and node.actor is not None and node.actor.alive:
        node.actor.alive = False
        world.at(0.5 + world.random(), world.start_actor, node)
        if world.random() < 0.3:
            kill_trainer(world)


def hang_actor(world: World) -> None:
    """Its HostActor sleeps, and carries out late what it was told meanwhile."""
    node = _some_node(world)
    if node is not None and node.actor is not None and node.actor.alive:
        node.actor.wake_s = world.now_s + 1.0 + 12.0 * world.random()
        world.weaken(node)


def lose_arena(world: World) -> None:
    """A HostActor starts anew on its node and finds nothing of what its predecessor had; the trainers there die with their slots."""
    node = _some_node(world)
    if node is None or node.actor is None or not node.actor.alive:
        return
    node.actor.alive = False
    for one in node.sets.values():
        if one.trainer is not None:
            one.trainer.die("its shared memory is lost")
    node.sets.clear()
    node.memory = Remember()
    world.weaken(node)
    world.at(0.5 + world.random(), world.start_actor, node)


def restore_in_outage(world: World) -> None:
    """Storage is out, saves wait for it, and the script restores."""
    outage(world)
    world.at(1.0 + 2.0 * world.random(), _restore_next, world)


def _restore_next(world: World) -> None:
    world.restoring_next = True


def lose_node(world: World) -> None:
    """With its arena; another machine comes in its place."""
    node = _some_node(world)
    if node is not None:
        _lose(world, node)


def _lose(world: World, node: Node) -> None:
    node.up = False
    if node.actor is not None:
        node.actor.alive = False
    for one in node.sets.values():
        if one.trainer is not None:
            one.trainer.die("its node is lost")
    world.weaken(node)
    world.node_lost(node)
    world.at(1.0 + 8.0 * world.random(), _replace, world, node)


def lose_two_nodes(world: World) -> None:
    """At once, or one while what it took with it is made good."""
    lose_node(world)
    world.at(2.0 * max(0.0, world.random() - 0.5), lose_node, world)


def _replace(world: World, node: Node) -> None:
    if world.nodes[node.index] is node:
        world.add_node(node.index, int(node.id.split("g")[1]) + 1)


def cut_node(world: World) -> None:
    """Its network is gone for a while, its processes go on."""
    node = _some_node(world)
    if node is not None:
        node.cut_until_s = world.now_s + 2.0 + 12.0 * world.random()
        world.weaken(node)


def kill_coordinator(world: World) -> None:
    current = world.current
    if current is None or not current.alive:
        return
    current.alive = False
    world.at(0.5 + world.random(), world.start_coordinator, world.dead_attempts())


def replace_coordinator(world: World) -> None:
    """It sleeps, perhaps in the middle of an operation, and another one claims; later it wakes."""
    current = world.current
    if current is None or not current.alive or current.core.attempt == 0:
        return
    current.wake_s = world.now_s + 1.0 + 15.0 * world.random() ** 2
    world.start_coordinator(tuple(one for one in world.dead_attempts() if one != current.core.attempt))


def second_coordinator(world: World) -> None:
    """Another one claims while the first is wide awake."""
    if world.current is not None and world.current.core.attempt:
        world.start_coordinator(world.dead_attempts())


def sleep_in_append(world: World) -> None:
    world.trap = "append"


def sleep_in_publish(world: World) -> None:
    world.trap = "publish"


def sleep_in_retire(world: World) -> None:
    """Most often a rollback's."""
    world.trap = "retire"
    world.rolling_back = True
    if world.group is not None:
        world.group_broken(world.group)


def kill_at_first_piece(world: World) -> None:
    world.trap = "stage"
    kill_trainer(world)


def roll_back(world: World) -> None:
    world.rolling_back = True
    if world.group is not None:
        world.group_broken(world.group)


def outage(world: World) -> None:
    world.storage.outage = True
    world.at(1.0 + 6.0 * world.random(), _back, world)


def _back(world: World) -> None:
    world.storage.outage = False


def spring_folder_trap(world: World) -> None:
    """A commit is about to be appended: the storage's folder is not mounted, nor was it when the step was packaged."""
    if world.folder_goes_away:
        world.folder_goes_away = False
        world.fault_count += 1
        outage(world)
        world.storage.forget_uncommitted()


def lose_ack(world: World) -> None:
    world.lost_acks += 1 + int(2 * world.random())


def stop(world: World) -> None:
    world.stop()


def announce(world: World) -> None:
    """A node is to go away, and does so: the Coordinator is told, more than once, and perhaps late."""
    node = _some_node(world)
    if node is None:
        return
    within_s = 1.0 + 10.0 * world.random()
    for _ in range(3):
        world.at(within_s * world.random() ** 2, world.announce, node, world.now_s + within_s)
    world.at(within_s, _go_away, world, node)


def _go_away(world: World, node: Node) -> None:
    if node.up and not world.healed:
        _lose(world, node)


FAULTS: dict[str, Callable[[World], None]] = {
    "kill_trainer": kill_trainer,
    "kill_at_first_piece": kill_at_first_piece,
    "sleep_in_append": sleep_in_append,
    "sleep_in_publish": sleep_in_publish,
    "sleep_in_retire": sleep_in_retire,
    "sleep_in_retire_2": sleep_in_retire,
    "roll_back": roll_back,
    "hang_trainer": hang_trainer,
    "kill_actor": kill_actor,
    "hang_actor": hang_actor,
    "lose_arena": lose_arena,
    "restore_in_outage": restore_in_outage,
    "lose_node": lose_node,
    "cut_node": cut_node,
    "kill_coordinator": kill_coordinator,
    "replace_coordinator": replace_coordinator,
    "second_coordinator": second_coordinator,
    "outage": outage,
    "lose_ack": lose_ack,
    "stop": stop,
}


def lose_copying_node(world: World) -> None:
    """A node is lost while it copies, or while another one copies from it."""
    world.trap = "copy"


def spring_copy_trap(world: World, source: Node, target: Node) -> None:
    """A transfer from `source` to `target` is under way."""
    if world.trap == "copy" and not world.healed:
        world.trap = ""
        node = source if world.random() < 0.5 else target
        if node.up:
            world.fault_count += 1
            world.at(0.3 * world.random(), _lose_if_up, world, node)


def _lose_if_up(world: World, node: Node) -> None:
    if node.up:
        _lose(world, node)


def no_room_for_copies(world: World) -> None:
    """A node has no memory for copies, for a while."""
    node = _some_node(world)
    if node is not None:
        node.full_until_s = world.now_s + 3.0 + 10.0 * world.random()


def stall_copies(world: World) -> None:
    """Transfers to a node don't come to an end, for a while."""
    node = _some_node(world)
    if node is not None:
        node.stalled_until_s = world.now_s + 3.0 + 10.0 * world.random()


# With peer copies: losses come more often, and no Coordinator fights another one but with RIVALS.
COPY_FAULTS: dict[str, Callable[[World], None]] = {
    "kill_trainer": kill_trainer,
    "kill_at_first_piece": kill_at_first_piece,
    "roll_back": roll_back,
    "hang_trainer": hang_trainer,
    "kill_actor": kill_actor,
    "hang_actor": hang_actor,
    "lose_arena": lose_arena,
    "lose_node": lose_node,
    "lose_node_2": lose_node,
    "lose_node_3": lose_node,
    "lose_copying_node": lose_copying_node,
    "lose_copying_node_2": lose_copying_node,
    "cut_node": cut_node,
    "kill_coordinator": kill_coordinator,
    "outage": outage,
    "restore_in_outage": restore_in_outage,
    "stop": stop,
    "no_room_for_copies": no_room_for_copies,
    "stall_copies": stall_copies,
}


def all_stand_still(world: World) -> None:
    """A frozen cgroup, a moved machine: hours later all goes on, one process a little after the other."""
    still_s = 3.5 + 120.0 * world.random()
    world.heap[:] = [(when + still_s, number, proc, fn, args) for when, number, proc, fn, args in world.heap]
    # In the order of the heap: that of a set would be by address, and the same seed another schedule in each process.
    for proc in dict.fromkeys(proc for _, _, proc, _, _ in world.heap if proc is not None):
        proc.wake_s = max(proc.wake_s, world.now_s + still_s + world.random())


STILL: dict[str, Callable[[World], None]] = {"all_stand_still": all_stand_still}

# With several copies of each snapshot.
PAIRS: dict[str, Callable[[World], None]] = {"lose_two_nodes": lose_two_nodes, "lose_two_nodes_2": lose_two_nodes}

RIVALS: dict[str, Callable[[World], None]] = {
    name: FAULTS[name]
    for name in ("replace_coordinator", "second_coordinator", "sleep_in_append", "sleep_in_publish", "sleep_in_retire", "lose_ack")
}
