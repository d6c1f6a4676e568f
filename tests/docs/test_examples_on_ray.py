"""The examples that need Ray, on one cluster for all; what they leave on disk is read by stock Orbax and compared."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import ray

from tests.docs.conftest import SETTINGS
from tests.docs.running import REPO, Interpreter, pages
from tests.docs.tutorial import run_tutorial

CHECKS: dict[str, tuple[str, str]] = {  # page -> (its name in the test's id, its check)
    "docs/migrate-from-orbax.md": ("row18-orbax", "from_orbax"),
    "docs/howto/flax-linen.md": ("row4-linen", "linen"),
    "docs/howto/flax-nnx.md": ("row5-nnx", "nnx_model"),
    "docs/howto/equinox.md": ("row1-equinox", "equinox"),
    "docs/howto/keras.md": ("row1-keras", "keras"),
    "docs/howto/restore.md": ("row10-restore", "sources"),
    "docs/howto/which-steps.md": ("row14-which-steps", "which_steps"),
    "docs/howto/several-items.md": ("row11-items", "several_items"),
    "docs/howto/roll-back.md": ("row13-roll-back", "roll_back"),
    "docs/howto/which-processes-save.md": ("row19-only-one", "only_one_process"),
    "docs/howto/launch.md": ("row24-launch", "launch"),
    "docs/howto/follow-a-run.md": ("row25-follow", "follow"),
    "docs/howto/ray-tune.md": ("row25-tune", "sweep"),
}
FOUND = pages(on_ray=True)
PAGES = [pytest.param(page, id=CHECKS.get(page, (page,))[0]) for page in FOUND]


def test_every_checked_page_is_there():
    assert set(CHECKS) <= set(FOUND)


@pytest.mark.parametrize(("page", "script"), [("docs/tutorial.md", None), ("README.md", "jobs/quickstart/train.py")])
def test_the_script_of_a_page_and_its_commands_run(page: str, script: str | None, python_on_ray: Interpreter, tmp_path: Path):
    del python_on_ray  # its Ray is that of `ray start --head`
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, **SETTINGS, "PATH": commands, "PYTHONPATH": str(REPO), "RAY_ADDRESS": address}
    run_tutorial(REPO / page, tmp_path, environment, script=REPO / script if script else None)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page: str, python_on_ray: Interpreter, tmp_path: Path):
    python_on_ray.run(page, tmp_path, CHECKS[page][1] if page in CHECKS else None)
