"""Small files of a step that say anything at all: every reader gives a RaystateError or an answer, and no other exception.

A run goes back to an older step only for damage that is called so. `tests/damage/test_damage.py` flips bits; here whole values change.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import raystate
from raystate.cli import app
from raystate.core.formats.errors import CapacityError, CorruptCheckpointError, RaystateError, ReferenceMismatchError
from raystate.inspection.verification import verify_step
from raystate.machine.memory import MOST_READ_BYTES
from raystate.storage import open_storage
from tests.orbax.published import publish

SEED = int(os.environ["RAYSTATE_SEED"])
ROUNDS = int(os.environ.get("RAYSTATE_ROUNDS", "4"))  # per file
DEEP = b"[" * 100_000
LEAF = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False}}
NOVEL = {"value_type": "Novel", "skip_deserialize": False}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run` with steps 1 and 2; `plain`, a tree in files without a database."""
    root = tmp_path_factory.mktemp("said")
    for step in (1, 2):
        publish(root / "run", step)
    tree = {"w": np.arange(3, dtype=np.float32), "layers": [{"b": np.ones((2, 2))}], "name": "x", "n": 3}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(root / "plain", tree)
    return root


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def plain(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written / "plain", tmp_path / "plain")
    return tmp_path / "plain"


def command(*arguments: object) -> int:
    """Its exit code; raises what the command's entry point would show as a traceback."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
        try:
            return app([str(argument) for argument in arguments], standalone_mode=False) or 0
        except SystemExit as ended:
            return int(ended.code or 0)
        except RaystateError:
            return 1


def readers(root: Path, step: int) -> dict[str, Callable[[], Any]]:
    """Everything that looks at a step."""
    return {
        "load": lambda: raystate.load(root),
        "metadata": lambda: raystate.metadata(root),
        "restore": lambda: raystate.Reader(root).restore(step=step, items={"notes": None}),
        "best_step": lambda: raystate.Reader(root).best_step("loss"),
        "follow": lambda: next(raystate.Reader(root).follow(timeout_s=0.0)),
        "verify": lambda: verify_step(open_storage(root), step, folder="" if step == 0 else None),
        "ls": lambda: command("ls", root),
        "ls --json": lambda: command("ls", "--json", root),
        "inspect": lambda: command("inspect", root),
        "inspect --json": lambda: command("inspect", "--json", root),
    }


def outcomes(root: Path, step: int) -> dict[str, Any]:
    """What each gives: a RaystateError or an answer. Raises anything else."""
    found: dict[str, Any] = {}
    for name, read in readers(root, step).items():
        try:
            found[name] = read()
        except RaystateError as error:
            found[name] = error
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error
    return found


# ---------------------------------------------------------------- as they were found

FOUND = {
    "a deep step": ("_CHECKPOINT_METADATA", DEEP),
    "a deep tree": ("state/_METADATA", DEEP),
    "deep metrics": ("metrics/metrics", DEEP),
    "a list of metrics": ("metrics/metrics", b"[1,2]"),
    "an unknown type": ("state/_METADATA", json.dumps({"tree_metadata": {"a": {**LEAF, "value_metadata": NOVEL}}}).encode()),
    "custom metadata": ("_CHECKPOINT_METADATA", b'{"custom_metadata": 7}'),
    "no text": ("state/_METADATA", json.dumps({"tree_metadata": {"a": LEAF}}).replace('"w"', '"\\ud800"').encode()),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_file_of_another_form_is_damage(name: str, run: Path):
    file, data = FOUND[name]
    (run / "2" / file).write_bytes(data)
    found = outcomes(run, 2)
    for reader in ("load", "metadata", "restore", "follow"):
        assert isinstance(found[reader], CorruptCheckpointError), reader
    assert found["verify"].bad
    assert found["inspect"] == 1
    for arguments in (("diff", run, 1, 2), ("export", run, 2, run.parent / "out"), ("import", run, run.parent / "other")):
        assert command(*arguments) in (0, 1)  # what they don't need they don't read
    assert raystate.Reader(run).restore(step=1).step == 1


def test_a_metric_that_no_float_can_hold_is_compared(run: Path):
    """JSON has such integers, and stock Orbax writes them: best_step ended in OverflowError."""
    (run / "2" / "metrics/metrics").write_text(json.dumps({"loss": 10**400}))
    found = outcomes(run, 2)
    assert (found["best_step"], found["ls"], found["ls --json"]) == (1, 0, 0)
    assert raystate.Reader(run).best_step("loss", "max") == 2
    assert command("ls", run, "--sort", "loss") == 0


HUGE = MOST_READ_BYTES + 1  # of a file that takes no room on the disk


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt", "metrics/metrics"])
def test_a_small_file_that_fills_the_memory_is_damage(file: str, run: Path):
    """TensorStore aborts the process where it can't have the memory for one."""
    os.truncate(run / "2" / file, HUGE)
    found = outcomes(run, 2)
    assert isinstance(found["load"], RaystateError) and f"{HUGE:,} bytes" in str(found["load"])
    assert found["verify"].bad
    assert raystate.Reader(run).restore(step=1).step == 1


