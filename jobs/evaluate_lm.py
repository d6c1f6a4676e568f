"""Follow a run of train_lm and evaluate each new step, beside it and without disturbing it: claims nothing, writes nothing, needs no Ray.

    python -m jobs.evaluate_lm --config configs/lm_cpu.yaml [--storage URL] [--timeout-s 600] [--once]

Ends when the run's last step was evaluated, or when no new step came for --timeout-s. Exit codes: 0 evaluated something, 1 failed or
nothing came, 2 bad usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jobs.lm.config import Config, UsageError, load

if TYPE_CHECKING:
    import raystate

FINE, FAILED, BAD_USAGE = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.evaluate_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration of the run that is followed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of it; repeatable")
    parser.add_argument("--storage", metavar="URL", help="where the run is (default: state.storage of the configuration)")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="end after so long without a new step (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="evaluate the newest step and end")
    given = parser.parse_args(argv)
    try:
        config = load(given.config, given.set)
        if given.timeout_s < 0:
            raise UsageError(f"--timeout-s {given.timeout_s} is negative")
    except UsageError as error:
        return _say(error, BAD_USAGE)

    import raystate
    from jobs.lm.corpus import CorpusError

    try:
        reader = raystate.Reader(given.storage or config.state["storage"])
        return FINE if evaluate(config, reader, timeout_s=given.timeout_s, once=given.once) else _say("no step came", FAILED)
    except KeyboardInterrupt:
        return _say("stopped by Ctrl-C", FAILED)
    except (raystate.RaystateError, CorpusError) as error:
        return _say(f"{type(error).__name__}: {error}", FAILED)


def evaluate(config: Config, reader: raystate.Reader, *, timeout_s: float, once: bool = False) -> int:
    """Print a line for each step that is found; the number of steps.

    Raises:
        CorpusError: the run was trained on another corpus than this machine's.
        StorageError, CorruptCheckpointError, ReferenceMismatchError: the step can't be read as the configuration's model.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jobs.lm import data as lm_data
    from jobs.lm import step as lm_step
    from jobs.lm.corpus import CorpusError, load_corpus, zlib_bits_per_byte

    corpus = load_corpus(config.data)
    text = corpus.val[: config.train.eval_bytes]
    windows, weights, covered = lm_data.eval_windows(
        text, seq_len=config.data.seq_len, batch_size=config.train.batch_size, max_bytes=text.size
    )
    zlib = zlib_bits_per_byte(text[:covered])
    # One device, whatever mesh the run is on, and only the parameters: nothing else is read.
    computation = lm_step.build(config, Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model")))
    reference = {"params": computation.abstract_state["params"]}
    seen = 0
    for restored in _steps(reader, reference, timeout_s=timeout_s, once=once):
        trained_on = (restored.custom or {}).get("corpus")
        if trained_on not in (None, corpus.fingerprint):
            raise CorpusError(
                f"step {restored.step} was trained on corpus {trained_on[:12]}, this machine has {corpus.fingerprint[:12]}"
            )
        nats = sum(
            float(computation.evaluate(restored.state["params"], computation.batch(window), computation.batch(weight)))
            for window, weight in zip(windows, weights, strict=True)
        )
        bits = nats / math.log(2) / (covered - 1)
        print(f"step {restored.step}: validation {bits:.3f} bits/byte (zlib {zlib:.3f})", flush=True)
        seen += 1
        if restored.step >= config.train.steps:
            break
    return seen


def _steps(reader: raystate.Reader, reference: Any, *, timeout_s: float, once: bool) -> Iterator[Any]:
    if not once:
        yield from reader.follow(reference, timeout_s=timeout_s)
    elif reader.latest_step() is not None:
        yield reader.restore(reference)


def _say(message: object, code: int) -> int:
    for line in str(message).splitlines():
        print(f"evaluate_lm: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
