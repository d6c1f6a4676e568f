"""The one way to put something of ours where Ray, JAX or Orbax looks for its own.

Each may fail at one of their releases, so `make house` counts them.
Beside each call a comment names the test that notices when what it replaces changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any


def patch(owner: Any, name: str, ours: Any) -> Any:
    """Replace an attribute of a class or module of another package.

    Returns:
        What was there: for ours to call, or to put back.

    Raises:
        AttributeError: there is nothing of this name: this version of the package has changed it.
    """
    theirs = getattr(owner, name)
    setattr(owner, name, ours)
    return theirs


@contextlib.contextmanager
def patched(owner: Any, name: str, ours: Any) -> Generator[None]:
    """Meanwhile only."""
    theirs = patch(owner, name, ours)
    try:
        yield
    finally:
        setattr(owner, name, theirs)
