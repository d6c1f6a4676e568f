from __future__ import annotations

import os
import pathlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystate.core.formats.errors import ConfigError
from raystate.storage import canonical_url, open_storage, run_hash


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("gs://bucket/lm", "gs://bucket/lm"),
        ("gs://bucket/lm///", "gs://bucket/lm"),
        ("GS://bucket/Case/Stays", "gs://bucket/Case/Stays"),
        ("gs://bucket", "gs://bucket"),
        ("memory://x/y/", "memory://x/y"),
        ("/no/such/../place/", "file:///no/place"),
        ("file:///no/such/place/", "file:///no/such/place"),
        ("file://localhost/no/such", "file:///no/such"),
        ("FILE:///no/a%20b", "file:///no/a%20b"),
        ("//no//such", "file:///no/such"),
    ],
)
def test_canonical(url: str, canonical: str):
    assert canonical_url(url) == canonical
    assert canonical_url(canonical) == canonical


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(real))
    url = f"file://{os.path.realpath(real)}"
    for spelling in (
        real,
        str(real),
        "real",
        "./real/",
        "link",
        tmp_path / "link",
        "~",
        f"file://{tmp_path}/link",
        "real/../link/.",
    ):
        assert canonical_url(spelling) == url
    assert canonical_url("~/sub") == f"{url}/sub"
    assert canonical_url("link/not/yet") == f"{url}/not/yet"
    assert canonical_url(pathlib.PurePosixPath("real")) == url


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("", "empty"), ("  ", "empty"), (" /data", "spaces"), ("/data\n", "spaces"), ("/da\0ta", "control"),
        (b"/data", "not bytes"), (None, "PathLike"), (3, "PathLike"),
        ("ftp://host/x", "ftp://"), ("http://host/x", "http://"), ("hdfs://x", "hdfs://"),
        (Path("gs://bucket/x"), "did you mean gs://bucket/x"), ("file:/data", "did you mean file:///data"),
        ("file://data/x", "absolute"), ("file://", "absolute"), ("gs://", "bucket"), ("gs:///x", "bucket"), ("gs://B_x/x", "bucket"),
        ("gs://bucket/a//b", "component"), ("gs://bucket/../b", "component"), ("memory://", "component"),
        ("~no-such-user-here/x", "home"), ("/", "root"), ("file:///", "root"),
        ("bs\\run", "backslash"), ("/data/a\\b/run", "backslash"), ("file:///data/bs\\run", "backslash"),
    ],
)  # fmt: skip
def test_unusable(url: object, part: str):
    for call in (canonical_url, open_storage):
        with pytest.raises(ConfigError, match="storage") as caught:
            call(url)  # type: ignore[arg-type]
        assert part in caught.value.message
        assert caught.value.field == "storage"


def test_a_tree_in_the_place_of_the_path_is_not_printed():
    tree = {f"layer{number}": np.ones((100, 100)) for number in range(200)}
    with pytest.raises(ConfigError, match="the path comes before the tree") as caught:
        canonical_url(tree)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 400


@given(st.text(max_size=30))
def test_canonical_or_a_config_error(text: str):
    try:
        url = canonical_url(text)
    except ConfigError:
        return
    assert canonical_url(url) == url
    assert not url.endswith("/")


def test_run_hash(tmp_path: Path):
    names = {run_hash(tmp_path, "lm"), run_hash(str(tmp_path), "lm"), run_hash(f"file://{os.path.realpath(tmp_path)}/", "lm")}
    assert len(names) == 1
    assert len(names.pop()) == 16
    assert run_hash(tmp_path, "lm") != run_hash(tmp_path, "lm2") != run_hash(tmp_path / "lm2", "")
    assert run_hash(tmp_path / "one", "lm") != run_hash(tmp_path / "other", "lm"), "runs of one name in two places"
    assert run_hash("gs://bucket/lm", "lm") == run_hash("gs://bucket/lm/", "lm")


def test_opening_touches_nothing(tmp_path: Path):
    storage = open_storage(tmp_path / "a" / "b")
    assert storage.is_directory
    assert list(tmp_path.iterdir()) == []
    assert not open_storage("gs://no-such-bucket-here/x").is_directory


def test_tensorstore_specs(tmp_path: Path):
    root = os.path.realpath(tmp_path)
    assert open_storage(tmp_path).kvstore("12/state") == {"driver": "file", "path": f"{root}/12/state/"}
    assert open_storage(tmp_path).kvstore("") == {"driver": "file", "path": f"{root}/"}
    assert open_storage("gs://bucket/lm").kvstore("12") == {"driver": "gcs", "bucket": "bucket", "path": "lm/12/"}
    assert open_storage("gs://bucket").kvstore("") == {"driver": "gcs", "bucket": "bucket", "path": ""}
