"""Before a `StateManager` opens: who this process is in the run, over which link it speaks, and which manager it has to close first."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import atexit
import logging
import os
import secrets
from typing import Any, Protocol

import jax
import numpy as np

from raystate import log_lines
from raystate.actors.launch_context import LaunchContext, check_world, leave_unseen
from raystate.config.errors import check_flag
from raystate.config.state_config import StateConfig, check_config
from raystate.core.formats.errors import ConfigError, RaystateError
from raystate.machine.sigterm import Sigterm
from raystate.runtime.link import Link
from raystate.storage import run_hash

logger = logging.getLogger("raystate")


class Closable(Protocol):
    """An open manager, as the next one sees it."""

    config: StateConfig

    def close(self) -> None: ...
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any, /) -> None: ...


class OpenManagers:
    """The open managers of this process, one for each run."""

    def __init__(self) -> None:
        self._by_run: dict[str, Closable] = {}
        self._of_scripts: list[Closable] = []  # that no launcher closes or starts again
        self._watching = -1  # the process that looks at its exit
        self.sigterm = Sigterm()

    def add(self, config: StateConfig, manager: Closable, *, launched: bool) -> None:
        """It is open now. `launched`: somebody starts this script again, and releases the run when it is done."""
        self._by_run[run_hash(config.storage, config.run)] = manager
        log_lines.begin(config.run)
        if launched:
            leave_unseen(None)
        else:
            if self._watching < 0:
                self._watching = os.getpid()
                atexit.register(self._at_exit)
            self._of_scripts.append(manager)
            self.sigterm.take()

    def _at_exit(self) -> None:
        if os.getpid() != self._watching:  # a fork's exit
            return
        stopped = self.sigterm.raised
        for manager in [one for one in self._by_run.values() if one in self._of_scripts]:
            if stopped is not None:  # and no `with` block was left by it
                manager.__exit__(type(stopped), stopped, None)
            else:
                logger.warning(
                    "the StateManager was not closed: steps after the last durable step may be lost. Call close(), or use it in a "
                    "`with` block",
                    extra={"run": manager.config.run},
                )

    def remove(self, config: StateConfig, manager: Closable) -> None:
        """It is closed."""
        name = run_hash(config.storage, config.run)
        if self._by_run.get(name) is manager:
            del self._by_run[name]
            log_lines.end(config.run)
        self._of_scripts = [one for one in self._of_scripts if one is not manager]
        if not self._of_scripts:
            self.sigterm.give_back()

    def has_another(self, config: StateConfig, manager: Closable) -> bool:
        """Whether one that is not this is open for its run."""
        return self._by_run.get(run_hash(config.storage, config.run), manager) is not manager

    def close_earlier(self, config: StateConfig, *, takeover: bool) -> None:
        """A notebook's cell that is run again opens its manager again: the one before is closed first.

        With `takeover` also one that uses the storage under another run's name: ended from outside, it would take this process with
        it.

        Raises:
            ConfigError: `takeover` is no bool. RaystateError: other processes have it open, too.
        """
        check_flag("takeover", takeover)
        earlier = self._by_run.get(run_hash(config.storage, config.run))
        if earlier is None and takeover:
            earlier = next((one for one in self._by_run.values() if one.config.storage == config.storage), None)
        if earlier is None:
            return
        run = earlier.config.run
        if jax.process_count() > 1:
            raise RaystateError(f"a StateManager of run {run!r} is open in this process: close() it first (on every process)")
        logger.info("the StateManager that this process has open is closed first", extra={"run": run})
        try:
            earlier.close()
        except RaystateError as error:
            logger.warning("closing the earlier StateManager: %s", error, extra={"run": run})


open_managers = OpenManagers()


def given_config(config: StateConfig | None, context: LaunchContext | None) -> StateConfig:
    """The caller's, else the launcher's. Raises ConfigError: there is none, or it is something else."""
    given = config if config is not None or context is None else context.config
    if given is None:
        raise ConfigError("StateManager() needs a StateConfig outside of raystate.fit and RayTrainCallback", field="config")
    return check_config(given, "StateManager()")


def is_launched(config: StateConfig, context: LaunchContext | None) -> bool:
    """Whether it is the run of this process's launcher, and not one that the script keeps beside
    it."""
    if context is None:
        return False
    return run_hash(config.storage, config.run) == run_hash(context.config.storage, context.config.run)


def ray_link(config: StateConfig, launch: str | None, rank: int) -> Link:
    """The way to the run's actors. Starts a local Ray if this process is in none."""
    from raystate.actors.link import RayLink
    from raystate.actors.local_ray import this_ray

    this_ray.enter()
    return RayLink(config, run_hash(config.storage, config.run), launch, rank)


def membership(context: LaunchContext | None, config: StateConfig) -> tuple[int, int, str, str | None]:
    """(rank, world, group token, launch token) of this process; no launch if it is alone.

    From here on what it compiles is kept, for `config` unless it was launched.
    """
    from raystate.actors.compiled import keep_compiled
    from raystate.actors.local_ray import this_ray

    rank, world = jax.process_index(), jax.process_count()
    this_ray.enter()  # programs lie beside its folder
    keep_compiled(config if context is None else context.config, rank=rank, world=world)
    if context is not None:
        check_world(context.world)
        return rank, world, context.group, context.launch
    if world == 1:
        return 0, 1, secrets.token_hex(4), None
    from jax.experimental import multihost_utils

    token = np.frombuffer(secrets.token_bytes(4), np.uint8)
    group = bytes(np.asarray(multihost_utils.broadcast_one_to_all(token))).hex()
    return rank, world, group, group
