"""What every layer shares: the environment, the order (fast layers first), and runs whose shared memory is checked at the end."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from raystate.arena import default_root, sweep
from tests.folders import MODEL_NAME, hold, remove_unheld
from tests.processes import collect_rarely, xla_flags

# Before anything imports jax, ray or gcsfs; child processes inherit it.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": xla_flags(8),
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",  # nobody reads them, and each node's agent gathers them every five seconds
    # A process of its own for each worker group, which asks whether the provider will take a node. tests/cluster/test_train_fit.py has it.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Waiting processes double what each of the many short runs costs. Where they matter, a test switches them on.
    "RAYSTATE_STANDBY": "0",
    "RAY_worker_niceness": "0",  # else, on a machine that does much else, Ray's workers (15) get next to nothing
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else every gcsfs call to a local server hangs on a gRPC probe
    # Else requests looks through the whole environment for proxies at each of its requests to a local server.
    "NO_PROXY": "127.0.0.1,localhost",
    "PYTHONFAULTHANDLER": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# Tests read what raystate logs where pytest collects it; tests/config/test_log_lines.py has raystate's own lines.
logging.getLogger("raystate").handlers.clear()
logging.getLogger("raystate").propagate = True

_SHM = Path("/dev/shm")

# The tests compile the same programs again and again, in processes of their own.
_COMPILED = "JAX_COMPILATION_CACHE_DIR"
_COMPILED_NAME = "raystate-tests-jit-"
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _remove_what_the_killed_left() -> None:
    remove_unheld(Path(tempfile.gettempdir()), _COMPILED_NAME)
    remove_unheld(_SHM, MODEL_NAME)
    with contextlib.suppress(OSError):  # no shared memory here: the tests that need it say so
        sweep(default_root())  # arenas of clusters that a killed run of tests has left


# Here, not in pytest_configure: by then the conftest.py of a folder that was named may have imported jax, which reads this once.
if _COMPILED not in os.environ:  # the workers of pytest-xdist share that of the process that started them
    _remove_what_the_killed_left()
    os.environ[_COMPILED] = tempfile.mkdtemp(prefix=_COMPILED_NAME)
    hold(os.environ[_COMPILED])
    atexit.register(shutil.rmtree, os.environ[_COMPILED], ignore_errors=True)

os.environ.setdefault("RAYSTATE_SEED", str(secrets.randbelow(1000)))

collect_rarely()  # a tenth of the time of many tests; they leave little

# Wall-clock deadlines per example say nothing on a shared machine.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")

_RELEASE_S = 300.0
_LAYERS = (
    "core",
    "house",
    "config",
    "arena",
    "arrays",
    "orbax",
    "testing",
    "cli",
    "compat",
    "package",
    "actors",
    "model",
    "storage",
    "gcs",
    "damage",
    "reshard",
    "jobs",
    "docs",
    "programs",
    "cluster",
    "timed",
)
# Files that take half a minute or more, here or in `make test-long`, the longest first. The processes of pytest-xdist begin them before all
# others: one that comes last leaves the other core with nothing to do.
_LONGEST = (
    "docs/test_examples_on_ray.py",
    "programs/test_groups.py",
    "programs/test_adopted.py",
    "programs/test_scripts.py",
    "programs/test_told_early.py",
    "storage/test_crash_points.py",
    "storage/test_log_bases.py",
    "reshard/test_reshard.py",
    "jobs/test_lm_model.py",
    "cluster/test_drill.py",
    "cluster/test_submitted.py",
    "cluster/test_two_disks.py",
    "cluster/test_rehearse.py",
    "cluster/test_preemption.py",
    "cluster/test_digits.py",
    "cluster/test_memory_stays.py",
    "cluster/test_matrix.py",
    "cluster/test_misuse.py",
    "cluster/test_hangs.py",
    "cluster/test_train_fit.py",
    "cluster/test_train_blame.py",
    "cluster/test_sharing.py",
    "cluster/test_outside.py",
    "cluster/test_gcs.py",
    "cluster/test_isolation.py",
    "cluster/test_reshard.py",
)
# Left to `make test-more`: `make test` shows each room in five minutes. Single tests of other files have the mark themselves.
_MORE = (
    "actors/test_whose_ray.py",
    "arrays/test_memory.py",
    "arrays/test_processes.py",
    "cli/test_import_again.py",
    "compat/test_flax_on_gcs.py",
    "compat/test_flax_several.py",
    "compilation/test_every_rank.py",
    "core/test_scaling.py",
    "damage/test_damage.py",
    "damage/test_log_damage.py",
    "damage/test_said.py",
    "docs/test_examples.py",
    "docs/test_site.py",
    "gcs/test_clients.py",
    "gcs/test_counts.py",
    "gcs/test_faults.py",
    "gcs/test_process.py",
    "jobs/test_evaluate_lm.py",
    "jobs/test_lm_model.py",
    "jobs/test_lm_train.py",
    "jobs/test_quickstart.py",
    "model/test_away.py",
    "model/test_ctrl_c.py",
    "model/test_pace.py",
    "model/test_rehearse_command.py",
    "orbax/test_adoption.py",
    "orbax/test_any_state.py",
    "package/test_accelerator.py",
    "reshard/test_memory.py",
    "reshard/test_reshard.py",
    "storage/test_crash_points.py",
    "storage/test_gcs.py",
    "storage/test_large_objects.py",
    "storage/test_log_bases.py",
    "storage/test_power_loss.py",
    "storage/test_removing.py",
    "storage/test_replacing.py",
    "storage/test_s3.py",
    "storage/test_step_crashes.py",
)
_TEST_BY_TEST = ("tests/core/", "tests/model/", "tests/docs/test_examples_on_ray.py")
_WHOLE = ("tests/core/test_scaling.py",)  # of these: what it counts is counted once
_RUN_TAG = f"t{os.getpid()}x{secrets.token_hex(3)}"  # no two test runs on a machine share a run name
_counter = itertools.count()


_MESH_OPTION = "--under-mesh"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _MESH_OPTION,
        choices=("auto", "explicit"),
        help="run every test of this process under jax.set_mesh of 8 devices, with axes of this type",
    )


@contextlib.contextmanager
def _set_mesh(config: pytest.Config, sizes: tuple[int, ...], names: tuple[str, ...]) -> Iterator[Any]:
    """A mesh of 8 devices; with the option, its axes are of that type and it is set."""
    import jax
    from jax.sharding import AxisType

    kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    chosen = config.getoption(_MESH_OPTION)
    if chosen is None:
        yield jax.make_mesh(sizes, names)
        return
    mesh = jax.make_mesh(sizes, names, axis_types=(kinds[chosen],) * len(names))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="session", autouse=True)
def _under_mesh(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption(_MESH_OPTION) is None:
        yield  # many suites need no jax
        return
    with _set_mesh(request.config, (4, 2), ("ambient_x", "ambient_y")):
        yield


@pytest.fixture(scope="session")
def own_mesh(request: pytest.FixtureRequest) -> Callable[[tuple[int, ...], tuple[str, ...]], Any]:
    """(sizes, axis names) -> context manager that gives a mesh, for tests that compute on it."""
    return functools.partial(_set_mesh, request.config)


_process = os.getpid()
_ending = False


def _on_sigterm(number: int, _frame: object) -> None:
    """As after Ctrl-C: fixtures end what they have started and remove what they have made."""
    global _ending
    if os.getpid() != _process:  # a fork of this process has no fixtures
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif not _ending:  # `timeout` sends it twice
        _ending = True
        pytest.exit("SIGTERM", returncode=128 + number)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    signal.signal(signal.SIGTERM, _on_sigterm)  # ray.init in a fixture puts its own there, which only fails the test


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, _on_sigterm)
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(_AtOnce(config))


class _AtOnce:
    """Names a test as soon as it has failed: what pytest says of it comes at the end, minutes later."""

    def __init__(self, config: pytest.Config):
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        shown: Any = self._config.pluginmanager.getplugin("terminalreporter")
        if report.failed and shown is not None:
            why = getattr(getattr(report.longrepr, "reprcrash", None), "message", "").partition("\n")[0]
            shown.write_line(f"\nFAILED {report.nodeid}: {why[:200]}", red=True)


def pytest_report_header() -> str:
    return f"RAYSTATE_SEED={os.environ['RAYSTATE_SEED']} (chooses what is killed when)"


def _layer(item: pytest.Item) -> str:
    relative = item.path.relative_to(Path(__file__).parent)
    return relative.parts[0] if len(relative.parts) > 1 else ""


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


def _longest_first(item: pytest.Item) -> int:
    file = _file(item)
    return _LONGEST.index(file) if file in _LONGEST else len(_LONGEST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("RAYSTATE_ALL") and "long" not in (config.getoption("markexpr") or ""):
        left = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)
    for item in items:
        if _layer(item) == "cluster":
            item.add_marker(pytest.mark.cluster)
        if _file(item) in _MORE:
            item.add_marker(pytest.mark.more)
    # Stable: the order within a layer stays. A layer that isn't listed comes after those that are.
    items.sort(key=lambda item: _LAYERS.index(_layer(item)) if _layer(item) in _LAYERS else len(_LAYERS))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_longest_first)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` whole files, but for layers of many tests that need nothing of their files, and for one file
    that takes longer than half of all: these test by test."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            alone = nodeid.startswith(_TEST_BY_TEST) and not nodeid.startswith(_WHOLE)
            return nodeid if alone else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FreshRun:
    """A run of this test alone: a storage directory and a name that no other test and no other test run uses."""

    storage: str
    run: str

    def arenas(self) -> list[Path]:
        """What this run has in shared memory now."""
        from raystate.storage.url import run_hash

        return sorted(default_root().glob(f"raystate-{run_hash(self.storage, self.run)}-*"))


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[[], FreshRun]]:
    """A factory of fresh runs; when the test is over, none of them may have left anything in shared memory."""
    made: list[FreshRun] = []

    def make() -> FreshRun:
        name = f"{_RUN_TAG}-{next(_counter)}"
        made.append(FreshRun(storage=str(tmp_path / name), run=name))
        return made[-1]

    yield make
    deadline_s = time.monotonic() + _RELEASE_S
    while left := [str(path) for run in made for path in run.arenas()]:
        if _ending:  # who would release them may have had the signal, too
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            break
        # A failed attempt's run is released by its actors, not by the caller who was told of the failure.
        assert time.monotonic() < deadline_s, f"left in shared memory: {left}"
        time.sleep(0.05)
