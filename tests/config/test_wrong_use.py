"""Calls that somebody who comes from Orbax, Flax or Ray makes by mistake: each is told what was meant."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1
from ray.train import RunConfig
from ray.train.v2._internal.util import construct_train_func

import raystate
from raystate.actors import local_ray as own_ray
from raystate.arrays.tree import describe
from raystate.config.hints import FIELDS, MEMBERS
from raystate.core.formats.errors import ConfigError, ReferenceMismatchError
from raystate.manager import StateManager
from raystate.train import launch
from tests.model.world import Rank, World
from tests.processes import free_port, run_python

REFERENCE = {"w": np.zeros(3), "b": np.zeros(2)}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 3 and 8, which stock Orbax wrote; without metrics."""
    path = tmp_path_factory.mktemp("steps") / "run"
    with ocp.CheckpointManager(path) as manager:
        for step in (3, 8):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(3), "b": np.zeros(2)}))
    return path


READS: dict[str, tuple[Callable[[Any], object], type[Exception], tuple[str, ...]]] = {
    "restore(8)": (lambda path: raystate.Reader(path).restore(8), ReferenceMismatchError, ("did you mean step=8?",)),
    "load(path, 8)": (lambda path: raystate.load(path, 8), ReferenceMismatchError, ("did you mean step=8?",)),
    "restore(3, ref)": (
        lambda path: raystate.Reader(path).restore(3, REFERENCE),  # pyright: ignore[reportArgumentType]
        ConfigError,
        ("the first argument is the reference", "did you mean restore(reference, step=3)?"),
    ),
    "step='3'": (lambda path: raystate.Reader(path).restore(step="3"), ConfigError, ("'3'", "did you mean step=3?")),  # pyright: ignore[reportArgumentType]
    "step='last'": (lambda path: raystate.load(path, step="last"), ConfigError, ("an int >= 0", "'last'")),  # pyright: ignore[reportArgumentType]
    "metadata(step='3')": (lambda path: raystate.metadata(path, step="3"), ConfigError, ("did you mean step=3?",)),  # pyright: ignore[reportArgumentType]
    "a class as a leaf": (
        lambda path: raystate.Reader(path).restore({**REFERENCE, "w": np.ndarray}),
        ReferenceMismatchError,
        ("w: it is the class ndarray itself, not a value: give an array, or a jax.ShapeDtypeStruct(shape, dtype), in its place",),
    ),
    "a class as the reference": (
        lambda path: raystate.load(path, dict),
        ReferenceMismatchError,
        ("it is the class dict itself, not a value: did you mean dict()?",),
    ),
    "a function as a leaf": (
        lambda path: raystate.Reader(path).restore({**REFERENCE, "w": jax.nn.relu}),
        ReferenceMismatchError,
        ("w: it is the function relu", "eqx.filter"),
    ),
    "items=[…]": (
        lambda path: raystate.Reader(path).restore(items=["data"]),  # pyright: ignore[reportArgumentType]
        ConfigError,
        ("items must be a dict", "not a list", "items={'data': …}"),
    ),
    "shapes='any'": (lambda path: raystate.Reader(path).restore(shapes="any"), ConfigError, ("'match' or 'checkpoint'", "'any'")),  # pyright: ignore[reportArgumentType]
    "load(shapes='any')": (lambda path: raystate.load(path, shapes="any"), ConfigError, ("'match' or 'checkpoint'", "'any'")),  # pyright: ignore[reportArgumentType]
    "mode='minimum'": (lambda path: raystate.Reader(path).best_step(mode="minimum"), ConfigError, ("'min' or 'max'", "'minimum'")),  # pyright: ignore[reportArgumentType]
    "best_step('nope')": (
        lambda path: raystate.Reader(path).best_step("nope"),
        ConfigError,
        ("no step has 'nope'", "save(step, state, metrics={…})"),
    ),
    "Reader(config)": (
        lambda path: raystate.Reader(raystate.StateConfig(storage=path, run="lm")),  # pyright: ignore[reportArgumentType]
        ConfigError,
        ("not a StateConfig", "did you mean its storage"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_wrong_read_is_told_what_was_meant(name: str, steps: Path):
    call, kind, said = READS[name]
    with pytest.raises(kind) as caught:
        call(steps)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_a_lone_number_is_still_a_tree(tmp_path: Path):
    raystate.save(tmp_path / "number", 3)
    assert raystate.load(tmp_path / "number", 8) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("/path", "not a str: StateConfig(storage='/path', run=…)"),
        (Path("/path"), "StateConfig(storage='/path', run=…)"),
        ("configs/lm.yaml", "StateConfig.from_file('configs/lm.yaml')"),
        ({"storage": "/path"}, "not a dict: StateConfig(**settings)"),
        (raystate.StateConfig, "not the class StateConfig: StateConfig(storage=…, run=…), an object"),
        (3, "not a int: StateConfig(storage=…, run=…)"),
    ],
    ids=str,
)
def test_what_is_no_config_is_told_how_to_make_one(given: Any, said: str):
    for call in (raystate.StateManager, raystate.RayTrainCallback, lambda config: raystate.fit(print, config)):
        with pytest.raises(ConfigError) as caught:
            call(given)
        assert caught.value.field == "config"
        assert said in str(caught.value)


def test_fit_wants_the_function_first():
    config = raystate.StateConfig(storage="/nonexistent/lm", run="lm")
    with pytest.raises(ConfigError, match=r"not a StateConfig: fit\(train_fn, config\)"):
        raystate.fit(config, print)  # pyright: ignore[reportArgumentType]


def only_by_name(*, config: Any = None) -> Any:
    return config


@pytest.mark.parametrize("train_fn", [lambda: None, only_by_name])
def test_fit_drops_no_configuration_of_the_function(train_fn: Any):
    config = raystate.StateConfig(storage="/nonexistent/lm", run="lm")
    with pytest.raises(ConfigError, match="takes no positional argument: it would never see train_loop_config"):
        raystate.fit(train_fn, config, num_workers=1, train_loop_config={"lr": 0.1})


async def waits() -> None: ...


def gives() -> Any:
    yield 1


async def gives_later() -> Any:
    yield 1


class Waits:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("train_fn", "said"), [(waits, "async def"), (gives, "a `yield`"), (gives_later, "async def"), (Waits(), "async def")]
)
def test_fit_wants_a_function_that_runs_when_it_is_called(train_fn: Any, said: str):
    config = raystate.StateConfig(storage="/nonexistent/lm", run="lm")
    for one in (train_fn, functools.partial(train_fn)):
        with pytest.raises(ConfigError, match=f"{said}.*calling it runs nothing") as caught:
            raystate.fit(one, config, num_workers=1)
        assert caught.value.field == "train_fn"


