"""Reader beside retention: a step that goes away while it is read is missing, not damaged, and the newest is then another one.

And which step is the best.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raystate
from raystate.inspection import places
from raystate.orbax.step_files import StepFiles
from raystate.orbax.step_reader import StepReader
from raystate.reader import assembling
from raystate.storage import StepFolder, StorageWrapper, open_storage
from tests.orbax.published import committed, publish
from tests.patience import PATIENCE_S
from tests.storage.backends import gcs_backend

SEED = int(os.environ["RAYSTATE_SEED"])


def test_newest_steps_that_all_go_before_they_are_read_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, 1)
    newest = [1]

    def racing(self: StepReader, *args: Any) -> Any:
        del self, args
        assert newest[0] < 9, "it goes on without an end"
        publish(tmp_path, newest[0] + 1)
        shutil.rmtree(tmp_path / str(newest[0]))
        newest[0] += 1
        raise raystate.StorageError("its files are gone")

    monkeypatch.setattr(StepReader, "read", racing)
    monkeypatch.setattr(places, "MOST_READS", 3)
    with pytest.raises(
        raystate.StepNotFoundError, match=r"step 3 of .* was retired while it was read.*so were the 2 newest ones before"
    ):
        raystate.Reader(tmp_path).restore()


def test_follow_ends_after_its_timeout_and_gives_each_step_once(tmp_path: Path) -> None:
    publish(tmp_path, 4)
    following = raystate.Reader(tmp_path).follow(timeout_s=0.1)
    first = next(following)
    assert (first.step, np.asarray(first.state["n"]).item()) == (4, 3)
    publish(tmp_path, 9)
    assert [restored.step for restored in following] == [9]
    for wrong in (-1, "a", float("nan")):
        with pytest.raises(raystate.ConfigError, match=f"timeout_s must be seconds, at least 0, or None, not {wrong!r}"):
            next(raystate.Reader(tmp_path).follow(timeout_s=wrong))  # type: ignore[arg-type]


def test_follow_tells_of_what_is_saved_after_a_rollback(tmp_path: Path) -> None:
    """Under numbers that it has told of before, too, and each time what is in storage now."""
    for step in (2, 4):
        publish(tmp_path, step)
    following = raystate.Reader(tmp_path).follow(after=2, timeout_s=0.1)
    assert next(following).step == 4
    marker = tmp_path / "4" / "commit_success.txt"
    shutil.rmtree(tmp_path / "4")
    committed(tmp_path, 3, package=True, save="a2k1")
    assert next(following).step == 3
    committed(tmp_path, 4, package=True, save="a2k2")
    assert marker.exists()
    assert next(following).step == 4
    assert list(following) == []


# ---------------------------------------------------------------- retention between any two reads

READS: dict[str, Callable[[Path], Any]] = {
    "metadata": raystate.metadata,
    "Reader.metadata": lambda root: raystate.Reader(root).metadata(),
    "Reader.metadata of 2": lambda root: raystate.Reader(root).metadata(2),
    "load": raystate.load,
    "load of 2": lambda root: raystate.load(root, step=2),
    "load of its folder": lambda root: raystate.load(root / "2"),
    "metadata of its folder": lambda root: raystate.metadata(root / "2"),
    "Reader.restore": lambda root: raystate.Reader(root).restore(),
    "Reader.restore of 2": lambda root: raystate.Reader(root).restore(step=2),
    "follow": lambda root: next(raystate.Reader(root).follow(timeout_s=0.0)),
    "best_step": lambda root: raystate.Reader(root).best_step("loss"),
}


class Moment:
    """Does something before the nth look at storage, through the storage or through TensorStore."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], nth: int):
        self.act, self.left, self.looks = act, nth, 0
        moment = self

        class Looked(StorageWrapper):
            def before(self, operation: str, name: str) -> None:
                moment.look()

        for owner, name in ((StepFiles, "read"), (StepFiles, "names"), (StepReader, "read")):
            monkeypatch.setattr(owner, name, self.hooked(getattr(owner, name)))
        monkeypatch.setattr(places, "open_storage", lambda url: Looked(open_storage(url)))

    def hooked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(of: StepFiles | StepReader, *args: Any) -> Any:
            self.look()
            return method(of, *args)

        return called

    def look(self) -> None:
        self.looks += 1
        if self.looks == self.left:
            self.act()