@pytest.mark.parametrize(
    ("more", "what"),
    [([], "there twice"), ([("x", 2)], "a leaf and others below it"), ([("0", 1)], "a leaf and others below it")],
    ids=["the same", "a name", "an index"],
)
def test_paths_that_no_tree_has_are_damage(more: list[tuple[str, int]], what: str, run: Path):
    """An array of the state, and an empty node at its path or below it."""
    path = run / "2" / "state" / "_METADATA"
    document = json.loads(path.read_bytes())
    first = next(iter(document["tree_metadata"].values()))
    keys = [*first["key_metadata"], *({"key": key, "key_type": kind} for key, kind in more)]
    document["tree_metadata"]["new"] = {"key_metadata": keys, "value_metadata": {"value_type": "None"}}
    path.write_text(json.dumps(document))
    found = outcomes(run, 2)
    for reader in ("load", "metadata", "restore", "follow"):
        with pytest.raises(CorruptCheckpointError, match=what):
            raise found[reader]
    assert found["verify"].bad


@pytest.mark.parametrize("key", ["a\\..\\b", "b" * 300])
def test_a_name_that_is_no_path_is_damage(key: str, plain: Path):
    document = json.loads((plain / "_METADATA").read_bytes())
    document["tree_metadata"]["new"] = {**LEAF, "key_metadata": [{"key": key, "key_type": 2}]}
    (plain / "_METADATA").write_text(json.dumps(document))
    found = outcomes(plain, 0)
    assert isinstance(found["load"], CorruptCheckpointError)
    assert found["verify"].bad


@pytest.mark.parametrize(
    ("impl", "error", "said"),
    [
        ("nonsense", ReferenceMismatchError, "nonsense"),  # another program may have registered it
        ("threefry2x32", CorruptCheckpointError, "threefry2x32"),
        *((impl, CorruptCheckpointError, "random_key_impl of") for impl in (3, ["x"], None)),
    ],
)
def test_keys_that_cannot_be_made(impl: Any, error: type[Exception], said: str, run: Path):
    file = run / "2" / "state" / "array_metadatas" / "process_0"
    name = next(iter(raystate.metadata(run).arrays("state")))
    entry = {"param_name": name, "ext_metadata": {"random_key_impl": impl}}
    file.write_text(json.dumps({"array_metadatas": [{"array_metadata": entry}]}))
    with pytest.raises(error, match=said):
        raystate.load(run)


def test_an_iterator_of_very_many_processes_is_damage(run: Path):
    for state in (run / "2").rglob("process_*-of-*.json"):
        state.rename(state.with_name(state.name.replace("-of-2", "-of-99999999999999")))
    [item] = [name for name, kind in raystate.metadata(run).kinds.items() if kind == "iterator"]
    with pytest.raises(CorruptCheckpointError, match="lacks the iterator states"):
        raystate.Reader(run).restore(items={item: Position()})


class Position:
    def get_state(self) -> Any:
        return {}

    def set_state(self, state: Any) -> None:
        del state


@pytest.mark.parametrize(
    "file", ["_CHECKPOINT_METADATA", "state/_METADATA", "metrics/metrics", "state/manifest.ocdbt", "state/d/x"]
)
def test_a_pipe_in_the_place_of_a_file_is_damage(file: str, run: Path):
    """Nobody writes into it: a reader that opens it waits without end."""
    (run / "2" / file).unlink(missing_ok=True)
    os.mkfifo(run / "2" / file)
    for read in (raystate.load, raystate.metadata, lambda root: next(raystate.Reader(root).follow(timeout_s=0.0))):
        with pytest.raises(CorruptCheckpointError, match=f"{file} is no regular file"):
            read(run)
    assert verify_step(open_storage(run), 2).bad
    if file == "metrics/metrics":
        with pytest.raises(CorruptCheckpointError, match="no regular file"):
            raystate.Reader(run).best_step("loss")