@pytest.mark.parametrize("train_fn", [lambda given: given, lambda given=None: given, lambda *given: given[0]])
def test_the_function_gets_its_configuration_although_its_argument_has_a_default(train_fn: Any):
    """Ray Train calls it without, then."""
    given = {"lr": 0.1}
    context: Any = contextlib.nullcontext  # Ray calls it
    as_ray_calls_it = construct_train_func(launch._entry(train_fn, takes_config=True), given, context)
    assert as_ray_calls_it().value == given


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"env": ["A=1"]}, "env must be a dict of variables, not a list"),
        ({"env": {"A": 1}}, "env: A = 1: the value of an environment variable is text: '1'"),
        ({"env": {"A=B": "1"}}, "env: 'A=B' is no name"),
        ({"env": {"A": "1"}, "run_config": RunConfig(worker_runtime_env={"env_vars": {"A": "2"}})}, "'2' in run_config"),
        ({"datasets": [1]}, "datasets must be a dict of name and dataset, not a list"),
        ({"scaling_config": {"num_workers": 2}}, "scaling_config must be Ray Train's ScalingConfig, not a dict"),
        ({"run_config": {"name": "lm"}}, "run_config must be Ray Train's RunConfig, not a dict"),
        ({"jax_config": RunConfig()}, "jax_config must be Ray Train's JaxConfig, not a RunConfig"),
        ({"takeover": "no"}, "takeover must be True or False, not 'no'"),
    ],
    ids=["env is a list", "a number", "a name with =", "given twice", "datasets are a list", "scaling", "run", "jax", "takeover"],
)
def test_what_fit_passes_on_is_checked_before_anything_starts(arguments: Any, said: str):
    with pytest.raises(ConfigError) as caught:
        raystate.fit(print, raystate.StateConfig(storage="/nonexistent/lm", run="lm"), **arguments)
    assert said in str(caught.value)


