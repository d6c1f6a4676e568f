"""StateConfig: a bad field is a ConfigError that names it; a good config is a value."""

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raystate import ConfigError, StateConfig
from raystate.core.formats.messages import Settings


@dataclasses.dataclass(frozen=True)
class Policy:
    """Both of Orbax's policy protocols at once."""

    every: int = 10

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return True

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return []


def config(**fields: Any) -> StateConfig:
    return StateConfig(**{"storage": "/nonexistent/lm", "run": "lm", **fields})


BAD: list[tuple[Mapping[str, Any], str, str]] = [
    # fields, the one that is named, what the message says
    ({"storage": ""}, "storage", "empty"),
    ({"storage": 3}, "storage", "PathLike"),
    ({"storage": None}, "storage", "None"),
    ({"storage": "hdfs://host/x"}, "storage", "hdfs"),
    ({"run": ""}, "run", "letters"),
    ({"run": "a/b"}, "run", "'a/b'"),
    ({"run": "-x"}, "run", "first"),
    ({"run": "x" * 101}, "run", "100"),
    ({"save_every_steps": 0}, "save_every_steps", "greater than 0"),
    ({"save_every_steps": 1.5}, "save_every_steps", "integer"),
    ({"save_every_steps": "3"}, "save_every_steps", "'3'"),
    ({"save_every_steps": True}, "save_every_steps", "integer"),
    ({"save_every_s": 0}, "save_every_s", "greater than 0"),
    ({"save_every_s": float("nan")}, "save_every_s", "nan"),
    ({"save_every_s": float("inf")}, "save_every_s", "finite"),
    ({"save_policy": "often"}, "save_policy", "should_save"),
    ({"save_policy": Policy}, "save_policy", "object"),
    ({"save_policy": Policy()}, "save_policy", "Policy is not one of Orbax's own policies"),
    ({"keep_policy": Policy(), "keep_last": 2}, "keep_last", "keep_policy decides alone"),
    ({"snapshot_every_steps": -1}, "snapshot_every_steps", "greater than or equal to 0"),
    ({"save_overhead": 1e-320}, "save_overhead", "greater than or equal to 0.000001"),  # an interval that no float holds
    ({"snapshot_slots": 1}, "snapshot_slots", "greater than or equal to 2"),
    ({"replicas": -1}, "replicas", "greater than or equal to 0"),
    ({"host_memory": "0%"}, "host_memory", "percentage"),
    ({"host_memory": "101%"}, "host_memory", "101%"),
    ({"host_memory": "8 gigs"}, "host_memory", "'8 gigs'"),
    ({"host_memory": "8 pounds"}, "host_memory", "2GiB"),
    ({"host_memory": 0}, "host_memory", "bytes"),
    ({"host_memory": 0.4}, "host_memory", "0.4"),
    ({"host_memory": True}, "host_memory", "True"),
    ({"host_memory": None}, "host_memory", "None"),
    ({"host_memory": 40}, "host_memory", "that is 40 bytes"),
    ({"host_memory": "1000 kB"}, "host_memory", '"40%" is percent'),
    ({"arena_dir": "relative/dir"}, "arena_dir", "absolute"),
    ({"arena_dir": 7}, "arena_dir", "absolute"),
    ({"record_dir": "logs"}, "record_dir", "absolute"),
    ({"run_metadata": {"a": {1}}}, "run_metadata", "JSON"),
    ({"run_metadata": [1]}, "run_metadata", "dictionary"),
    ({"metadata_url": "metadata.google.internal"}, "metadata_url", "http:// URL"),
    ({"metadata_url": 80}, "metadata_url", "string"),
    ({"metadata_url": "http://[::1"}, "metadata_url", "http:// URL"),
    ({"metadata_url": "http://host:99999"}, "metadata_url", "http:// URL"),
    ({"metadata_url": "http://host?key=value"}, "metadata_url", "http:// URL"),
    ({"domain_labels": "ray.io/tpu-slice-name"}, "domain_labels", "a list of names"),
    ({"keep_last": 0}, "keep_last", "greater than 0"),
    ({"keep_every_steps": 0}, "keep_every_steps", "greater than 0"),
    ({"keep_every_s": -1.0}, "keep_every_s", "greater than 0"),
    ({"keep_best": 0, "best_metric": "loss"}, "keep_best", "greater than 0"),
    ({"keep_best": 2}, "best_metric", "keep_best=2"),
    ({"best_metric": " "}, "best_metric", "name of a metric"),
    ({"best_mode": "minimum"}, "best_mode", "'min' or 'max'"),
    ({"keep_policy": 3}, "keep_policy", "should_preserve"),
    *[
        ({f"{what}_timeout_s": value}, f"{what}_timeout_s", said)
        for what in ("start", "save", "barrier", "restore", "hang", "idle", "host")
        for value, said in ((0, "greater than 0"), (float("inf"), "finite"), ("60", "number"))
    ],
    ({"zstd_level": 0}, "zstd_level", "greater than or equal to 1"),
    ({"zstd_level": 23}, "zstd_level", "less than or equal to 22"),
    ({"zstd_level": True}, "zstd_level", "integer"),
    ({"chunk_bytes": 100}, "chunk_bytes", "4096"),
    ({"file_bytes": 5}, "file_bytes", str(1 << 20)),
    ({"use_compression": 1}, "use_compression", "use zstd_level"),
    ({"chunk_byte_size": 1}, "chunk_byte_size", "use chunk_bytes"),
    ({"ocdbt_target_data_file_size": 1}, "ocdbt_target_data_file_size", "use file_bytes"),
    ({"save_every_step": 3}, "save_every_step", "did you mean 'save_every_steps'?"),
    ({"colour": "red"}, "colour", "the fields are: storage, run"),
]