@pytest.mark.parametrize("package", [True, False], ids=["with package", "without package"])
@pytest.mark.parametrize("what", READS)
def test_a_step_that_goes_between_any_two_looks_is_never_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, package: bool
):
    """3 is committed and 2 retired, as retention does it."""
    read, outcomes = READS[what], set[Any]()
    kept = [committed(tmp_path / "kept", step, package=package) for step in (2, 3)]

    def play(nth: int) -> tuple[Any, int]:
        """(what comes out, how many looks there were)."""
        root = tmp_path / "run"
        shutil.copytree(tmp_path / "kept", root)
        shutil.move(root / "3", root / ".raystate-later")

        def retire() -> None:
            shutil.move(root / ".raystate-later", root / "3")
            StepFolder(open_storage(root), 2, kept[0].save).retire()

        try:
            with monkeypatch.context() as patch:
                moment = Moment(patch, retire, nth)
                outcome = read(root)
            shown = "a tree" if isinstance(outcome, dict) else outcome if isinstance(outcome, int) else outcome.step
            return shown, moment.looks
        except raystate.StepNotFoundError:
            return "gone", moment.looks
        finally:
            shutil.rmtree(root)

    undisturbed, looks = play(10**6)
    moments = range(1, looks + 1)
    for nth in moments if os.environ.get("RAYSTATE_ALL") else random.Random(f"{SEED} {what}").sample(moments, min(looks, 6)):
        try:
            outcomes.add(play(nth)[0])
        except BaseException as error:
            error.add_note(f"retired before look {nth} of {looks}; RAYSTATE_SEED={SEED}")
            raise
    print(f"{what}: {looks} looks, {outcomes}")  # noqa: T201
    assert looks > 5
    other = "gone" if " of " in what else "a tree" if what == "load" else 3
    assert outcomes <= {undisturbed, other}
    assert play(1)[0] == other or play(2)[0] == other


def test_a_step_that_is_saved_anew_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rolled back and saved again: not a mixture of both, and no damage."""
    first = committed(tmp_path, 2, package=True)
    calls: list[int] = []

    def again() -> None:
        calls.append(1)
        first.retire()
        committed(tmp_path, 2, package=True, save="a1k9")

    read = StepReader.read

    def racing(self: StepReader, *args: Any) -> Any:
        if not calls:
            again()
        return read(self, *args)

    monkeypatch.setattr(StepReader, "read", racing)
    assert raystate.Reader(tmp_path).restore(step=2).step == 2
    assert calls == [1]


def test_follow_tells_what_the_callers_function_raises(tmp_path: Path):
    """It took it for a step that was retired, and waited for another one for ever."""
    committed(tmp_path, 2, package=True)

    def merge(tree: Any) -> Any:
        raise raystate.StepNotFoundError("no such adapter")

    with pytest.raises(raystate.StepNotFoundError, match="no such adapter"):
        next(raystate.Reader(tmp_path).follow(transforms=merge))
    with pytest.raises(raystate.StepNotFoundError, match="no such adapter"):
        raystate.load(tmp_path, transforms=merge)


def test_a_reader_that_is_there_before_its_checkpoint(tmp_path: Path):
    """It never saw it."""
    reader = raystate.Reader(tmp_path / "one")
    with pytest.raises(raystate.StepNotFoundError, match="there is nothing at that path"):
        reader.latest_step()
    raystate.save(tmp_path / "one", {"x": 1})
    assert reader.latest_step() == 0 and reader.restore().state == {"x": 1}


def test_a_mistyped_path_is_no_run_that_has_yet_to_save(tmp_path: Path):
    """Nobody waits for ever for the steps of what is not there; a run that has begun can be followed."""
    (tmp_path / "begun").mkdir()
    assert raystate.Reader(tmp_path / "begun").all_steps() == []
    assert list(raystate.Reader(tmp_path / "begun").follow(timeout_s=0.0)) == []
    raystate.save(tmp_path / "run" / "3", {"x": np.ones(2)})
    reader = raystate.Reader(tmp_path / "rum")
    for ask in (reader.all_steps, reader.latest_step, reader.best_step, lambda: next(reader.follow(timeout_s=0.0))):
        with pytest.raises(FileNotFoundError, match=f"there is nothing at that path; did you mean file://{tmp_path}/run"):
            ask()


def test_a_follower_that_is_there_first_is_told_and_waits_for_its_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It would not know a mistyped path from a run that has yet to begin, and waited for ever for either."""
    told = threading.Event()
    caplog.handler.addFilter(lambda _: told.set() or True)
    run = threading.Thread(target=lambda: told.wait(PATIENCE_S) and publish(tmp_path / "run", 3))
    run.start()
    assert next(raystate.Reader(tmp_path / "run").follow(timeout_s=PATIENCE_S)).step == 3
    run.join()
    assert "there is nothing at that path; follow() waits 60 s for a run to begin there" in caplog.text


