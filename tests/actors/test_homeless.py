"""A user without an entry among the system's users and without HOME, as containers have them."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.processes import REPO, run_python

# What it needs is loaded before: it may not be readable for that user.
PROGRAM = """
import os, pwd, sys
import numpy as np
import raystate, raystate.actors.local_ray as own_ray
from raystate.core.formats.errors import ConfigError
folder, home = sys.argv[1:]
os.chmod(folder, 0o777)
raystate.save(folder + "/warm", {"w": np.ones(3)})
raystate.load(folder + "/warm")
for name in ("HOME", "RAY_AUTH_MODE", "RAY_ADDRESS"):
    os.environ.pop(name, None)
if home:
    os.environ["HOME"] = home
os.setgid(54321)
os.setuid(54321)
try:
    pwd.getpwuid(os.getuid())
except KeyError:
    pass
else:
    sys.exit("the user is known")
print(own_ray.why_not_joined(ConnectionError("no port"), "Ray could not be started"))
raystate.save(folder + "/one", {"w": np.ones(3)})
print("sum", raystate.load(folder + "/one")["w"].sum())
if not home:
    try:
        raystate.load("~/one")
    except ConfigError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("has_home", [False, True], ids=["no home", "a home that can't be written to"])
def test_an_unknown_user_gets_the_real_reason(has_home: bool):
    """`Path.home()` raised in the place of what Ray had said."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o555)
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        done = run_python("-c", PROGRAM, folder, home if has_home else "", cwd=folder, env=environment)
        assert "Ray could not be started: no port. " in done.stdout and "sum 3.0" in done.stdout
        assert has_home or "no such home directory" in done.stdout
        assert os.listdir(home) == []