@pytest.mark.parametrize(("fields", "named", "said"), BAD, ids=[f"{list(fields)}={list(fields.values())}" for fields, _, _ in BAD])
def test_bad_field_is_named(fields: Mapping[str, Any], named: str, said: str):
    with pytest.raises(ConfigError) as caught:
        config(**fields)
    assert caught.value.field == named
    assert named in caught.value.message
    assert said in caught.value.message
    again = pickle.loads(pickle.dumps(caught.value))  # Ray carries it between processes
    assert again.details == caught.value.details or "nan" in str(again.details)


def test_no_bad_field_hides_another():
    """Those that other parts of raystate check did."""
    with pytest.raises(ConfigError) as caught:
        StateConfig(storage="", run="a b", host_memory="many", arena_dir="/" + "a" * 300, keep_last=0)
    assert caught.value.fields == ["arena_dir", "host_memory", "keep_last", "run", "storage"]
    assert caught.value.field == "storage"
    for said in (
        "storage: '' is not usable",
        "run = 'a b': must be",
        "got 'many'",
        "arena_dir: the name a",
        "keep_last = 0: must be",
    ):
        assert said in str(caught.value)


def test_missing_fields_are_named():
    with pytest.raises(ConfigError, match="storage: must be given; run: must be given"):
        StateConfig()  # pyright: ignore[reportCallIssue]


def test_one_identity_for_all_spellings_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    spellings = [tmp_path / "lm", str(tmp_path / "lm"), f"file://{tmp_path}/lm", f"{tmp_path}//x/../lm/", "lm"]
    assert len({config(storage=spelling) for spelling in spellings}) == 1


@pytest.mark.parametrize("below", ["runtime_resources/working_dir_files/_ray_pkg_0a1b", "artifacts/lm/working_dirs/trial"])
def test_a_storage_that_ray_throws_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str):
    folder = tmp_path / "session_2026-11-27_08-15-00_123456_4711" / below
    folder.mkdir(parents=True)
    link = tmp_path / "session_latest"
    link.symlink_to(folder)
    monkeypatch.chdir(folder)
    for storage in ("runs/lm", ".", folder / "lm", f"file://{link}/lm"):
        with pytest.raises(ConfigError, match=r"throws away.*absolute path that all nodes see, or a bucket") as caught:
            config(storage=storage)
        assert caught.value.field == "storage"
    assert config(storage=tmp_path / "session_notes" / "lm").storage == f"file://{tmp_path}/session_notes/lm"


def test_is_a_value():
    one, other = config(save_every_steps=5), config(save_every_steps=5)
    assert one == other
    assert hash(one) == hash(other)
    assert one != config(save_every_steps=6)
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert hash(again) == hash(one)


def test_replace_checks_the_whole_again():
    base = config(save_every_steps=5)
    assert base.replace(run="other") == config(save_every_steps=5, run="other")
    assert base.run == "lm"
    with pytest.raises(ConfigError, match="best_metric"):
        base.replace(keep_best=2)
    assert base.replace(save_every_s=5.0, save_every_steps=None).save_every_s == 5.0
    with pytest.raises(ConfigError, match="did you mean 'replicas'"):
        base.replace(replica=2)


def test_defaults_of_fields_that_switch_something():
    assert [config(replicas=count).replicas for count in (0, 1, 2)] == [0, 1, 2]
    unset: dict[str, Any] = dict.fromkeys(("save_policy", "hang_timeout_s"))
    assert config(**unset) == config()
    assert config().replicas == 1


@pytest.mark.parametrize(
    ("fields", "every_s"),
    [({}, 300.0), ({"save_every_steps": 5}, None), ({"save_every_s": 5}, 5.0)],
)
def test_save_interval_is_automatic_only_without_a_rule(fields: Mapping[str, Any], every_s: float | None):
    assert config(**fields).effective_save_every_s == every_s
    settings = config(**fields).core_settings()
    assert (settings.save_every_s, settings.save_measured) == (every_s, not fields)


