"""What a process of a rehearsal is told, by one environment variable that its Ray workers inherit. See `raystate.rehearsal`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

VARIABLE = "RAYSTATE_REHEARSAL"
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what Ray gives to all processes of a driver's job
_NEVER = 10**12  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One of the starts of a rehearsal.

    Attributes:
        name: "first" begins, "again" goes on from where that one has ended, "undisturbed" is what both should be equal to.
        scratch: URL of a folder that all hosts reach, in which everything is written.
        saves: after so many saved steps the play ends.
        limit_s: seconds for it.
    """

    name: str
    scratch: str
    saves: int
    limit_s: float

    @property
    def resumes(self) -> bool:
        """Whether another play goes on from its last step."""
        return self.name == "first"

    def storage(self, config: Any) -> str:
        """Where the run of this `StateConfig` lies meanwhile."""
        line = "undisturbed" if self.name == "undisturbed" else "restarted"
        return f"{self.scratch}/{line}/{hashlib.sha256(f'{config.storage} {config.run}'.encode()).hexdigest()[:12]}"

    def environment(self) -> dict[str, str]:
        """Of a process that plays it."""
        text = json.dumps(dataclasses.asdict(self))
        job: dict[str, Any] = json.loads(os.environ.get(_JOB_CONFIG, "{}"))
        job["runtime_env"] = dict(job.get("runtime_env") or {})
        job["runtime_env"]["env_vars"] = {**(job["runtime_env"].get("env_vars") or {}), VARIABLE: text}
        job.setdefault("metadata", {})
        return {**os.environ, VARIABLE: text, _JOB_CONFIG: json.dumps(job)}


def play() -> Play | None:
    """The one that this process takes part in; None, as nearly always: it is no rehearsal."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Play(**json.loads(text))


def redirected(config: Any) -> Any:
    """The `StateConfig` that takes this one's place: in a rehearsal it writes below the scratch folder only."""
    now = play()
    if now is None or config.storage.startswith(now.scratch):
        return config
    longest = {name: min(getattr(config, name), now.limit_s) for name in _WAITS}
    return config.replace(
        storage=now.storage(config),
        run=f"rehearsal-{config.run}"[:100],
        # Only the step that the restart needs is written: the state may be large.
        save_every_steps=_NEVER,
        snapshot_every_steps=0,
        replicas=0,
        **dict.fromkeys(_NONE),
        **longest,
    )


_WAITS = ("start_timeout_s", "save_timeout_s", "barrier_timeout_s", "restore_timeout_s", "idle_timeout_s")
_NONE = (
    "save_every_s", "save_policy", "keep_last", "keep_every_steps", "keep_every_s", "keep_best", "keep_policy", "hang_timeout_s",
    "record_dir",
)  # fmt: skip
