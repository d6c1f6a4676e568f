"""Saves of a program of several processes: each writes its share, and process 0 makes one checkpoint of them.

They meet in JAX's coordination service, not in a collective: a save may go on beside the training,
and a process that does not come is named.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax

from raystate.compat.flax_errors import TargetError
from raystate.core.coordinator.context import ranks_text
from raystate.core.formats.errors import BarrierTimeoutError, ConfigError, RaystateError, StorageError
from raystate.core.formats.local_values import disagreement
from raystate.waits import LOOK_EVERY_S, MEET_S, SHARE_WRITTEN_S

Share = tuple[
    str, dict[str, int]
]  # the writer that what a process wrote belongs to, or ""; see `core.formats.local_values.local_checksums`


class Meeting:
    """The processes that save one checkpoint. Process 0 decides, and answers the others.

    Args:
        place: the checkpoint's URL.

    Raises:
        ConfigError: the processes don't know each other.
    """

    def __init__(self, place: str):
        from jax._src import distributed  # what is public there knows neither texts nor deadlines

        if distributed.global_state.client is None:
            text = f"saving {place}: several processes save together: call jax.distributed.initialize() where the program begins"
            raise ConfigError(text, field="target", path=place)
        self._client: Any = distributed.global_state.client
        self._place = place
        self._topic = f"raystate/flax_checkpoints/{hashlib.sha256(place.encode()).hexdigest()[:32]}"
        self._save = ""
        self._others = range(1, jax.process_count())
        self.rank = jax.process_index()

    @contextmanager
    def preparing(self) -> Generator[None, None, None]:
        """A context before `begin`. What it raises the others are told, who then don't wait for this process."""
        try:
            yield
        except Exception as error:
            with suppress(RaystateError):  # which name this process
                self.begin("", str, refused=f"{type(error).__name__}: {error}")
            raise

    def begin(self, layout: str, decide: Callable[[], str], *, refused: str = "") -> str:
        """Wait until all processes have called this.

        Args:
            layout: what this process saves; must be equal on all.
            decide: called in process 0 when all are there; its answer is the id of this save.
            refused: why this process can't save; "": it can.

        Returns:
            The id, on all processes.

        Raises:
            BarrierTimeoutError: some have not; names them. TargetError: they save different trees,
            or one can't save: names it. What `decide` raised.
        """
        if self.rank:
            nonce = secrets.token_hex(8)
            self._say(str(self.rank), [nonce, layout, refused])
            try:
                self._save = self._answer(nonce, "begin", MEET_S + 5)  # process 0 names those that are missing
            except BarrierTimeoutError:
                # Taken back: process 0 would wait for a share of this process. If it has heard it, it waits for others, and answers.
                if self._get(str(self.rank), time.monotonic() + LOOK_EVERY_S) is not None:
                    raise
                self._save = self._answer(nonce, "begin", MEET_S + 5)
            return self._save
        heard = self._hear("", MEET_S)
        with self._answering([nonce for nonce, *_ in heard.values()]) as answer:
            for rank, why in {0: refused, **{rank: why for rank, (*_, why) in heard.items()}}.items():
                if why:
                    text = f"saving {self._place}: rank {rank} can't save: {why}"
                    raise TargetError(text, field="target", rank=rank, path=self._place)
            self._all_of(heard, "begin", MEET_S)
            if others := [rank for rank, (_, told, _) in heard.items() if told != layout]:
                text = f"process 0 and {ranks_text(others, {})} save trees that differ in names, shapes, dtypes or shardings"
                raise TargetError(f"saving {self._place}: {text}", field="target", path=self._place)
            answer.append(decide())
        self._save = answer[0]
        return self._save

    def end(self, write: Callable[[], Share]) -> None:
        """In the others: write this process's share, and wait until process 0 has made the checkpoint durable.

        Raises:
            BarrierTimeoutError: process 0 does not answer. What `write` or process 0 raised.
        """
        try:
            said: Any = write()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._say(f"{self._save}/{self.rank}", said)
        self._answer(f"{self._save}/of/{self.rank}", "write", SHARE_WRITTEN_S)

    @contextmanager
    def ending(self) -> Generator[None, None, None]:
        """A context in which the checkpoint is written; process 0 tells the others how it was left."""
        with self._answering([f"{self._save}/of/{rank}" for rank in self._others if self.rank == 0]):
            yield

    def writers(self, mine: Share) -> list[str]:
        """In process 0: wait until all have written their shares; the writers of all.

        Raises:
            BarrierTimeoutError: some have not; names them. StorageError: one could not.
            TargetError: what each holds for itself is not equal.
        """
        heard: dict[int, Any] = {0: mine, **self._hear(f"{self._save}/", SHARE_WRITTEN_S)}
        self._all_of(heard, "write", SHARE_WRITTEN_S)
        if failed := {rank: said for rank, said in heard.items() if isinstance(said, str)}:
            rank, why = next(iter(failed.items()))
            raise StorageError(f"saving {self._place}: rank {rank} could not write its share: {why}", rank=rank, path=self._place)
        if text := disagreement({rank: local for rank, (_, local) in heard.items()}):
            raise TargetError(f"saving {self._place}: {text}", field="target", path=self._place)
        return [writer for writer, _ in heard.values()]

    # ------------------------------------------------------------ inside

    @contextmanager
    def _answering(self, keys: Iterable[str]) -> Generator[list[str], None, None]:
        answer: list[str] = []
        problem: RaystateError | None = None
        try:
            yield answer
        except RaystateError as error:
            problem = error
            raise
        except BaseException as error:
            problem = RaystateError(f"saving {self._place}: process 0 failed: {type(error).__name__}: {error}", path=self._place)
            raise
        finally:
            told = [*answer, ""][0] if problem is None else None
            for key in keys:
                self._say(key, [told, pickle.dumps(problem).hex()])

    def _answer(self, key: str, phase: str, timeout_s: float) -> str:
        got = self._get(key, time.monotonic() + timeout_s)
        if got is None:
            raise self._missing([0], phase, timeout_s)
        told, problem = got
        if told is None:
            raise pickle.loads(bytes.fromhex(problem))  # what a process of this very program wrote
        return told

    def _hear(self, prefix: str, timeout_s: float) -> dict[int, Any]:
        """What the others have said in time."""
        deadline_s = time.monotonic() + timeout_s
        said = {rank: self._get(f"{prefix}{rank}", deadline_s) for rank in self._others}
        return {rank: one for rank, one in said.items() if one is not None}

    def _all_of(self, heard: Mapping[int, Any], phase: str, waited_s: float) -> None:
        if missing := [rank for rank in self._others if rank not in heard]:
            raise self._missing(missing, phase, waited_s)

    def _missing(self, ranks: list[int], phase: str, waited_s: float) -> BarrierTimeoutError:
        who = ranks_text(ranks, {})
        text = {
            "begin": f"{who} did not call save within {waited_s:g} s. Call it in every process, and not in process 0 alone",
            "write": f"{who} did not write a share within {waited_s:g} s: see its log",
        }[phase]
        return BarrierTimeoutError(
            f"saving {self._place}: {text}", rank=self.rank, missing=tuple(ranks), phase=phase, waited_s=waited_s, path=self._place
        )

    def _say(self, key: str, what: Any) -> None:
        self._client.key_value_set(f"{self._topic}/{key}", json.dumps(what), allow_overwrite=True)

    def _get(self, key: str, deadline_s: float) -> Any:
        """What another process has said, which is then forgotten; None: no word came in time."""
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                text = self._client.blocking_key_value_get(f"{self._topic}/{key}", int(1000 * min(LOOK_EVERY_S, max(left_s, 0.0))))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if left_s <= 0:
                    return None
                continue
            self._client.key_value_delete(f"{self._topic}/{key}")
            return json.loads(text)
