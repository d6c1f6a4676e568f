"""Starting Ray for a script that has none."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Generator
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import ray

from raystate.actors.ray_discovery import strangers_ray
from raystate.actors.rays import authentication, worker
from raystate.core.formats.errors import RaystateError
from raystate.machine.load import load
from raystate.machine.sigterm import in_main_thread
from raystate.observe.delayed_line import told_if_long
from raystate.waits import AGAIN_S, ANSWER_S

NICENESS = "RAY_worker_niceness"  # the variable of Ray's setting

logger = logging.getLogger("raystate")


def has_dashboard() -> bool:
    """Whether the cluster that this process has joined has one."""
    return bool(worker.get_dashboard_url())


def why_not_joined(error: Exception, without_address: str) -> str:
    """What `ray.init` says, for people.

    Args:
        error: that it raised.
        without_address: what has failed where `RAY_ADDRESS` names no cluster.
    """
    why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    address = os.environ.get("RAY_ADDRESS")
    joins = address and address != "local"  # which has Ray start one
    what = f"the Ray of RAY_ADDRESS={address!r} could not be joined" if joins else without_address
    more = f"{load().capitalize()}; `ray start --head` and `ray status` in a shell say more"
    if "RAY_AUTH_MODE" not in os.environ and os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        more = "if its lines above name a token, set RAY_AUTH_MODE=token: the cluster was started on a machine that has one"
    return f"{what}: {why}. {more}"


def check_address() -> None:
    """See that a process listens at the host:port of `RAY_ADDRESS`, if it holds one.

    Ray itself would try for many minutes.

    A cluster of this machine, by localhost or the node's IP address, gets this machine's token, if there is one: `ray start` asks for it
    then. Ray does the same where it has found the cluster by itself; one elsewhere gets it only if the user says so
    (`RAY_AUTH_MODE=token`).

    Raises:
        ConnectionError: no process took a connection within 10 s.
    """
    named = re.fullmatch(r"(?P<host>[\w.-]+|\[[\da-fA-F:.]+\]):(?P<port>\d{1,5})", os.environ.get("RAY_ADDRESS", ""))
    if named is None:
        return
    host, port = named["host"].strip("[]"), int(named["port"])
    # Ray listens at the node's own address, and takes these names for it.
    here = ray.util.get_node_ip_address()
    is_loopback = host in ("localhost", "127.0.0.1")
    hosts = [host, here] if is_loopback else [host]
    if is_loopback or host == here:
        _use_token()
    deadline_s = time.monotonic() + ANSWER_S
    while True:
        for one in hosts:
            try:
                socket.create_connection((one, port), timeout=ANSWER_S).close()
                return
            except (OSError, OverflowError) as error:  # a port above 65535
                why = error
        if time.monotonic() > deadline_s:
            raise ConnectionError(f"no process answers there ({why})")
        time.sleep(AGAIN_S)


def _use_token() -> None:
    with _hushed(authentication):  # it says how to opt out, at each start
        authentication.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextlib.contextmanager
def _hushed(module: ModuleType) -> Generator[None]:
    notes = logging.getLogger(module.__name__)
    is_off, notes.disabled = notes.disabled, True
    try:
        yield
    finally:
        notes.disabled = is_off


class _ThisRay:
    """The Ray of this process: started once for all threads that ask."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._launches = 0
        self._stays = True
        self._ended = threading.Event()

    def enter(self, *, stays: bool = True) -> None:
        """Start it, if there is none.

        Args:
            stays: until this process ends. Else what is started here ends with the last `leave`, unless another caller lets it stay.
        """
        with self._turn:
            if not ray.is_initialized():
                self._start()
                self._stays = False
            self._stays |= stays
            self._launches += not stays

    def leave(self) -> None:
        with self._turn:
            self._launches -= 1
            if not self._stays and not self._launches:
                ray.shutdown()
                self._stays = True
                self._ended.set()

    def _start(self) -> None:
        if in_main_thread():
            return start_ray()
        started: Future[None] = Future()
        ended = self._ended = threading.Event()

        def start() -> None:
            try:
                with _hushed(worker):  # it says that only the main thread could have a handler of SIGTERM
                    started.set_result(start_ray())
                ended.wait()
            except BaseException as error:
                started.set_exception(error)

        # Linux ends Ray's processes with the thread that has started them.
        # (test_own_ray.test_managers_in_threads_share_the_ray_that_the_first_has_started)
        threading.Thread(target=start, name="raystate-ray", daemon=True).start()
        return started.result()


