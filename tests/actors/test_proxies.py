"""A worker reaches the cluster's nodes past the proxies of a company's network, and everything else through them."""

from __future__ import annotations

import os
import urllib.request

import pytest
import ray
from requests.utils import should_bypass_proxies

from raystate.train.nodes import reach_directly

VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy", "no_proxy", "NO_PROXY", "no_grpc_proxy")


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    addresses = [("10.0.0.4", True), ("10.0.0.5", True), ("10.0.0.6", False)]
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": name, "Alive": lives} for name, lives in addresses])


def passes_by(host: str) -> bool:
    return bool(should_bypass_proxies(f"http://{host}:80/", no_proxy=None))


@pytest.mark.parametrize("given", ["", "no_proxy", "NO_PROXY"])
def test_nodes_are_reached_directly_and_storage_by_the_proxy(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    if given:
        monkeypatch.setenv(given, "corp.example,localhost")
    reach_directly()
    assert passes_by("10.0.0.4")
    assert passes_by("10.0.0.5")
    assert not passes_by("10.0.0.6")
    assert not passes_by("storage.googleapis.com")
    assert passes_by("git.corp.example") == bool(given)
    assert os.environ[VARIABLES[-1]] == os.environ["no_proxy"] == os.environ["NO_PROXY"]


def test_each_of_two_lists_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read one or the other."""
    for name, value in (("https_proxy", "http://proxy:3128"), ("no_proxy", "a.example"), ("NO_PROXY", "b.example")):
        monkeypatch.setenv(name, value)
    reach_directly()
    assert [os.environ[name] for name in ("no_proxy", "NO_PROXY")] == ["a.example,10.0.0.4,10.0.0.5", "b.example,10.0.0.4,10.0.0.5"]


def test_who_has_named_other_addresses_for_grpc_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_grpc_proxy", "model.example")
    monkeypatch.setenv("no_proxy", "*")  # a word that gRPC doesn't know
    reach_directly()
    assert os.environ[VARIABLES[-1]] == "model.example,10.0.0.4,10.0.0.5"
    assert passes_by("storage.googleapis.com")


def test_without_a_proxy_nothing_changes() -> None:
    before = dict(os.environ)
    reach_directly()
    assert dict(os.environ) == before
    assert not urllib.request.getproxies_environment()
