"""The server as a process: it starts clearly, serves alone, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from raystate.core.formats.errors import ConfigError, StorageError
from raystate.testing.gcs import GcsControl, GcsServer
from tests.gcs.raw import Raw
from tests.patience import PATIENCE_S
from tests.processes import run_python

COMMAND = [sys.executable, "-m", "raystate.testing.gcs"]


def ended(handle: int) -> bool:
    """Wait for a process's end, whether or not somebody has noticed it."""
    found, _, _ = select.select([handle], [], [], PATIENCE_S)
    os.close(handle)
    return bool(found)


def opened(pid: int | None) -> int:
    assert pid is not None
    return os.pidfd_open(pid)


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter that first runs `before`."""
    program = f"{before}\nimport sys\nfrom raystate.testing.gcs.__main__ import main\nsys.exit(main({list(arguments)!r}))"
    return run_python("-c", program, code=None)


def test_servers_are_apart():
    with GcsServer(buckets=["same-name"]) as one, GcsServer(buckets=["same-name"]) as other:
        assert one.url != other.url
        Raw(one, "same-name").media("name", b"data")
        assert Raw(other, "same-name").names() == []
        other.faults([{"mode": "outage"}])
        assert Raw(one, "same-name").names() == ["name"]


def test_a_closed_server_is_gone():
    server = GcsServer(buckets=["some-bucket"])
    server.start()
    process = opened(server.pid)
    Raw(server, "some-bucket").media("name", b"data")
    server.close()
    server.close()
    assert ended(process)
    assert server.pid is None
    with pytest.raises(StorageError, match="counts"):
        server.counts()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it(how: signal.Signals):
    program = (
        "import sys\nfrom raystate.testing.gcs import GcsServer\nserver = GcsServer()\nserver.start()\n"
        "print(server.pid, flush=True)\nsys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = opened(int(parent.stdout.readline()))
    parent.send_signal(how)
    parent.communicate(timeout=PATIENCE_S)
    assert ended(server)


def test_the_command_says_what_to_do_and_ends_calmly(tmp_path: Path):
    rules = tmp_path / "faults.json"
    rules.write_text(json.dumps([{"status": 502, "kinds": ["list"]}]))
    command = [*COMMAND, "--port", "0", "--bucket", "first-one", "--bucket", "second-one", "--faults", str(rules)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stderr is not None
    lines: list[str] = []
    while "Ctrl-C" not in (line := process.stdout.readline()):
        assert line
        lines.append(line.strip())
    url = lines[0].split()[-1]
    exports = dict(line.split("#")[0].removeprefix("export ").strip().split("=", 1) for line in lines if line.startswith("export"))
    assert exports == GcsControl(url).environment()
    assert "Buckets: first-one, second-one" in lines
    raw = Raw(GcsControl(url), "first-one")
    assert (raw.media("name", b"data").status, raw.list().status) == (200, 502)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (0, "")
    assert list(tmp_path.iterdir()) == [rules]


def test_a_missing_package_is_a_sentence():
    done = run("--port", "0", before="import sys\nsys.modules['aiohttp'] = None")
    assert done.returncode == 1
    assert "pip install 'raystate[gcs-server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_a_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--port", str(port))
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)
        assert str(port) in done.stderr
        with pytest.raises(StorageError, match=str(port)):
            GcsServer(port=port).start()


def test_bad_arguments_are_named():
    done = run("--port", "0", "--faults", '[{"mode": "explode"}]')
    assert done.returncode == 2
    assert done.stderr.startswith("faults[0].mode = 'explode': must be ")
    assert run("--port", "0", "--writes-per-object-s", "0").returncode == 2
    assert "--port" in run().stderr
    with pytest.raises(ConfigError, match=r"faults\[0\].mode"):
        GcsServer(faults=[{"mode": "explode"}])
    with pytest.raises(StorageError, match="'x'"):
        GcsServer(buckets=["x"]).start()


def test_settings_from_the_start():
    with GcsServer(buckets=["some-bucket"], strict=False, writes_per_object_s=0.001) as server:
        raw = Raw(server, "some-bucket")
        assert raw.media("name", b"data", ifGenerationMatch=7).status == 200
        assert raw.media("name", b"data").status == 429


def test_nothing_is_left_in_the_temporary_folder():
    before = set(Path(tempfile.gettempdir()).glob("*gcs*"))
    with GcsServer(buckets=["some-bucket"]) as server:
        Raw(server, "some-bucket").media("name", b"x" * 5_000_000)
    assert set(Path(tempfile.gettempdir()).glob("*gcs*")) == before