def test_a_reader_that_is_there_while_its_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a bucket, or as a copy: it took the half for a run, for ever."""
    real, readers = assembling.build_files, list[raystate.Reader]()

    def looked_at(*args: Any, **options: Any) -> Any:
        readers.append(raystate.Reader(url))
        assert readers[0].all_steps() == []
        return real(*args, **options)

    monkeypatch.setattr(assembling, "build_files", looked_at)
    with gcs_backend(tmp_path) as storage:
        url = f"{storage.url}/one"
        raystate.save(url, {"w": np.arange(3.0)})
        assert readers[0].latest_step() == 0 and readers[0].restore().state["w"].tolist() == [0.0, 1.0, 2.0]


# ---------------------------------------------------------------- the best step


def with_metrics(root: Path, by_step: Mapping[int, Mapping[str, Any] | None]) -> raystate.Reader:
    for step, metrics in by_step.items():
        publish(root, step, metrics=dict(metrics) if metrics is not None else None)
    return raystate.Reader(root)


def test_nan_is_never_the_best(tmp_path: Path):
    """Wherever it comes; and of equal ones the newest, as retention keeps them."""
    nan = math.nan
    reader = with_metrics(
        tmp_path, {1: {"loss": nan}, 2: {"loss": 3.0}, 3: {"loss": 1.0}, 4: {"loss": nan}, 5: {"loss": 1.0}, 6: None}
    )
    assert (reader.best_step("loss"), reader.best_step("loss", "max"), reader.best_step()) == (5, 2, 5)


def test_the_best_is_what_retention_keeps(tmp_path: Path):
    from raystate.core.formats.messages import LiveStep
    from raystate.runtime.coordinator.retention import preservation_policy, preserved

    values = {1: math.nan, 2: 3.0, 3: -math.inf, 4: 1.0, 5: -math.inf, 6: math.inf, 7: 2.0}
    reader = with_metrics(tmp_path, {step: {"loss": value} for step, value in values.items()})
    live = [LiveStep(step=step, save="k", metrics={"loss": value}) for step, value in values.items()]
    for mode in ("min", "max"):
        config = raystate.StateConfig(
            storage=str(tmp_path), run="lm", keep_last=None, keep_best=1, best_metric="loss", best_mode=mode
        )
        assert preserved(preservation_policy(config), live) == [reader.best_step("loss", mode)]


def test_only_nan_or_no_metrics_is_no_best_step(tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    assert raystate.Reader(tmp_path / "nothing").best_step("loss") is None
    assert with_metrics(tmp_path / "none", {1: None}).best_step() is None
    assert with_metrics(tmp_path / "nan", {1: {"loss": math.nan}, 2: {"loss": math.nan}}).best_step() is None
    assert with_metrics(tmp_path / "text", {1: {"loss": 1.0}, 2: {"loss": "low"}}).best_step() == 1


def test_an_undecidable_best_step_lists_the_names(tmp_path: Path):
    reader = with_metrics(tmp_path, {1: {"loss": 1.0}, 2: {"accuracy": 0.5}})
    with pytest.raises(raystate.ConfigError, match=r"name the metric: the steps have \['accuracy', 'loss'\]"):
        reader.best_step()
    with pytest.raises(raystate.ConfigError, match=r"no step has 'los'; the steps have \['accuracy', 'loss'\]"):
        reader.best_step("los")
    with pytest.raises(raystate.ConfigError, match="expected 'min' or 'max', not 'smallest'"):
        reader.best_step("loss", "smallest")  # pyright: ignore[reportArgumentType]
    assert reader.best_step("loss") == 1, "a step without it is not meant"


# ---------------------------------------------------------------- listed, and not there


def test_a_folder_whose_number_is_no_step_s_is_no_step(tmp_path: Path):
    publish(tmp_path, 1)
    for name in (f"{2**63}", "9" * 30, "0" * 40 + "9" * 30):
        shutil.copytree(tmp_path / "1", tmp_path / name)
    reader = raystate.Reader(tmp_path)
    assert reader.all_steps() == [1]
    assert [restored.step for restored in reader.follow(timeout_s=0.0)] == [1]


def test_of_many_steps_it_says_how_many_there_are(tmp_path: Path):
    publish(tmp_path, 1)
    for step in range(2, 58):
        shutil.copytree(tmp_path / "1", tmp_path / str(step))
    newest = re.escape(f"has no step 99; it has 57, the newest: {list(range(48, 58))}")
    with pytest.raises(raystate.StepNotFoundError, match=newest):
        raystate.Reader(tmp_path).metadata(99)


def test_follow_and_best_step_end_although_a_listed_step_is_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(tmp_path, 1)

    def gone(*_args: Any, **_kw: Any) -> Any:
        raise raystate.StepNotFoundError("step 1 was retired while it was read")

    reader = raystate.Reader(tmp_path)
    monkeypatch.setattr(reader._checkpoints, "read", gone)
    monkeypatch.setattr(reader._checkpoints, "read_existing", gone)
    assert list(reader.follow(timeout_s=0.0)) == []
    with pytest.raises(raystate.StepNotFoundError):
        reader.best_step("loss")
