"""The training loop, as it runs in every worker. `train_fn` is what `raystate.fit` is given."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jobs.lm import data as lm_data
from jobs.lm import step as lm_step
from jobs.lm.config import Config, validate
from jobs.lm.corpus import Corpus, CorpusError, entropy_bits_per_byte, load_corpus, zlib_bits_per_byte
from jobs.lm.digest import local_digest
from jobs.lm.report import Report


def train_fn(loop_config: dict[str, Any]) -> dict[str, Any]:
    """One worker's attempt, from whatever step the run has reached to its end.

    Args:
        loop_config: {"config": the configuration as plain values, "corpus": the fingerprint that the driver found, or None}.
    """
    import raystate

    config = validate(loop_config["config"])
    job = Job(config, expected_corpus=loop_config.get("corpus"))
    with raystate.StateManager() as manager:
        return job.run(manager)


class Job:
    """Everything that an attempt needs before the state: it is built while the state's whereabouts are not known yet."""

    def __init__(self, config: Config, *, expected_corpus: str | None = None):
        self.config = config
        train = config.train
        mesh = lm_step.make_mesh(train.mesh)
        rows = lm_step.local_rows(mesh, train.batch_size)
        self.computation = lm_step.build(config, mesh)
        self.compiling = lm_step.CompileAhead(self.computation, (train.batch_size, config.data.seq_len + 1))
        self.corpus: Corpus = load_corpus(config.data)
        self.rank = jax.process_index()
        # An error, not a polite end: only this rank would leave, and the others would wait for it in a collective.
        if wrong := self._wrong_corpus(expected_corpus, "this job's driver found"):
            raise CorpusError(wrong)
        self.rows = rows
        self.iterator = lm_data.batches(
            self.corpus.train, seq_len=config.data.seq_len, batch_size=train.batch_size, rows=rows, seed=config.data.seed
        )

    def run(self, manager: Any) -> dict[str, Any]:
        """Train to the end with `manager`, a `raystate.StateManager`.

        Returns:
            Plain values: "step", "loss_hex", "val_bits_per_byte", …; or {"refused": why} if this run must not go on here.
        """
        train = self.config.train
        restored = manager.restore_or_init(self.computation.init, self.computation.shardings, items={"data": self.iterator})
        refused = self._wrong_corpus((restored.custom or {}).get("corpus"), f"step {restored.step} was trained on")
        if refused:
            return {"refused": refused}

        state, step, custom = restored.state, restored.step, {"corpus": self.corpus.fingerprint}
        metrics = {name: float(value) for name, value in (restored.metrics or {}).items()}
        report = Report(
            steps=train.steps, start=step, batch_bytes=train.batch_size * self.config.data.seq_len, enabled=self.rank == 0
        )
        report.say(self._headline(state, restored))
        loss: jax.Array | None = None
        with _events(train.events, self.rank) as log_event:
            run_step = self.compiling.result()
            first = step
            for step in range(first, train.steps):
                state, loss = run_step(state, self.computation.batch(next(self.iterator)))
                done = step + 1
                if done == first + 1:
                    loss.block_until_ready()
                    report.started(done)
                if log_event:
                    log_event(step=done, loss_hex=float(loss).hex())
                logged = done % train.log_every_steps == 0 or done == train.steps
                if logged:
                    metrics["loss"] = float(loss)  # waits for the step; all other steps don't
                if train.eval_every_steps and done % train.eval_every_steps == 0 and done < train.steps:
                    with report.pause():
                        metrics["val_bits_per_byte"] = self._validate(state["params"], report, done)
                # The loss goes as an array that may still be computing: saving waits for no step. The last step is saved whatever
                # the interval, so that the table at the end can tell that it is durable.
                last = done == train.steps
                manager.save(
                    done, state, items={"data": self.iterator}, metrics={**metrics, "loss": loss}, custom=custom, force=last
                )
                if logged:
                    report.log(done, metrics["loss"], durable=manager.latest_step() if self.rank == 0 else None)
                if manager.reached_preemption(done):
                    return {"step": done, "interrupted": True}  # close() makes this step durable and raises Interrupted
            return self._finish(state, loss, metrics, report, manager)

    # ------------------------------------------------------------ parts of run()

    def _wrong_corpus(self, fingerprint: str | None, whose: str) -> str | None:
        if fingerprint is None or fingerprint == self.corpus.fingerprint:
            return None
        return (
            f"corpus {self.corpus.fingerprint[:12]} on {os.uname().nodename} (rank {self.rank}) is not the one that {whose}, "
            f"{fingerprint[:12]}: another Python version or other `data` settings; use those, or another state.storage"
        )

    def _headline(self, state: Any, restored: Any) -> str:
        leaves = jax.tree.leaves(state)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
        shape = self.computation.mesh.shape
        origin = f"from step {restored.step} ({restored.tier})" if restored.step else "from the beginning"
        return (
            f"{parameters / 1e6:.2f} M parameters, state {_mib(sum(leaf.nbytes for leaf in leaves))}, "
            f"mesh data {shape['data']} × model {shape['model']} on {jax.process_count()} processes, "
            f"corpus {len(self.corpus.train_files)} + {len(self.corpus.val_files)} files, "
            f"{_mib(self.corpus.train.size)} + {_mib(self.corpus.val.size)}; {origin}"
        )

    def _val_text(self) -> np.ndarray:
        return self.corpus.val[: self.config.train.eval_bytes]

    def _validate(self, params: Any, report: Report, step: int) -> float:
        """Bits per byte of the validation text, the same value on every process (collective)."""
        batch_size, computation = self.config.train.batch_size, self.computation
        text = self._val_text()
        windows, weights, covered = lm_data.eval_windows(
            text, seq_len=self.config.data.seq_len, batch_size=batch_size, max_bytes=text.size
        )
        here = slice(*self.rows)
        nats = 0.0
        for window, weight in zip(windows, weights, strict=True):
            nats += float(computation.evaluate(params, computation.batch(window[here]), computation.batch(weight[here])))
        bits = nats / math.log(2) / (covered - 1)
        compared = text[:covered]
        report.validation(step, bits, zlib_bits=zlib_bits_per_byte(compared), entropy_bits=entropy_bits_per_byte(compared))
        return bits

    def _finish(
        self, state: Any, loss: jax.Array | None, metrics: dict[str, float], report: Report, manager: Any
    ) -> dict[str, Any]:
        train = self.config.train
        bits = self._validate(state["params"], report, train.steps)
        final_loss = float(loss) if loss is not None else metrics.get("loss")
        loss_hex = None if final_loss is None else final_loss.hex()
        if train.digest_out:
            iterator_state = self.iterator.get_state()
            digest = {
                "rank": self.rank,
                "step": train.steps,
                "sha256": local_digest(state, iterator_state),
                "iterator": iterator_state if isinstance(iterator_state, dict) else iterator_state.decode(),
                "loss_hex": loss_hex,
            }
            _write_whole(Path(f"{train.digest_out}.{self.rank}"), json.dumps(digest))
        text = self._sample(state["params"])
        manager.wait_until_finished()
        durable = manager.latest_step() if self.rank == 0 else None
        compared = self._val_text()
        zlib_bits, entropy_bits = zlib_bits_per_byte(compared), entropy_bits_per_byte(compared)
        if text is not None:
            report.say("sample " + "-" * 60)
            for line in text.decode("utf-8", errors="replace").splitlines():
                report.say("  | " + "".join(c if c.isprintable() else "·" for c in line))
            report.say("-" * 67)
        report.table(
            [
                ("steps", str(train.steps)),
                ("training loss", "-" if final_loss is None else f"{final_loss:.6f} nats/byte  {loss_hex}"),
                ("validation", f"{bits:.3f} bits/byte over {compared.size} bytes"),
                ("zlib -9", f"{zlib_bits:.3f} bits/byte, the same bytes at once"),
                ("byte entropy", f"{entropy_bits:.3f} bits/byte"),
                ("saved", f"step {durable}"),
            ]
        )
        return {
            "step": train.steps,
            "loss": final_loss,
            "loss_hex": loss_hex,
            "val_bits_per_byte": bits,
            "zlib_bits_per_byte": zlib_bits,
            "entropy_bits_per_byte": entropy_bits,
            "corpus": self.corpus.fingerprint,
        }

    def _sample(self, params: Any) -> bytes | None:
        """Generated text on rank 0, None elsewhere (collective: every process gives its part of the parameters)."""
        train = self.config.train
        if not train.sample_bytes:
            return None
        whole = self.computation.replicate(params)
        if self.rank != 0:
            return None
        from jobs.lm.sample import generate

        return generate(
            self.computation.graph,
            jax.tree.map(lambda leaf: leaf.addressable_data(0), whole),
            train.prompt.encode(),
            count=train.sample_bytes,
            seq_len=self.config.data.seq_len,
            temperature=train.sample_temperature,
            seed=train.seed,
        )


@contextlib.contextmanager
def _events(path: str | None, rank: int):
    """A function that appends one line, whole even beside other writers; None if there is no path."""
    if path is None:
        yield None
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # One write() of one line with O_APPEND: lines of several processes never mix.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(**facts: Any) -> None:
        line = {"t": time.time(), "pid": os.getpid(), "rank": rank, **facts}
        os.write(fd, (json.dumps(line) + "\n").encode())

    try:
        yield append
    finally:
        os.close(fd)


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