def test_orbaxs_classes_are_pointed_to_ours():
    for name in ("Checkpointer", "CheckpointManager"):
        with pytest.raises(AttributeError, match=rf"{name}.*raystate\.StateManager"):
            getattr(raystate, name)
        assert not hasattr(raystate, name)
    for name in ("save_checkpointables", "training", "load_checkpointables", "save_checkpoint_multiprocess"):
        with pytest.raises(AttributeError, match=rf"{name}.*StateManager"):
            getattr(raystate, name)
    assert not set(MEMBERS) & set(raystate.__all__)


def test_orbaxs_own_names_are_all_known_or_pointed_to_ours():
    calls = {name for name in dir(v1) if name.startswith(("save", "load", "pytree", "checkpointables"))} | {"training"}
    assert not calls - set(MEMBERS) - set(raystate.__all__), "names of a newer Orbax: say what to use instead"


def test_a_mutable_reference_of_jax_is_refused_with_the_way_out(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"w: can't save a .*Ref: save what it holds, ref\[\.\.\.\].*jax\.new_ref"):
        raystate.save(tmp_path / "one", {"w": jax.new_ref(jnp.ones(2))})


def test_every_option_of_orbaxs_manager_has_its_equivalent():
    ours = set(raystate.StateConfig.model_fields)
    theirs = {field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)}
    assert not theirs - ours - set(FIELDS), "options of a newer Orbax: say what to use instead"
    assert not ours & set(FIELDS)
    for name in theirs - ours:
        given: Any = {name: 3}
        with pytest.raises(ConfigError) as caught:
            raystate.StateConfig(storage="/nonexistent/lm", run="lm", **given)
        assert caught.value.field == name
        assert FIELDS[name] in str(caught.value)
        assert str(caught.value).count("\n") == 0
    with pytest.raises(ConfigError, match="max_to_keep: there is no such field; use keep_last"):
        raystate.StateConfig(storage="/nonexistent/lm", run="lm", max_to_keep=3)  # pyright: ignore[reportCallIssue]


def test_a_config_that_is_changed_names_the_way():
    config = raystate.StateConfig(storage="/nonexistent/lm", run="lm")
    with pytest.raises(ConfigError, match=r"keep_last: a StateConfig does not change.*config\.replace\(keep_last=…\)"):
        config.keep_last = 5  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="did you mean 'keep_last'"):
        config.keep_lsat = 5  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="does not change"):
        del config.run  # pyright: ignore[reportAttributeAccessIssue]
    assert config.keep_last == 3
    assert config.replace(keep_last=5).keep_last == 5


def test_a_function_in_the_state_names_its_path_and_the_way_out():
    with pytest.raises(ConfigError, match=r"layers/0/act: .*eqx\.filter") as caught:
        describe({"state": {"layers": [{"w": np.zeros(2), "act": jax.nn.relu}]}})
    assert (caught.value.field, caught.value.path) == ("state", "layers/0/act")


def test_a_managers_calls_are_checked_before_anybody_is_asked():
    """In one process without Ray: nothing of a call that is refused has happened."""
    world = World()
    state = {"w": np.zeros(2, np.float32)}
    refused: list[str] = []

    def wrong(call: Callable[[], object]) -> None:
        with pytest.raises((ConfigError, ReferenceMismatchError)) as caught:
            call()
        refused.append(str(caught.value))

    def script(rank: Rank) -> None:
        manager: StateManager = rank.open("group")
        manager.restore(state)
        manager.save(1, state, metrics={"loss": 1.0}, force=True)
        manager.wait_until_finished()
        calls: Any = manager
        no: Any = "no"
        wrong(lambda: calls.restore(1))
        wrong(lambda: calls.restore(state, step="1"))
        wrong(lambda: calls.restore(state, items=["data"]))
        wrong(lambda: calls.restore_or_init(lambda: state, items=["data"]))
        wrong(lambda: calls.restore(state, shapes="any"))
        wrong(lambda: calls.restore(state, step=1, rollback=no))
        wrong(lambda: StateManager(world.config, takeover=no))
        wrong(lambda: calls.best_step("nope"))
        wrong(lambda: calls.best_step("loss", "minimum"))
        assert manager.best_step() == manager.best_step("loss", "max") == 1
        manager.close()

    world.play_all(script)
    expected = (
        "did you mean step=1?",
        "did you mean step=1?",
        "items=",
        "restore_or_init(",
        "'any'",
        "rollback",
        "takeover",
        "'nope'",
        "'minimum'",
    )
    assert [part for part, text in zip(expected, refused, strict=True) if part not in text] == []


