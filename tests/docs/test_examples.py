"""The examples of the documents run as they stand, those that need no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.running import Interpreter, pages, program_of


@pytest.mark.parametrize("page", pages(on_ray=False))
def test_the_examples_of_a_page_run(page: str, python: Interpreter, tmp_path: Path):
    python.run(page, tmp_path)


def test_an_example_that_is_wrong_is_told_by_its_line(python: Interpreter, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nstep = 1\n```\n\nText.\n\n- ```python\n  assert step == 2\n  ```\n\n```console\n$ raystate\n```\n"
    )
    assert program_of(page).splitlines()[9:] == ["assert step == 2"]
    with pytest.raises(AssertionError) as told:
        python.run(str(page), tmp_path)
    assert 'page.md", line 10' in str(told.value.__cause__)
