"""StateConfig: every setting of a run, checked once, before anything starts.

A config is a frozen value. It pickles, so that the driver, the trainers and the actors all see the same one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import urllib.parse
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, Protocol, Self, cast, runtime_checkable

import pydantic
from pydantic import BeforeValidator, Field

from raystate.arena.files import check_arena_dir
from raystate.arena.sizes import parse_memory, parse_share
from raystate.config.errors import by_name, config_error, contradiction, one_of_all, plain, refuse_unknown
from raystate.config.rehearsing import redirected
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.messages import Settings
from raystate.core.formats.tree import CHUNK_BYTES, WriteOptions
from raystate.orbax.save_policies import save_rules
from raystate.public_calls import public
from raystate.storage.url import canonical_url, refuse_passing
from raystate.waits import UNMEASURED_SAVE_EVERY_S

SMALLEST_MEMORY = 1 << 20  # bytes that `host_memory` can mean

PositiveInt = Annotated[int, Field(gt=0)]
NaturalInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

if TYPE_CHECKING:

    class _Text:
        """Given as text or as a path, kept as text: so type checkers take both, and the field is a `str`."""

        def __get__(self, owner: object, kind: object, /) -> str: ...
        def __set__(self, owner: object, value: str | os.PathLike[str], /) -> None: ...

    class _TextOrNone:
        def __get__(self, owner: object, kind: object, /) -> str | None: ...
        def __set__(self, owner: object, value: str | os.PathLike[str] | None, /) -> None: ...

    class _Share:
        def __get__(self, owner: object, kind: object, /) -> float: ...
        def __set__(self, owner: object, value: str | float, /) -> None: ...

else:
    _Text, _TextOrNone = str, str | None
    _Share = Annotated[float, Field(ge=1e-6, lt=1), BeforeValidator(parse_share)]

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@runtime_checkable
class SavePolicy(Protocol):
    """What `save_policy` takes: an Orbax `SaveDecisionPolicy`."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool: ...


@runtime_checkable
class KeepPolicy(Protocol):
    """What `keep_policy` takes: an Orbax `PreservationPolicy`."""

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Sequence[bool]: ...


