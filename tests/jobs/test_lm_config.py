"""The job's configuration: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import train_lm
from jobs.lm.config import Config, UsageError, load, validate

CONFIGS = Path(__file__).parents[2] / "configs"


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_the_shipped_config_is_valid() -> None:
    config = load(CONFIGS / "lm_cpu.yaml")
    assert config.ray.num_workers == 2
    assert config.state["run"] == "lm_cpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {stesp: 5}", "train.stesp: unknown key, got 5"),
        ("train: {mesh: {modle: 2}}", "train.mesh.modle: unknown key"),
        ("train: {steps: many}", "train.steps: Input should be a valid integer"),
        ("train: {steps: 0}", "train.steps: Input should be greater than or equal to 1, got 0"),
        ("train: {steps: yes}", "train.steps: should be a number, not a boolean, got True"),
        ("train: {learning_rate: .nan}", "train.learning_rate: "),
        ("ray: {num_workers: 0}", "ray.num_workers: "),
        ("ray: {platform: abacus}", "ray.platform: "),
        ("model: {d_model: 130}", "model: d_model=130 is not an even number of features for each of n_heads=4"),
        ("train: {mesh: {model: 4}}", "train.mesh: data=-1, model=4 does not fit 2 devices (ray.num_workers=2 × "),
        ("train: {batch_size: 5}", "train.batch_size=5 should be a multiple of the mesh's data axis, 2"),
        ("train: {mesh: {model: 3}}", "train.mesh.model=3 should divide model.n_heads=4"),
        ("train: {mesh: {data: 0}}", "train.mesh: data=0 should be at least 1, or -1"),
        ("train: 7", "train: "),
        ("train: {steps: 5\nmodel: {", "not valid YAML: "),
        ("- a\n- b", "should be a mapping of sections, got list"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        validate({"train": {"steps": 0, "batch_size": "x"}, "model": {"heads": 4}})
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["model.heads", "train.steps", "train.batch_size"]


def test_overrides_win_and_are_yaml(tmp_path: Path) -> None:
    path = _write(tmp_path, "train: {steps: 5}\nstate:\n")
    overrides = ["train.steps=7", "train.mesh.model=2", "ray.num_workers=[1, 2]", "train.events=null", "state.storage=/tmp/a=b"]
    config = load(path, [*overrides, "ray.devices_per_worker=2", "train.learning_rate=1e-3", "train.prompt='class '"])
    assert (config.train.steps, config.train.mesh.model, config.train.learning_rate) == (7, 2, 1e-3)
    assert config.ray.num_workers == (1, 2)
    assert config.train.events is None
    assert config.train.prompt == "class "
    assert config.state == {"storage": "/tmp/a=b"}


@pytest.mark.parametrize("override", ["train.steps", "steps=5", "train..steps=5", "=5", "train.steps.more=5"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UsageError, match=r"--set .*(should be section.key=value|is not a section)"):
        load(_write(tmp_path, "train: {steps: 5}"), [override])


def test_plain_values_survive_the_way_to_the_workers() -> None:
    config = load(CONFIGS / "lm_cpu.yaml", ["ray.num_workers=[1, 2]"])
    assert validate(config.model_dump(mode="json")) == config
    assert validate({}) == Config()


def test_of_elastic_sizes_those_that_do_not_share_the_batch_are_left_out() -> None:
    sizes = "ray.num_workers=[1, 4]"
    assert load(CONFIGS / "lm_cpu.yaml", [sizes]).train.batch_size == 64, "3 workers are left out"
    with pytest.raises(UsageError, match=r"train.batch_size=6 should be a multiple of the mesh's data axis, 4"):
        load(CONFIGS / "lm_cpu.yaml", [sizes, "train.batch_size=6"])


def test_command_line_exits_2_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path, "train: {stesp: 5}")
    assert train_lm.main(["--config", str(path)]) == 2
    assert capsys.readouterr().err == f"train_lm: {path}: train.stesp: unknown key, got 5\n"
    assert train_lm.main(["--config", str(tmp_path / "absent.yaml")]) == 2
    with pytest.raises(SystemExit) as caught:
        train_lm.main(["--confg", str(path)])
    assert caught.value.code == 2


def test_the_state_section_is_checked_by_raystate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path, f"state: {{storage: {tmp_path}, run: lm, keep_lats: 3}}")
    assert train_lm.main(["--config", str(path), "--check"]) == 2
    error = capsys.readouterr().err
    assert "state.keep_lats" in error
    assert "keep_last" in error
    assert error.count("\n") == 1
    assert train_lm.main(["--config", str(CONFIGS / "lm_cpu.yaml"), "--check"]) == 0
