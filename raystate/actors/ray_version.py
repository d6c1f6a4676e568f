"""Which Ray this raystate was tested with. It uses internals of Ray and of Ray Train, and any release of Ray may change them.

An upper bound in the package's metadata would keep users from a Ray that may well work. So another version gets one warning, and a
Ray that lacks what we import an error that says so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from raystate.core.formats.errors import RaystateError

TESTED = ("2.60",)  # release series; tests/cluster/test_train_internals.py holds what we rely on against the installed one

logger = logging.getLogger("raystate")

_warned: set[str] = set()


def is_tested() -> bool:
    """Whether the installed Ray is of a series that raystate was tested with."""
    return _series(_installed()) in TESTED


def warn_if_untested() -> None:
    """Log one warning in this process if the installed Ray is not of a tested series."""
    version = _installed()
    if _series(version) not in TESTED and version not in _warned:
        _warned.add(version)
        logger.warning(
            "Ray %s is installed; raystate was tested with %s and uses internals of Ray, so restarts may not work as they should. "
            "If they don't: pip install 'ray[default,train]==%s.*'",
            version, _tested(), TESTED[-1],
        )  # fmt: skip


@contextlib.contextmanager
def ray_internals() -> Iterator[None]:
    """Around imports of Ray's internals.

    Raises:
        RaystateError: the installed Ray lacks one of them; names the version, what is missing, and the versions that have it.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        version = _installed()
        raise RaystateError(
            f"Ray {version} lacks internals that raystate uses ({error}). raystate was tested with Ray {_tested()}: "
            f"pip install 'ray[default,train]=={TESTED[-1]}.*', or install a raystate that was made for Ray {_series(version)}",
            got=version, expected=TESTED,
        ) from error  # fmt: skip


def _tested() -> str:
    return " and ".join(f"{series}.x" for series in TESTED)


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _installed() -> str:
    import ray

    return ray.__version__