class StateConfig(pydantic.BaseModel, frozen=True):
    """The settings of a run. All keyword-only; a bad one is a `ConfigError` that names the field, the value and what is allowed.

    Attributes:
        storage: the run's identity: `gs://…`, `s3://…`, `file://…` or a directory (also a PathLike). Kept in canonical form.
            Under `ray job submit --working-dir` an absolute one: a folder of a Ray session is refused.
        run: name of the run, in actors, metrics and logs: letters, digits, `.`, `_`, `-`.
        run_metadata: a dict of JSON values about the whole run, written with its first durable step to where
            Orbax's `CheckpointManager(metadata=…)` has it; a file that is there stays.
            `raystate.metadata(storage).run` gives it.
        save_every_steps: steps between durable saves: the first `save()` at or after each multiple.
        save_every_s: seconds between durable saves, decided once for all hosts. With `save_every_steps` too, whichever is due.
            With no save rule at all: as often as costs the training least, measured, at most every 60 s; the log says how often.
        save_policy: one of Orbax's `SaveDecisionPolicy`s instead of `save_every_*`, alone or in its `AnySavePolicy`. All hosts save the
            same steps: see `raystate.orbax.save_policies`. A save that is lost, because storage failed, is made again only where
            Orbax would: `InitialSavePolicy` wants a step until the run has one, `SpecificStepsPolicy` these steps and no others.
        check_saves: "error": the first `save` of what no restart of this run could take is refused: another dtype, shape, tree or
            item than its restore asks for, and an object's address in an iterator's state, such as `<Source object at 0x7f…>`.
            Leaves and items that a restart would leave out are a warning. "warn": warn of all of it. "off": don't look.
        snapshot_every_steps: steps between snapshots in host memory, the same steps on all hosts; 0: only steps that become
            durable. None: as few as `save_overhead` allows, by what snapshots cost the steps, measured; the log says how many. To
            measure, a few calls of `save` wait until their state is computed: those near the first eight snapshots, and near one
            now and then. Below eight, one snapshot of eight is left out, so that there are undisturbed steps.
        save_overhead: share of the training's time, `"3%"` or 0.03, from 1e-6 up, for snapshots and saves together, where no number is.
        snapshot_slots: snapshots per trainer that host memory has room for, at least 2 (raystate fills one and keeps one).
        replicas: copies of each host's snapshots in the memory of other hosts, in other failure domains where there are any; 0: none.
            With 1 the loss of a node costs no step that has its copies, with 2 the loss of two nodes at once, and so on. Each takes
            as much host memory again. Where there are fewer other hosts, there are as many copies as these; on one host there is none.
        domain_labels: names of Ray node labels that say which nodes are lost together: a node's failure domain is the first of them
            that it has. A node with none is a domain of its own.
        host_memory: cap per node over all runs, at least 1 MiB: percent of the node's memory (`"40%"`), bytes, or a size (`"8GiB"`).
        arena_dir: absolute directory for the snapshots; None: the system's shared memory.
        record_dir: absolute directory on the Coordinator's node for the record of its decisions, which `raystate story` reads, at
            most 6 MiB for a run; None: `raystate` among Ray's logs.
        keep_last: how many of the newest durable steps to keep. None: keep no step merely because it is recent; the newest is
            always kept. With no keep rule at all (`keep_last` None too) every step is kept.
        keep_every_steps: also keep the steps that are a multiple of it.
        keep_every_s: also keep one step for each period of so many seconds.
        keep_best: also keep so many of the best durable steps, by `best_metric`.
        best_metric: the name in `save(metrics=…)` that ranks steps; needed by `keep_best`.
        best_mode: "min": smaller values are better; "max": larger ones.
        keep_policy: an Orbax `PreservationPolicy` instead of all `keep_*`; it may hold functions of the script. The newest step is
            always kept.
        chunk_bytes: about how many bytes of an array are written, checksummed and read back as a whole, at least 4,096. Small ones make
            partial reads and other shardings cheap, large ones make fewer of them; the default of 4 MiB costs a restore nothing that
            can be measured.
        zstd_level: compress arrays with zstd, 1 (fast) to 22 (small); None: not, because trained weights hardly get smaller, and a save
            should not take the CPUs that feed the training. It pays for masks, tables and sparse values. Needs as much host memory
            again while a step is written.
        file_bytes: size at which a data file is closed, at least 1 MiB; None: 32 to 448 MiB, by the size of a host's share, since in a
            bucket every file is a billed request.
        start_timeout_s: seconds until all ranks of a worker group have joined. Ray gets as long, and no less than `idle_timeout_s`, to
            start the group's processes once it has places for them: what it pulls and installs before is part of that.
        save_timeout_s: seconds for one durable save, from staged to published.
        barrier_timeout_s: seconds until all ranks have arrived at the same collective call.
        restore_timeout_s: seconds for a restore.
        hang_timeout_s: seconds without any call of its `StateManager` after which a trainer that the others wait for counts as
            hung. raystate logs its Python stack and ends it, and the run recovers. Set it longer than the first step with its
            compilation, and than any pause of the script. None: raystate only names the trainer, after `barrier_timeout_s`.
        idle_timeout_s: seconds without any trainer after which raystate makes the newest snapshot durable and releases the run.
        assume_dead_after_s: seconds after which raystate takes an older attempt on another cluster for dead, if it was superseded
            while it published or deleted a step. Until then it neither deletes that step nor saves it again.
        host_timeout_s: seconds of silence after which a host counts as down.
        metadata_url: base URL of the server that each node asks whether it is preempted, in the protocol of Google Compute Engine's
            metadata server; None: Google's on its machines, none elsewhere. raystate notices nodes that Ray drains without it.
        compilation_cache_bytes: bytes for the programs that JAX compiles, which a restart then loads; 0: keep none. A node has so many
            in a folder beside Ray's temporary one, which all runs of this user share. The run's storage has so many for other nodes
            and clusters. raystate leaves a folder of your own (`JAX_COMPILATION_CACHE_DIR`) to JAX.
    """

    model_config: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    storage: _Text
    run: str
    run_metadata: dict[str, object] | None = None

    save_every_steps: PositiveInt | None = None
    save_every_s: Seconds | None = None
    save_policy: SavePolicy | None = None

    check_saves: Literal["error", "warn", "off"] = "error"

    snapshot_every_steps: NaturalInt | None = None
    save_overhead: _Share = cast("Any", 0.03)
    snapshot_slots: Annotated[int, Field(ge=2)] = 3
    replicas: NaturalInt = 1
    domain_labels: tuple[str, ...] = ("ray.io/tpu-slice-name",)
    host_memory: str | int = "40%"
    arena_dir: _TextOrNone = cast("Any", None)
    record_dir: _TextOrNone = cast("Any", None)

    keep_last: PositiveInt | None = 3
    keep_every_steps: PositiveInt | None = None
    keep_every_s: Seconds | None = None
    keep_best: PositiveInt | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_policy: KeepPolicy | None = None

    chunk_bytes: Annotated[int, Field(ge=4096)] = CHUNK_BYTES
    zstd_level: Annotated[int, Field(ge=1, le=22)] | None = None
    file_bytes: Annotated[int, Field(ge=1 << 20)] | None = None

    start_timeout_s: Seconds = 300.0
    save_timeout_s: Seconds = 600.0
    barrier_timeout_s: Seconds = 120.0
    restore_timeout_s: Seconds = 600.0
    hang_timeout_s: Seconds | None = None
    idle_timeout_s: Seconds = 900.0
    assume_dead_after_s: Seconds = 24 * 3600.0
    host_timeout_s: Seconds = 10.0
    metadata_url: str | None = None
    compilation_cache_bytes: NaturalInt = 4 << 30

    if not TYPE_CHECKING:  # type checkers keep the signature that pydantic derives from the fields

        @public
        def __init__(self, *unnamed: object, **values: Any):
            if unnamed:
                raise by_name(unnamed[0])
            refuse_unknown(values, list(type(self).model_fields))
            try:
                super().__init__(**values)
            except pydantic.ValidationError as error:
                raise config_error(error) from None

        def __setattr__(self, name: str, value: object) -> None:
            self._refuse_change(name, value)

        def __delattr__(self, name: str) -> None:
            self._refuse_change(name, None)

    # ------------------------------------------------------------ construction

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **overrides: object) -> Self:
        """Read the `state:` section of a YAML file; other sections are the job's own.

        Args:
            path: a local file.
            **overrides: fields that win over the file's.

        Raises:
            ConfigError: the file can't be read, or a field is bad; names file, section and field.
        """
        from raystate.config.file import SECTION, read_section  # it loads yaml

        section = read_section(Path(path))
        try:
            return cls(**dict[str, Any]({**section, **overrides}))
        except ConfigError as error:
            if error.field in overrides:
                raise
            facts = {**error.details, "file": str(path), "section": SECTION}
            raise ConfigError(f"{path}, section {SECTION!r}: {error.message}", **facts) from None

    def replace(self, **changes: object) -> Self:
        """A copy with these fields changed, checked again as a whole.

        Raises:
            ConfigError: a change is bad, or contradicts a field that was set before (set that one to None in the same call).
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**dict[str, Any]({**given, **changes}))

    def _refuse_change(self, name: str, value: object) -> NoReturn:
        refuse_unknown({name: value}, list(type(self).model_fields))
        raise ConfigError(
            f"{name}: a StateConfig does not change, since a run may be using it; make another: config.replace({name}=…)",
            field=name, got=plain(value),
        )  # fmt: skip

    # ------------------------------------------------------------ what follows from the fields

    @property
    def effective_save_every_s(self) -> float | None:
        """Seconds between time-based durable saves; None: steps or a policy decide alone. Without any rule: until one was measured."""
        if all(getattr(self, name) is None for name in _SAVE_RULES):
            return UNMEASURED_SAVE_EVERY_S
        return self.save_every_s if self.save_policy is None else save_rules(self.save_policy).when_idle_s

    @property
    def write_options(self) -> WriteOptions:
        """How the arrays of a step are laid out in storage."""
        return WriteOptions(chunk_bytes=self.chunk_bytes, zstd_level=self.zstd_level, file_bytes=self.file_bytes)

    def core_settings(self) -> Settings:
        """What the Coordinator's decisions depend on: every field that core knows, under the same name."""
        known = {field.name for field in dataclasses.fields(Settings)} & set(type(self).model_fields)
        values: dict[str, Any] = {name: getattr(self, name) for name in known}
        is_measured = all(getattr(self, name) is None for name in _SAVE_RULES)
        values |= {"save_every_s": self.effective_save_every_s, "save_measured": is_measured}
        values |= {"save_when_idle": self.save_policy is not None, "save_first": save_rules(self.save_policy).first}
        return Settings(**values)

    # ------------------------------------------------------------ checks

    @pydantic.field_validator("storage", mode="before")
    @classmethod
    def _storage_is_canonical(cls, value: Any) -> str:
        with one_of_all():
            url = canonical_url(value)
            refuse_passing(url, value)
        return url

    @pydantic.field_validator("run")
    @classmethod
    def _run_is_a_name(cls, value: str) -> str:
        if not _RUN_NAME.fullmatch(value):
            raise ValueError("must be 1 to 100 letters, digits, '.', '_' or '-', the first a letter or digit")
        return value

    @pydantic.field_validator("run_metadata")
    @classmethod
    def _run_metadata_is_json(cls, value: dict[str, object] | None) -> dict[str, object] | None:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"must be a dict of JSON values: {error}") from None
        return value

    @pydantic.field_validator("host_memory", mode="before")
    @classmethod
    def _host_memory_is_a_size(cls, value: Any) -> str | int:
        with one_of_all():
            size = parse_memory(value, total_bytes=1 << 40)
        if size < SMALLEST_MEMORY and "%" not in str(value):
            raise ValueError(f'that is {size} bytes; at least 1 MiB, "8GiB" is a size, and "40%" is percent of the node\'s memory')
        return value

    @pydantic.field_validator("domain_labels", mode="before")
    @classmethod
    def _names_may_be_a_list(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError("must be a list of names of Ray node labels")
        return tuple(cast("list[object]", value)) if isinstance(value, list) else value  # as YAML has it

    @pydantic.field_validator("arena_dir", "record_dir", mode="before")
    @classmethod
    def _directory_is_absolute(cls, value: object, info: pydantic.ValidationInfo) -> object:
        if value is None:
            return None
        text = str(value) if isinstance(value, str | PurePath) else ""
        if not os.path.isabs(text):
            where = "every node opens it" if info.field_name == "arena_dir" else "on the Coordinator's node"
            raise ValueError(f"must be an absolute directory ({where}) or None")
        if info.field_name == "arena_dir":
            with one_of_all():
                check_arena_dir(os.path.normpath(text))
        return os.path.normpath(text)

    @pydantic.field_validator("best_metric")
    @classmethod
    def _best_metric_is_not_empty(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must be the name of a metric or None")
        return value

    @pydantic.field_validator("metadata_url")
    @classmethod
    def _metadata_url_is_http(cls, value: str | None) -> str | None:
        if value is not None and not _is_http_base(value):
            raise ValueError("must be the http:// URL of a metadata server, as http://HOST[:PORT][/PATH], or None")
        return value

    @pydantic.field_validator("save_policy", mode="before")
    @classmethod
    def _save_policy_decides(cls, value: Any) -> Any:
        save_rules(_check_policy(value, "should_save", "SaveDecisionPolicy"))  # its ValueError says what is wrong
        return value

    @pydantic.field_validator("keep_policy", mode="before")
    @classmethod
    def _keep_policy_decides(cls, value: Any) -> Any:
        return _check_policy(value, "should_preserve", "PreservationPolicy")

    @pydantic.model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        for policy, fields in (("keep_policy", _KEEP_FIELDS), ("save_policy", _SAVE_FIELDS)):
            both = [name for name in fields if name in self.model_fields_set and getattr(self, name) is not None]
            if both and getattr(self, policy) is not None:
                raise contradiction(both[0], getattr(self, both[0]), f"{policy} decides alone; leave it out")
        if self.keep_best is not None and self.best_metric is None:
            raise contradiction("best_metric", None, f"must name a metric, because keep_best={self.keep_best} ranks steps by it")
        return self


def check_config(given: Any, call: str) -> StateConfig:
    """What a caller gave as its config; in a rehearsal the one in its place.

    Args:
        call: what was called, for the message.

    Raises:
        ConfigError: it is none; says how to make one.
    """
    if isinstance(given, StateConfig):
        return redirected(given)
    what, way = f"a {type(given).__name__}", "StateConfig(storage=…, run=…)"
    if isinstance(given, str | PurePath):
        path = str(given)
        way = f"StateConfig.from_file({path!r})" if path.endswith((".yaml", ".yml")) else f"StateConfig(storage={path!r}, run=…)"
    elif isinstance(given, dict):
        way = "StateConfig(**settings), or StateConfig.from_file(path) for the section of a file"
    elif given is StateConfig:
        what, way = "the class StateConfig", f"{way}, an object and not the class"
    raise ConfigError(f"{call} needs a StateConfig, not {what}: {way}", field="config")


_SAVE_RULES = (*(_SAVE_FIELDS := ("save_every_steps", "save_every_s")), "save_policy")
_KEEP_FIELDS = ("keep_last", "keep_every_steps", "keep_every_s", "keep_best")


def _check_policy(value: Any, method: str, protocol: str) -> Any:
    if value is not None and (isinstance(value, type) or not callable(getattr(value, method, None))):
        raise ValueError(f"must be an Orbax {protocol} object (with a `{method}` method) or None")
    return value


def _is_http_base(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        other = parts.query or parts.fragment or parts.username is not None or parts.port == 0
    except ValueError:  # a port or an address that is none
        return False
    return parts.scheme == "http" and bool(parts.hostname) and not other and url.isascii() and not re.search(r"\s", url)