# ---------------------------------------------------------------- what no memory can hold


def described(folder: Path, **changes: Any) -> None:
    """Change an array's own metadata."""
    path = folder / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def test_a_chunk_that_is_larger_than_its_array_is_damage(plain: Path):
    """Room is made for a whole chunk: the process was aborted by a file of 150 bytes."""
    described(plain / "w", chunks=[2**40])
    with pytest.raises(CorruptCheckpointError, match=r"'w'.* takes 4398046511104 bytes, and the whole array .* only 12"):
        raystate.load(plain)
    assert outcomes(plain, 0)["verify"].bad


@pytest.mark.parametrize("chunk", [3, 2**40])
def test_an_array_that_no_memory_can_hold_is_refused(chunk: int, plain: Path):
    import jax

    from raystate.compat.flax_checkpoints import restore_checkpoint

    described(plain / "w", shape=[2**40], chunks=[chunk])
    reference = {"w": np.zeros(3, np.float32)}
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for read in (
        lambda: raystate.load(plain),
        lambda: raystate.load(plain, reference, shapes="checkpoint"),
        lambda: raystate.load(plain, {"w": one}),
        lambda: restore_checkpoint(plain, reference),
    ):
        with pytest.raises(CapacityError, match="memory") as caught:
            read()
        assert caught.value.needed_bytes >= 2**42 > caught.value.available_bytes
    if chunk > 3:
        with pytest.raises(CapacityError, match="'w'"):
            raystate.metadata(plain).arrays()["w"].read((0,), (3,))


# ---------------------------------------------------------------- anything

NUMBERS: list[Any] = [None, True, 0, -1, 1, 7, 2**31, 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf")]
TEXTS: list[Any] = ["", "a", "..", "/", "a/b", "\\..\\", "\0", "\ud800", "é", "state", "scalar", "jax.Array", "List", "x" * 300]


def anything(chance: random.Random, levels: int = 3) -> Any:
    """A JSON value."""
    kind = chance.randrange(4 if levels else 2)
    if kind == 0:
        return chance.choice(NUMBERS)
    if kind == 1:
        return chance.choice(TEXTS)
    children = [anything(chance, levels - 1) for _ in range(chance.randrange(3))]
    return children if kind == 2 else {chance.choice(TEXTS): child for child in children}


def mutated(chance: random.Random, document: Any) -> Any:
    """The same value but for one place in it, wherever it lies."""
    places = list(_places(document))
    if not places:
        return anything(chance)
    container, key = chance.choice(places)
    match chance.randrange(4):
        case 0:
            del container[key]
        case 1:
            other, place = chance.choice(places)
            container[key] = json.loads(json.dumps(other[place]))
        case 2 if isinstance(container, dict):
            container[chance.choice(TEXTS)] = container.pop(key)
        case _:
            container[key] = anything(chance)
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(child)


def small_files(folder: Path) -> list[Path]:
    """Those that are JSON."""
    found: list[Path] = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            json.loads(path.read_bytes())
            found.append(path)
        except ValueError:
            pass
    return found


@pytest.mark.parametrize("of", ["run", "plain"])
def test_whatever_a_small_file_says_is_an_answer_or_an_error_of_ours(of: str, run: Path, plain: Path):
    root, folder, step = (run, run / "2", 2) if of == "run" else (plain, plain, 0)
    damaged = 0
    for file in small_files(folder):
        data = file.read_bytes()
        for number in range(ROUNDS):
            seed = f"{SEED}/{file.relative_to(folder)}/{number}"
            chance = random.Random(seed)
            said = anything(chance) if number % 4 == 0 else mutated(chance, json.loads(data))
            file.write_text(json.dumps(said))
            try:
                found = outcomes(root, step)
            except AssertionError as error:
                raise AssertionError(f"{seed}: {json.dumps(said)[:2000]}") from error
            damaged += isinstance(found["load"], CorruptCheckpointError)
        file.write_bytes(data)
    assert damaged > 10
    assert not isinstance(outcomes(root, step)["load"], Exception)
