"""`python -m raystate.testing.gcs --port N`: a strict local Cloud Storage server, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from raystate.core.formats.errors import ConfigError
from raystate.testing.gcs.answers import GcsError
from raystate.testing.gcs.control import GcsControl

_NOTES = {
    "STORAGE_EMULATOR_HOST": "google-cloud-storage, gcsfs",
    "TENSORSTORE_GCS_HTTP_URL": "tensorstore",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "before gcsfs is imported; it hangs otherwise",
}


def _arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m raystate.testing.gcs",
        description="A strict local Google Cloud Storage server (JSON API) for tests, in memory, with faults on request.",
    )
    parser.add_argument("--port", type=int, required=True, help="port to listen on; 0: a free port, which it prints")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--bucket", action="append", default=[], metavar="NAME", help="a bucket to create; may be given again")
    parser.add_argument(
        "--faults", default="[]", metavar="FILE_OR_JSON", help="fault rules: a JSON file, or JSON (see raystate.testing.gcs)"
    )
    parser.add_argument(
        "--writes-per-object-s", type=_positive, metavar="N", help="changes per second and object, else 429; GCS: 1"
    )
    parser.add_argument("--lax", action="store_true", help="ignore preconditions, to show that a test can see it")
    parser.add_argument("--lifeline", action="store_true", help=argparse.SUPPRESS)  # for GcsServer: JSON on stdout, ends with stdin
    return parser.parse_args(given)


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def main(given: list[str]) -> int:
    """Serve; returns the exit status: 0 ended as wanted, 1 failed, 2 bad usage."""
    arguments = _arguments(given)
    try:
        from raystate.testing.gcs.faults import parse_rules
        from raystate.testing.gcs.serving import serve

        text = arguments.faults
        rules = parse_rules(text if text.lstrip()[:1] in ("[", "{") else Path(text).read_text())
        serving = serve(
            host=arguments.host,
            port=arguments.port,
            buckets=arguments.bucket,
            rules=rules,
            strict=not arguments.lax,
            writes_per_object_s=arguments.writes_per_object_s,
            lifeline=arguments.lifeline,
            ready=lambda url: _say(json.dumps({"url": url}) if arguments.lifeline else _instructions(url, arguments.bucket)),
        )
        asyncio.run(serving)
    except (ConfigError, GcsError, OSError, ModuleNotFoundError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        text = f"the local Cloud Storage server needs {error.name}: pip install 'raystate[gcs-server]'" if missing else str(error)
        if arguments.lifeline:
            _say(json.dumps({"error": text}))
        else:
            sys.stderr.write(f"{text}\n")
        return 2 if isinstance(error, ConfigError | GcsError) else 1
    return 0


def _instructions(url: str, buckets: list[str]) -> str:
    exports = GcsControl(url).environment().items()
    width = max(len(f"{name}={value}") for name, value in exports)
    lines = [f"    export {f'{name}={value}':{width}}  # {_NOTES[name]}" for name, value in exports]
    return "\n".join(
        [
            f"A strict Cloud Storage server for tests, in memory, at {url}",
            "",
            *lines,
            "",
            f"Buckets: {', '.join(buckets) or 'none yet (--bucket NAME, or create one with a client)'}",
            "Ctrl-C ends it, and what it holds is gone.",
        ]
    )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
