"""Following a run from outside: steps as they come, over a storage that a plain writer fills meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

from jobs import evaluate_lm
from jobs.lm import step as lm_step
from jobs.lm.config import load

CONFIG = Path(__file__).parents[2] / "configs" / "lm_cpu.yaml"
SMALL = [
    "model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=64", "data.seq_len=32", "train.batch_size=4",
    "train.eval_bytes=1024", "train.steps=3",
]  # fmt: skip


def _write(storage: Path, steps: list[int], seen: threading.Event | None = None) -> None:
    config = load(str(CONFIG), SMALL)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    state = jax.jit(lm_step.build(config, mesh).init)()
    with ocp.CheckpointManager(storage, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
            manager.wait_until_finished()
            if seen is not None:
                seen.wait(30)


def _main(storage: Path, *more: str) -> int:
    sets = [argument for override in SMALL for argument in ("--set", override)]
    return evaluate_lm.main(["--config", str(CONFIG), "--storage", str(storage), *sets, *more])


@pytest.mark.long
def test_each_step_until_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "run", [1])
    writer = threading.Thread(target=_write, args=(tmp_path / "run", [2, 3]))
    writer.start()
    assert _main(tmp_path / "run", "--timeout-s", "60") == 0
    writer.join(60)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("step 3: validation ")  # the last of train.steps ends it
    assert all("bits/byte (zlib " in line for line in lines)
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    assert _main(tmp_path / "run", "--once") == 0
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before, "an evaluation writes nothing"


def test_nothing_comes_and_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(tmp_path / "none", "--timeout-s", "0.1") == 1
    assert "there is nothing at that path" in capsys.readouterr().err
    assert _main(tmp_path / "none", "--timeout-s", "-1") == 2
    assert evaluate_lm.main(["--config", str(tmp_path / "no.yaml")]) == 2