this_ray = _ThisRay()


def _has_joined() -> bool:
    """Whether this process has not started the Ray that it is in."""
    node = worker._global_node
    return node is None or not node.is_head()


def at_own_priority() -> dict[str, Any]:
    """Options of an actor that a plain script makes: it gets the script's niceness. Ray's 15 would leave it next to nothing beside a script
    that fills the cores, and its snapshots would stay behind by many steps. In a worker: as the worker."""
    if worker.global_worker.mode != worker.SCRIPT_MODE or (NICENESS in os.environ and not _has_joined()):
        return {}
    return {"runtime_env": {"env_vars": {NICENESS: str(max(0, os.getpriority(os.PRIO_PROCESS, 0)))}}}


def _init(address: str | None) -> None:
    try:
        ray.init(address, include_dashboard=False, logging_level=logging.WARNING)
    except (RuntimeError, OSError):
        if os.environ.get("RAY_ADDRESS", "local") != "local" or os.access(os.path.expanduser("~"), os.W_OK):
            raise
        # Ray was to start, and keeps the token for it in the user's home, which a container's user may not have.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        authentication.AuthenticationTokenLoader.instance().reset_cache()  # pyright: ignore[reportPrivateImportUsage]
        ray.init(address, include_dashboard=False, logging_level=logging.WARNING)


def start_ray() -> None:
    """`ray.init()`, which joins the cluster that `RAY_ADDRESS` names, or one of this user that runs on this machine. Says which one,
    or what it means that it had to start one.

    Raises:
        RaystateError: there is no Ray to join and none could be started; says why.
    """
    handler = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        # Of a fork in a process that uses JAX. Ray only starts programs, which is safe.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        named = os.environ.get("RAY_ADDRESS")
        stranger = None if named else strangers_ray()
        if stranger is not None:
            logger.warning(
                "the Ray at %s is of user %s and not joined. Set RAY_ADDRESS=%s to join it all the same",
                stranger.address, stranger.user, stranger.address,
            )  # fmt: skip
        asked = f"the Ray at {named}" if named else "the cluster of this machine, or a new one,"
        what = "a Ray of its own to start" if named == "local" else f"{asked} to answer"
        drawn = random.getstate()
        os.environ.setdefault(NICENESS, "0")  # of the workers of a Ray that is started: as this process, not 15 more
        with told_if_long(f"waits for {what}; {load()}"):
            try:
                check_address()
                with _hushed(authentication):
                    _init("local" if stranger else None)
            except Exception as error:  # Ray has no class for it: OSError, RuntimeError, ConnectionError, ValueError, …
                raise RaystateError(why_not_joined(error, "Ray could not be started on this machine"), phase="start") from None
            finally:
                random.setstate(drawn)  # Ray has drawn its ports
    if in_main_thread() and handler is not None:  # Ray has set one of its own in its place
        signal.signal(signal.SIGTERM, handler)
    if _has_joined():  # Ray's own line about it is off
        logger.info("joined the Ray cluster at %s", ray.get_runtime_context().gcs_address)
    else:
        logger.info(
            "this Ray was started by this process and ends with it: after a crash of the process the run goes on from its "
            "newest durable step. Run `ray start --head` first to keep the snapshots in memory, too"
        )
