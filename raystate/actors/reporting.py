"""What the runs of a cluster are doing, asked of their Coordinators."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raystate.actors.naming import find_actor, find_coordinators
from raystate.config.state_config import StateConfig
from raystate.observe.status import RunReport
from raystate.waits import ANSWER_S, REPLY_MARGIN_S


def run_reports() -> list[RunReport]:
    """Of all runs of the cluster that this process has joined, by name."""
    actors = {name: find_actor(name) for name in find_coordinators()}
    asked = {name: actor.status.remote() for name, actor in actors.items() if actor is not None}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    found = filter(None, [_answer(name, answer) for name, answer in asked.items()])
    return sorted(found, key=lambda one: (one.run, one.storage))


def _answer(name: str, answer: Any) -> RunReport | None:
    try:
        report: RunReport = ray.get(answer, timeout=0.1)
        return dataclasses.replace(report, name=name)
    except RayActorError:
        return None  # the run has ended meanwhile
    except (GetTimeoutError, RayError, TimeoutError) as error:
        why = " ".join(str(error).split())[:200]
        return RunReport(name=name, problem=f"{name} does not answer: {type(error).__name__}{f': {why}' if why else ''}")


def answers_within_s(config: StateConfig) -> float:
    """Seconds in which a living Coordinator has answered a release, whatever its own deadlines say."""
    return config.save_timeout_s + config.host_timeout_s + config.barrier_timeout_s + REPLY_MARGIN_S


def record_folder(config: StateConfig, run_hash: str) -> Path:
    """Where the Coordinator's record lies on this node: like Ray's own libraries, in a folder of ours among Ray's logs."""
    if config.record_dir is not None:
        root = Path(config.record_dir)
    else:
        context = ray.get_runtime_context()
        root = Path(context.get_temp_dir()) / context.get_session_name() / "logs" / "raystate"
    return root / f"{config.run}-{run_hash}"