def test_core_settings_carry_every_field_that_core_knows():
    fields: dict[str, Any] = {
        "save_every_s": 7.0, "snapshot_every_steps": 2, "start_timeout_s": 1.0, "barrier_timeout_s": 2.0, "save_timeout_s": 3.0,
        "restore_timeout_s": 4.0, "host_timeout_s": 5.0, "idle_timeout_s": 6.0, "assume_dead_after_s": 7.0,
        "hang_timeout_s": 8.0,
    }  # fmt: skip
    settings = config(**fields).core_settings()
    assert isinstance(settings, Settings)
    assert {name: getattr(settings, name) for name in fields} == fields
    assert (settings.run, settings.storage) == ("lm", config().storage)


def test_defaults_agree_with_core():
    ours = config().core_settings()
    assert ours == Settings(run="lm", storage=ours.storage, save_every_s=300.0, save_measured=True)


# ---------------------------------------------------------------- files


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_from_file_with_overrides(tmp_path: Path):
    path = write(
        tmp_path, "model: {n: 2}\nstate:\n  storage: /nonexistent/lm\n  run: lm\n  save_every_steps: 20\n  host_memory: 1GiB\n"
    )
    assert StateConfig.from_file(path) == config(save_every_steps=20, host_memory="1GiB")
    assert StateConfig.from_file(str(path), run="other", save_every_steps=None) == config(run="other", host_memory="1GiB")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("state:\n  storage: /x\n  run: lm\n  keep_last: -1\n", ["section 'state'", "keep_last = -1", "greater than 0"]),
        ("state:\n  storage: /x\n  run: lm\n  keep_lsat: 1\n", ["section 'state'", "keep_lsat", "did you mean 'keep_last'?"]),
        ("state:\n  run: lm\n", ["section 'state'", "storage: must be given"]),
        ("model: {}\nstat: {}\n", ["no section 'state'", "model, stat"]),
        ("", ["no section 'state'"]),
        ("- state\n", ["no section 'state'"]),
        ("state: 7\n", ["section 'state'", "7"]),
        ("state:\n", ["section 'state'", "None"]),
        ("state: {\n", ["not YAML", "line"]),
        (
            "state:\n  run: lm\n  save_every_steps: 100\n  storage: /x\n  save_every_steps: 5\n",
            ["section 'state': save_every_steps is there twice, in lines 3 and 5"],
        ),
        ("state: {run: a}\nstate: {run: b}\n", ["section 'state' is there twice, in lines 1 and 2"]),
        ("state: {storage: /x, run: lm, keep_last: 010}\n", ["keep_last: 010 is 8 in YAML", "octal"]),
        ("state: {storage: /x, run: lm, keep_best: 1:30}\n", ["keep_best: 1:30 is 90 in YAML", "base 60"]),
        ("state: {storage: /x, run: lm, save_every_s: 1:30.5}\n", ["save_every_s: 1:30.5 is 90.5 in YAML"]),
        ("a: &a {storage: /x, run: lm, replicas: 01}\nstate: {<<: *a}\n", ["replicas: 01 is 1 in YAML"]),
        ("state: {storage: /x, run: lm, host_memory: 40}\n", ["host_memory = 40: that is 40 bytes", '"40%" is percent']),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, said: list[str]):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        StateConfig.from_file(path)
    assert caught.value.file == str(path)
    assert caught.value.section == "state"
    assert all(part in caught.value.message for part in [str(path), *said])


def test_what_a_file_may_say(tmp_path: Path):
    """What a section brings along may be given anew there, other sections are the job's own, and 0 is no octal number."""
    text = "a: &a {storage: /x, run: lm, replicas: 2}\njob: {n: 1, n: 2, time: 1:30}\nstate: {<<: *a, replicas: 0, run: '010'}\n"
    got = StateConfig.from_file(write(tmp_path, text))
    assert got == StateConfig(storage="/x", run="010", replicas=0)


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: can't be read"):
        StateConfig.from_file(tmp_path / "none.yaml")


def test_bad_override_is_not_blamed_on_the_file(tmp_path: Path):
    path = write(tmp_path, "state: {storage: /x, run: lm}\n")
    with pytest.raises(ConfigError) as caught:
        StateConfig.from_file(path, keep_last=0)
    assert caught.value.field == "keep_last"
    assert caught.value.file is None


def test_labels_of_failure_domains_may_come_from_yaml(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("state: {storage: /tmp/x, run: r, domain_labels: [rack, zone]}")
    assert StateConfig.from_file(path).domain_labels == ("rack", "zone")
    assert config(domain_labels=()).domain_labels == ()
