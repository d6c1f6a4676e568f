"""The job's configuration: YAML, validated, with `--set key=value` overrides.

Everything a user can get wrong ends in a `UsageError` whose message is one line per mistake and names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class UsageError(Exception):
    """A mistake in the command line or in the configuration. The message is for a person, one line per mistake."""


def _not_bool(value: Any) -> Any:
    # YAML's `yes` is True, and pydantic would read it as the number 1.
    if isinstance(value, bool):
        raise ValueError("should be a number, not a boolean")
    return value


Count = Annotated[int, Field(ge=1), BeforeValidator(_not_bool)]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(_not_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(_not_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_not_bool)]
Fraction = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_not_bool)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The transformer. Widths are in features."""

    d_model: Count = 128
    n_layers: Count = 4
    n_heads: Count = 4
    d_ff: Count = 384
    ngram: Annotated[int, Field(ge=1, le=6)] = 1  # longest hashed byte n-gram that is added to the byte embedding; 1: none
    ngram_buckets: Count = 4096  # rows of the table of each n-gram length

    @model_validator(mode="after")
    def _heads(self) -> ModelConfig:
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ValueError(f"d_model={self.d_model} is not an even number of features for each of n_heads={self.n_heads}")
        return self


class DataConfig(Section):
    """The corpus (`*.py` of the standard library) and how it is cut into windows."""

    seq_len: Annotated[int, Field(ge=2), BeforeValidator(_not_bool)] = 128  # bytes of context
    max_bytes: Annotated[int, Field(ge=65536), BeforeValidator(_not_bool)] = 8 << 20  # of the corpus, train and validation together
    val_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.05  # of the bytes, in whole files
    exclude: tuple[str, ...] = (
        # Tests are absent from many installations, _sysconfigdata differs between builds of one version.
        "test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__", "_sysconfigdata*",
    )  # fmt: skip
    seed: Seed = 0  # of the order of windows


class MeshConfig(Section):
    """Devices along each axis; `data: -1` takes what `model` leaves."""

    data: Annotated[int, BeforeValidator(_not_bool)] = -1
    model: Count = 1

    @model_validator(mode="after")
    def _data_axis(self) -> MeshConfig:
        if self.data != -1 and self.data < 1:
            raise ValueError(f"data={self.data} should be at least 1, or -1 for all remaining devices")
        return self


class TrainConfig(Section):
    """The optimization and what is reported of it."""

    steps: Count = 200
    batch_size: Count = 16  # windows per step over all processes
    learning_rate: Positive = 3e-3
    warmup_steps: CountOrZero = 20  # at most half of the steps
    final_lr_fraction: Fraction = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Positive = 1.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    seed: Seed = 0
    mesh: MeshConfig = MeshConfig()
    log_every_steps: Count = 10
    eval_every_steps: CountOrZero = 100  # 0: only at the end
    eval_bytes: Annotated[int, Field(ge=1024)] = 65536  # of the validation text, from its beginning
    sample_bytes: CountOrZero = 200
    sample_temperature: Positive = 0.7
    prompt: Annotated[str, Field(min_length=1)] = "def "
    events: str | None = None  # every rank appends a JSON line per step (this waits for each step)
    digest_out: str | None = None  # every rank writes a digest of its part of the final state to <path>.<rank>


class RayConfig(Section):
    """What Ray starts."""

    num_workers: Count | tuple[Count, Count] = 2  # or [min, max]: elastic
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    devices_per_worker: Count | None = None  # cpu: virtual devices; gpu: devices; None: 1, or all that a TPU host has
    cpus_per_worker: Positive = 1
    max_failures: CountOrZero = 3  # failed starts in a row without a new step
    env: dict[str, str] = {}  # of the workers
    scaling: dict[str, Any] = {}  # more for Ray's ScalingConfig: topology, accelerator_type, label_selector, …


class Config(Section):
    """The whole file. `state` goes to `raystate.StateConfig` as it is, which validates it."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    ray: RayConfig = RayConfig()
    state: dict[str, Any] = {}

    @model_validator(mode="after")
    def _together(self) -> Config:
        mesh, heads = self.train.mesh.model, self.model.n_heads
        if heads % mesh or self.model.d_ff % mesh:
            raise ValueError(f"train.mesh.model={mesh} should divide model.n_heads={heads} and model.d_ff={self.model.d_ff}")
        if self.ray.platform == "cpu":  # elsewhere only the workers know their devices
            workers = self.ray.num_workers
            fewest, most = (workers, workers) if isinstance(workers, int) else workers
            for count in range(fewest, most + 1):
                if count in (fewest, most) or self.train.batch_size % count == 0:  # fit leaves the others out
                    self._check_devices(count, count * (self.ray.devices_per_worker or 1))
        return self

    def _check_devices(self, workers: int, devices: int) -> None:
        mesh, batch_size = self.train.mesh, self.train.batch_size
        data = devices // mesh.model if mesh.data == -1 else mesh.data
        if data < 1 or data * mesh.model != devices:
            shape = f"train.mesh: data={mesh.data}, model={mesh.model}"
            raise ValueError(f"{shape} does not fit {devices} devices (ray.num_workers={workers} × ray.devices_per_worker)")
        if batch_size % data:
            raise ValueError(f"train.batch_size={batch_size} should be a multiple of the mesh's data axis, {data}")


# ---------------------------------------------------------------- reading


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides (values are YAML).

    Raises:
        UsageError: the file can't be read or isn't a YAML mapping, or a key or value is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{path}: {reason}") from error
    raw = _parse(text, str(path))
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: should be a mapping of sections, got {type(raw).__name__}")
    for section, value in raw.items():
        if value is None:  # `state:` with nothing below it
            raw[section] = {}
    for override in overrides:
        _set(raw, override)
    return validate(raw, source=str(path))


def validate(raw: Mapping[str, Any], *, source: str = "config") -> Config:
    """Check a mapping of sections.

    Raises:
        UsageError: with one line per mistake, each naming the field.
    """
    try:
        return Config.model_validate(dict(raw))
    except pydantic.ValidationError as error:
        lines: dict[str, str] = {}  # by field: a union reports one field several times, its first alternative first
        for item in error.errors():
            lines.setdefault(_field(item), _explain(item))
        raise UsageError("\n".join(f"{source}: {line}" for line in lines.values())) from error


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{source}: not valid YAML: {problem}{where}") from error


def _set(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise UsageError(f"--set {override}: should be section.key=value, for example --set train.steps=100")
    value = _parse(text, f"--set {key}")
    node = raw
    for depth, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise UsageError(f"--set {override}: {'.'.join(parts[: depth + 1])} is not a section")
        node = child
    node[parts[-1]] = value


def _explain(item: Any) -> str:
    field = _field(item)
    message = "unknown key" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
    given = item.get("input")
    shown = "" if given is None or isinstance(given, (dict, BaseModel)) else f", got {given!r}"
    return f"{field}: {message}{shown}" if field else f"{message}{shown}"


def _field(item: Any) -> str:
    """Dotted name; what pydantic adds for the alternatives of a union is left out."""
    return ".".join(str(part) for part in item["loc"] if "[" not in str(part) and part not in ("int", "constrained-int"))