@pytest.mark.parametrize("variable", ["RAY_ADDRESS", "RAY_TMPDIR"])
def test_a_ray_that_does_not_start_is_one_sentence(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, {"RAY_ADDRESS": "ftp://somewhere", "RAY_TMPDIR": str(tmp_path / "file")}[variable])
    said = {
        "RAY_ADDRESS": "RAY_ADDRESS='ftp://somewhere' could not be joined",
        "RAY_TMPDIR": "could not be started on this machine",
    }
    with pytest.raises(raystate.RaystateError) as caught:
        own_ray.start_ray()
    assert said[variable] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__, "Ray's own traceback is not shown"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_without_a_cluster_is_said_before_ray_looks_for_minutes(host: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_ray, "ANSWER_S", 0.5)
    address = f"{host}:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(raystate.RaystateError, match=rf"RAY_ADDRESS='{address}' could not be joined: no process answers there"):
        own_ray.start_ray()


def test_an_address_at_which_somebody_listens_is_left_to_ray(monkeypatch: pytest.MonkeyPatch):
    """At once, or after a while, as of a cluster that is just being started."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listener.getsockname()[1]}")
        opening: list[float] = []
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: (opening.append(seconds), listener.listen()))
        monkeypatch.setattr(own_ray, "time", clock)
        own_ray.check_address()
        assert len(opening) == 1
        own_ray.check_address()
        assert len(opening) == 1
    for other in ("auto", "local", "ray://127.0.0.1:1"):
        monkeypatch.setenv("RAY_ADDRESS", other)
        own_ray.check_address()


@pytest.mark.parametrize(("address", "is_here"), [("127.0.0.1:{}", True), ("[::1]:{}", False), ("ray://127.0.0.1:{}", False)])
def test_a_cluster_of_this_machine_gets_its_token(address: str, is_here: bool, tmp_path: Path):
    """Ray's first start makes one, `ray start` asks for it from then on, and Ray's driver finds it only without an address."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        environment = {**os.environ, "HOME": str(tmp_path), "RAY_ADDRESS": address.format(listener.getsockname()[1])}
        del environment["RAY_AUTH_MODE"]
        script = """if True:
            import contextlib, os
            from raystate.actors import local_ray as own_ray
            own_ray.ANSWER_S = 0.0
            with contextlib.suppress(ConnectionError):
                own_ray.check_address()
            from ray._raylet import AuthenticationMode, get_authentication_mode
            print(os.environ.get("RAY_AUTH_MODE"), get_authentication_mode() == AuthenticationMode.TOKEN)"""
        ran = run_python("-c", script, env=environment, code=None)
    assert ran.stdout.split() == (["token", "True"] if is_here else ["None", "False"]), ran.stderr
    assert "opt out" not in ran.stderr


def test_a_cluster_that_may_want_a_token_is_told_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "ftp://somewhere")
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(raystate.RaystateError, match="set RAY_AUTH_MODE=token"):
        own_ray.start_ray()


def test_fit_and_the_callback_refuse_workers_that_cannot_share_the_batch():
    from ray.train import ScalingConfig

    config = raystate.StateConfig(storage="/nonexistent/run", run="r")
    given: Any
    for given in ({"num_workers": (2, 3)}, {"scaling_config": ScalingConfig(num_workers=3)}):
        with pytest.raises(
            ConfigError, match="3 workers can't share a global batch of 8 examples evenly; of up to 3 these can: 1, 2"
        ):
            raystate.fit(print, config, global_batch=8, **given)
    with pytest.raises(ConfigError, match="global_batch = 0"):
        raystate.RayTrainCallback(config, global_batch=0)


def test_a_wrong_name_needs_nothing_heavy():
    program = "import raystate, sys\ntry: raystate.Checkpointer\nexcept AttributeError: sys.exit(3 if 'jax' in sys.modules else 0)"
    run_python("-c", program)


def test_settings_have_names() -> None:
    with pytest.raises(
        ConfigError, match=r"^'runs/lm' is given without a name; .* StateConfig\(storage='runs/lm', run=…\)"
    ) as found:
        raystate.StateConfig("runs/lm")  # type: ignore[misc]
    assert found.value.field == "storage"
