"""A Ray that raystate starts in a script: from any thread, once for all, and without a trace in what the script computes."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import ray

from tests.patience import PATIENCE_S
from tests.processes import job_environment, run_python

THREADS = """
import random, sys, threading
import jax.numpy as jnp, numpy as np, psutil, raystate
from raystate import actors, train  # imports of others may draw

both = threading.Barrier(2)

def in_threads(*jobs):
    failed = []
    def run(job):
        try:
            job()
        except BaseException as error:
            failed.append(error)
            both.abort()
    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed

def config(name):
    return raystate.StateConfig(storage=f"{sys.argv[1]}/{name}", run=name, save_every_steps=1)
"""

MANAGERS = f"""{THREADS}
def drawn():
    name, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tolist(), rest

before = drawn()

def train(name, meanwhile=lambda: None):
    with raystate.StateManager(config(name)) as manager:
        x = manager.restore_or_init(lambda: {{"x": jnp.zeros(4)}}).state["x"]
        manager.save(1, {{"x": x + 1}})
        meanwhile()

def look():
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith(("ray::Coordinat", "ray::HostActor")):
            print("niceness", process.nice() - psutil.Process().nice())

if "stands" in sys.argv:  # as after `ray start`
    import ray
    ray.init(include_dashboard=False)
    train("a", look)
    sys.exit()
in_threads(lambda: train("a", lambda: (both.wait(), look(), both.wait())), lambda: train("b", lambda: (both.wait(), both.wait())))
in_threads(lambda: train("c"))
train("d")
assert drawn() == before, "random numbers were drawn"
"""

FITS = f"""{THREADS}
import os, random, time
from ray.train import ScalingConfig

def train(given):
    random.seed(7)
    seeded = random.getstate()
    with raystate.StateManager() as manager:
        x = manager.restore_or_init(lambda: {{"x": jnp.zeros(4)}}).state["x"]
        while given["waits"] and not os.path.exists(given["waits"]):
            time.sleep(0.05)
        manager.save(1, {{"x": x + 1}})
    assert random.getstate() == seeded, "random numbers were drawn"

def fit(name, waits=""):
    scaling = ScalingConfig(num_workers=1, resources_per_worker={{"CPU": 0.1}})
    raystate.fit(train, config(name), scaling_config=scaling, train_loop_config={{"waits": waits}})

def first():
    fit("a")
    open(sys.argv[1] + "/a has ended", "w").close()

in_threads(first, lambda: fit("b", sys.argv[1] + "/a has ended"))
import ray
assert not ray.is_initialized()
in_threads(lambda: raystate.StateManager(config("c")).close())
"""


class Proxy:
    """Answers nobody, and hears what they ask for."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._taken.append(self._listener.accept()[0])

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._listener.getsockname())

    def end(self) -> list[str]:
        """What was asked for."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self._listener.close()
        asked: list[str] = []
        for one in self._taken:
            with one, contextlib.suppress(BlockingIOError):
                one.setblocking(False)
                asked.append(one.recv(1000).decode().partition("\r\n")[0])
        return asked


def run(script: str, folder: Path, *given: str) -> str:
    """What a script prints, in the environment of a company's network, without what tests set for Ray."""
    proxy = Proxy()
    environment = {**job_environment(1), "RAY_ADDRESS": "local", "http_proxy": proxy.url, "https_proxy": proxy.url}
    for name in ("RAY_worker_niceness", "no_proxy", "NO_PROXY"):
        environment.pop(name, None)
    try:
        ended = run_python("-c", script, folder, *given, env=environment)
    finally:
        asked = proxy.end()
    assert "SIGTERM" not in ended.stderr
    # Ray itself asks which cloud it is in.
    own = ("127.0.0.1", "localhost", ray.util.get_node_ip_address())
    assert not [one for one in asked if any(address in one for address in own)], asked
    return ended.stdout


def test_managers_in_threads_share_the_ray_that_the_first_has_started(tmp_path: Path) -> None:
    """Linux ends what a thread has started with that thread. Ray can't be started twice, and draws random numbers for its ports."""
    said = run(MANAGERS, tmp_path)
    assert said.split() == ["niceness", "0"] * 4, "its actors would starve beside the script"


def test_fits_in_threads_share_the_ray_that_ends_with_the_last(tmp_path: Path) -> None:
    run(FITS, tmp_path)


def test_on_a_ray_that_the_script_has_started_its_actors_keep_up_with_it(tmp_path: Path) -> None:
    said = run(MANAGERS, tmp_path, "stands")
    assert said.split() == ["niceness", "0"] * 2
