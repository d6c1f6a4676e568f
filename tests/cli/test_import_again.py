"""raystate import, done again: after a death in its midst it goes on, and what is there already is known by its content alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.inspection.verification import verify_log, verify_step
from raystate.storage import RunLog, StepFolder, open_storage
from raystate.transfer import IncomingStep, import_steps, open_source
from tests.cli.transfers import a_run, files, in_memory_step, raystate_command

STEPS = (1, 2, 3)


def tree(step: int) -> dict[str, Any]:
    return {"w": np.arange(12, dtype=np.float32) * step, "key": jax.random.key(step), "n": step, "name": "x", "empty": {}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "src"
    for step in STEPS:
        raystate.save(root / str(step), tree(step), items={"words": {"a": step}}, metrics={"loss": 1 / step}, custom=[step])
    return root


class Dead(BaseException):
    """kill -9: nobody cleans up."""


def dies(real: Callable[..., Any], number: int, *, after: bool) -> Callable[..., Any]:
    calls = 0

    def dying(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            raise Dead
        done = real(*args)
        if calls == number:
            raise Dead
        return done

    return dying


@pytest.mark.parametrize("number", STEPS)
@pytest.mark.parametrize(
    ("kind", "call", "after"),
    [(StepFolder, "publish", False), (StepFolder, "publish", True), (RunLog, "append", True)],
    ids=["before publish", "after publish", "after an entry"],
)
def test_an_import_that_died_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, call: str, after: bool, number: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(kind, call, dies(getattr(kind, call), number, after=after))
        with pytest.raises(Dead):
            import_steps(tmp_path, open_source(source))
    report = import_steps(tmp_path, open_source(source))
    # Of a death after an entry the last one was a commit, and whoever claims the run publishes what it names.
    committed = number - 1 if call == "append" else number
    assert (report.present, report.steps) == (STEPS[:committed], STEPS[committed:])
    reader, storage = raystate.Reader(tmp_path), open_storage(tmp_path)
    assert reader.all_steps() == list(STEPS) and not verify_log(storage)
    for step in STEPS:
        assert np.array_equal(reader.restore(step=step).state["w"], tree(step)["w"]) and not verify_step(storage, step).bad
    assert import_steps(tmp_path, open_source(source)).present == STEPS


def changed(step: IncomingStep, change: str) -> IncomingStep:
    state = step.trees["state"]
    if change == "a bit":

        def read(item: str, requests: Sequence[Any]) -> list[np.ndarray]:
            parts = [part.copy() for part in step.read(item, requests)]
            parts[-1].reshape(-1).view(np.uint8)[-1] ^= 1
            return parts

        return dataclasses.replace(step, read=read)
    if change == "a number":
        leaves = [dataclasses.replace(leaf, value=9) if leaf.kind == "scalar" else leaf for leaf in state.leaves]
    elif change == "a dtype":  # the same bytes
        leaves = [
            dataclasses.replace(leaf, array=dataclasses.replace(leaf.array, dtype="int32"))
            if leaf.array is not None and leaf.name == "w"
            else leaf
            for leaf in state.leaves
        ]
    elif change == "a leaf less":
        leaves = [leaf for leaf in state.leaves if leaf.name != "name"]
    else:
        other: dict[str, Any] = {"an item": {"json_items": {}}, "a metric": {"metrics": {}}, "custom": {"custom": None}}[change]
        return dataclasses.replace(step, **other)
    return dataclasses.replace(step, trees={"state": dataclasses.replace(state, leaves=tuple(leaves))})


@pytest.mark.parametrize("change", ["a bit", "a number", "a dtype", "a leaf less", "an item", "a metric", "custom"])
def test_another_content_under_the_same_number_is_refused(source: Path, tmp_path: Path, change: str) -> None:
    import_steps(tmp_path, open_source(source))
    before = files(tmp_path)
    (first, *_) = open_source(source)
    with pytest.raises(ConfigError, match=r"step 1 exists in .*, with another content: delete it .*--step N"):
        import_steps(tmp_path, [changed(first, change)])
    assert files(tmp_path) == before, "nothing is claimed"
    later = [in_memory_step(4, tree(4)), changed(first, change)]
    with pytest.raises(ConfigError, match="step 1 exists"):
        import_steps(tmp_path, later)
    assert raystate.Reader(tmp_path).all_steps() == list(STEPS)


def test_a_step_that_is_damaged_there_is_not_the_same(source: Path, tmp_path: Path) -> None:
    import_steps(tmp_path, open_source(source))
    for path in (tmp_path / "1/state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ConfigError, match="step 1 exists"):
        import_steps(tmp_path, open_source(source))


def test_a_source_that_cannot_be_read_is_not_another_content(source: Path, tmp_path: Path) -> None:
    def read(item: str, requests: Sequence[Any]) -> list[np.ndarray]:
        raise CorruptCheckpointError("the source is damaged")

    import_steps(tmp_path, open_source(source))
    (first, *_) = open_source(source)
    with pytest.raises(CorruptCheckpointError, match="the source is damaged"):
        import_steps(tmp_path, [dataclasses.replace(first, read=read)])


def test_every_kind_of_item_is_known_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run")
    url = f"file://{tmp_path}/new"
    assert raystate_command(capsys, "import", run, tmp_path / "new")[0] == 0
    code, out, _ = raystate_command(capsys, "import", run, tmp_path / "new")
    assert (code, out) == (0, f"step 1200 is in {url} already, with the same content\n")
    raystate.save(tmp_path / "more/1200", {"w": np.ones(1)})
    code, _, err = raystate_command(capsys, "import", tmp_path / "more", tmp_path / "new")
    assert code == 2 and f"step 1200 exists in {url}, with another content" in err
