"""A script joins its own user's Ray; another user's only if it is named."""

from __future__ import annotations

import os
import pwd
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.actors import ray_discovery as whose_ray
from raystate.cli.status import join_ray
from raystate.core.formats.errors import ConfigError
from tests.processes import free_port, run_python

ANOTHER = os.getuid() + 1


@pytest.fixture
def rays_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="r-") as short:  # the names of Ray's sockets may have 107 characters
        monkeypatch.setenv("RAY_TMPDIR", short)
        folder = whose_ray.ray_folder()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


@pytest.fixture
def rays_port(rays_folder: Path) -> Iterator[int]:
    """At which this user's Ray seems to listen, as `ray start` has written down."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (rays_folder / "ray_current_cluster").write_text(f"127.0.0.1:{port}\n")
        yield port


def test_whose_it_is_is_told_by_the_process_that_listens(rays_folder: Path, rays_port: int, monkeypatch: pytest.MonkeyPatch):
    assert whose_ray.strangers_ray() is None, "it is ours"
    here = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: ANOTHER)
    assert whose_ray.strangers_ray() == whose_ray.StrangersRay(f"127.0.0.1:{rays_port}", here)
    (rays_folder / "ray_current_cluster").unlink()
    assert whose_ray.strangers_ray() is None, "there is none"


def test_of_one_that_runs_elsewhere_the_file_tells(rays_folder: Path, monkeypatch: pytest.MonkeyPatch):
    (rays_folder / "ray_current_cluster").write_text(f"10.255.255.1:{free_port()}")
    assert whose_ray.strangers_ray() is None, "this user has started a node of it"
    monkeypatch.setattr(os, "getuid", lambda: ANOTHER)
    assert whose_ray.strangers_ray() is not None


@pytest.mark.parametrize("listens", ["127.0.0.2", "0.0.0.0", "::"])
def test_what_listens_at_its_port_but_not_at_its_address_is_another_program(listens: str):
    with socket.socket(socket.AF_INET6 if ":" in listens else socket.AF_INET) as other:
        other.bind((listens, 0))
        other.listen()
        port = other.getsockname()[1]
        assert whose_ray._listener(f"10.255.255.1:{port}") is None, "the head is another machine"
        assert whose_ray._listener(f"127.0.0.1:{port}") == (None if listens == "127.0.0.2" else os.getuid())


def test_commands_ask_whose_it_is_too(rays_port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: ANOTHER)
    with pytest.raises(ConfigError, match=f"Set RAY_ADDRESS=127.0.0.1:{rays_port}"):
        join_ray()


def test_a_script_beside_another_users_ray_starts_its_own_and_says_so(rays_port: int):
    script = f"""if True:
        import os
        os.getuid = lambda: {ANOTHER}
        from raystate.actors.local_ray import start_ray
        import ray
        start_ray()
        print(ray.get_runtime_context().gcs_address)
        ray.shutdown()"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = run_python("-c", script, env=environment)
    assert not ran.stdout.strip().endswith(f":{rays_port}")
    assert f"the Ray at 127.0.0.1:{rays_port} is of user" in ran.stderr
    assert f"RAY_ADDRESS=127.0.0.1:{rays_port}" in ran.stderr
    assert "this Ray was started by this process" in ran.stderr
