"""The whole loop with a stand-in for the manager: a resume is the same run, and another corpus is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from orbax.checkpoint import v1 as ocp

from jobs.lm import train as lm_train
from jobs.lm.config import Config, validate
from jobs.lm.corpus import CorpusError
from jobs.lm.plain import LastStep
from tests.jobs.lm_fake_manager import FakeManager
from tests.processes import run_python


def _config(**train: Any) -> Config:
    """Always as many steps: the schedule of the learning rate is part of the compiled program."""
    small = {"steps": 20, "warmup_steps": 4, "batch_size": 8, "learning_rate": 0.01, "mesh": {"model": 2}, "log_every_steps": 5}
    return validate(
        {
            "model": {"d_model": 32, "n_layers": 1, "n_heads": 4, "d_ff": 64, "ngram": 2, "ngram_buckets": 128},
            "data": {"seq_len": 32, "max_bytes": 262_144},
            "ray": {"num_workers": 1, "devices_per_worker": 8},
            "train": {**small, "eval_every_steps": 8, "eval_bytes": 4096, "sample_bytes": 0, **train},
        }
    )


def _digest(path: Path) -> dict[str, Any]:
    return json.loads(Path(f"{path}.0").read_text())


def test_a_resumed_run_ends_in_the_same_state_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events.jsonl"
    whole = lm_train.Job(_config(digest_out=str(tmp_path / "whole"), events=str(events), sample_bytes=40)).run(FakeManager())
    output = capsys.readouterr().out

    stopped = lm_train.Job(_config()).run(FakeManager(tmp_path / "steps", stop_at=11))
    assert stopped == {"step": 11, "interrupted": True}
    resumed = lm_train.Job(_config(digest_out=str(tmp_path / "resumed"))).run(FakeManager(tmp_path / "steps"))

    assert whole["step"] == 20
    assert whole["loss_hex"] == resumed["loss_hex"]
    assert _digest(tmp_path / "whole") == _digest(tmp_path / "resumed")
    assert _digest(tmp_path / "whole")["iterator"] == {"next_index": 20}

    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["loss_hex"] == whole["loss_hex"]
    assert set(lines[0]) == {"t", "pid", "rank", "step", "loss_hex"}
    assert float.fromhex(lines[-1]["loss_hex"]) < float.fromhex(lines[0]["loss_hex"]) - 1

    for text in ("step  5/20  loss", "tokens/s", "zlib -9", "byte entropy", "saved 20", "  | def ", whole["loss_hex"]):
        assert text in output


def test_a_run_without_raystate_ends_in_the_same_state_and_orbax_has_it(tmp_path: Path) -> None:
    managed = lm_train.Job(_config(digest_out=str(tmp_path / "managed"))).run(FakeManager())
    plain = lm_train.Job(_config(digest_out=str(tmp_path / "plain"))).run(LastStep(str(tmp_path / "steps")))
    assert plain["loss_hex"] == managed["loss_hex"]
    assert _digest(tmp_path / "plain") == _digest(tmp_path / "managed")
    found = ocp.load(str(tmp_path / "steps" / "20"))
    assert int(found["opt"][1][0]["count"]) == 20


def test_a_finished_run_only_reports(tmp_path: Path) -> None:
    first = lm_train.Job(_config()).run(FakeManager(tmp_path))
    again = lm_train.Job(_config()).run(FakeManager(tmp_path))
    assert again["val_bits_per_byte"] == first["val_bits_per_byte"]
    assert again["loss_hex"] == first["loss_hex"]


def test_another_corpus_is_refused_and_nothing_is_trained(tmp_path: Path) -> None:
    lm_train.Job(_config()).run(FakeManager(tmp_path, stop_at=4))
    config = _config()
    other = config.model_copy(update={"data": config.data.model_copy(update={"max_bytes": 300_000})})
    manager = FakeManager(tmp_path)
    refused = lm_train.Job(other).run(manager)["refused"]
    assert "is not the one that step 4 was trained on" in refused
    assert "\n" not in refused
    assert manager.latest_step() == 4


def test_a_host_with_another_corpus_than_the_driver_fails() -> None:
    with pytest.raises(CorpusError, match="is not the one that this job's driver found, 0123456789ab"):
        lm_train.Job(_config(), expected_corpus="0123456789abcdef")


def test_every_step_is_saved_with_its_own_loss() -> None:
    """The loss goes to save() as an array, not as a number that had to be waited for."""
    seen: list[Any] = []

    class Watching(FakeManager):
        def save(self, step: int, state: Any, **kwargs: Any) -> bool:
            seen.append(kwargs["metrics"]["loss"])
            return super().save(step, state, **kwargs)

    result = lm_train.Job(_config()).run(Watching(every=100))
    assert all(isinstance(loss, jax.Array) for loss in seen)
    assert len({float(loss) for loss in seen}) == 20
    assert float(seen[-1]).hex() == result["loss_hex"]


def test_the_driver_starts_light() -> None:
    """A mistake in the configuration is reported without loading jax or ray."""
    code = "import sys; import jobs.train_lm; print(sorted({'jax', 'ray', 'flax', 'grain'} & set(sys.modules)))"
    assert run_python("-c", code).stdout.strip() == "[]"
