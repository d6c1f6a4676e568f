"""Faults act on the requests that they are meant for, and each does exactly what it says."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import pytest

from raystate.core.formats.errors import ConfigError
from raystate.testing.gcs import FaultRule, GcsServer
from raystate.testing.gcs.faults import Faults, parse_rules
from tests.gcs.raw import Raw
from tests.patience import PATIENCE_S

CUT = (ConnectionResetError, BrokenPipeError)


# ------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("rule", "field", "says"),
    [
        ({"mode": "explode"}, "mode", "'explode'"),
        ({"kinds": ["upload", "read"]}, "kinds", "get_media"),
        ({"match": "("}, "match", "regular expression"),
        ({"skip": -1}, "skip", "-1"),
        ({"times": 0}, "times", "0"),
        ({"probability": 1.5}, "probability", "1.5"),
        ({"status": 200}, "status", "200"),
        ({"stall_s": "long"}, "stall_s", "'long'"),
        ({"mode": "delay"}, "delay_s", "must be given"),
        ({"mode": "outage", "times": 3}, "times", "outage"),
        ({"kind": "upload"}, "kind", "kinds"),
        ("upload", "", "must be a rule"),
    ],
)
def test_a_bad_rule_is_named(rule: Any, field: str, says: str):
    with pytest.raises(ConfigError) as caught:
        parse_rules([{"mode": "reset"}, rule])
    assert caught.value.field == f"faults[1].{field}".rstrip(".")
    assert caught.value.message.startswith(caught.value.field)
    assert says in caught.value.message


def test_rules_come_as_values_mappings_or_json():
    rule = FaultRule(mode="reset", kinds=("list",))
    assert parse_rules([rule, {"mode": "reset", "kinds": ["list"]}]) == (rule, rule)
    assert parse_rules('{"mode": "reset", "kinds": ["list"]}') == (rule,)
    for text in ("[", '"reset"', "3"):
        with pytest.raises(ConfigError, match=r"^faults: "):
            parse_rules(text)


def chosen(faults: Faults, count: int, line: str = "GET /x") -> str:
    """Which of `count` requests are acted on."""
    return "".join("x" if faults.choose("get_meta", line).rule else "." for _ in range(count))


def test_skip_and_times():
    faults = Faults([FaultRule(skip=2, times=3)])
    assert chosen(faults, 8) == "..xxx..."
    assert faults.hits() == [3]


def test_probability_is_repeatable():
    rule = FaultRule(probability=0.3, seed=7)
    first = chosen(Faults([rule]), 100)
    assert first == chosen(Faults([rule]), 100) != chosen(Faults([FaultRule(probability=0.3, seed=8)]), 100)
    assert 15 < first.count("x") < 45


def test_the_first_that_matches_acts_and_delays_add_up():
    rules = [
        FaultRule(mode="delay", delay_s=1),
        FaultRule(match="other"),
        FaultRule(mode="delay", delay_s=2, kinds=("get_meta",)),
        FaultRule(mode="reset", delay_s=4),
        FaultRule(mode="stall"),
    ]
    faults = Faults(rules)
    chosen_one = faults.choose("get_meta", "GET /x")
    assert (chosen_one.delay_s, chosen_one.rule) == (7, rules[3])
    assert faults.hits() == [1, 0, 1, 1, 0]
    assert Faults([*rules, outage := FaultRule(mode="outage")]).choose("list", "GET /x").rule == outage


def test_the_object_can_be_matched_even_if_only_the_body_names_it(raw: Raw, server: GcsServer):
    server.faults([{"mode": "status", "match": f"gs://{raw.bucket}/a/marker$"}])
    assert raw.multipart("a/marker", b"data").status == 503
    assert raw.multipart("a/marker.json", b"data").status == 200
    started = raw.start("a/other")
    server.faults([{"mode": "status", "match": "gs://.*/a/other", "kinds": ["upload"]}])
    assert raw.chunk(started, b"", "bytes */*").status == 308  # a chunk that finishes nothing is no upload yet
    assert raw.chunk(started, b"data", "bytes 0-3/4").status == 503


def test_rules_at_the_server_are_checked_too(server: GcsServer):
    raw = Raw(server, "none")
    reply = raw.send("PUT", "/_raystate/faults", [{"mode": "explode"}])
    assert (reply.status, reply.json["field"]) == (400, "faults[0].mode")
    with pytest.raises(ConfigError, match=r"faults\[0\].mode"):
        server.faults([{"mode": "explode"}])


# ------------------------------------------------------------ modes


def test_status(raw: Raw, server: GcsServer):
    server.faults(
        [{"status": 429, "retry_after_s": 3, "times": 1}, {"status": 503, "reason": "backendError", "body": "gone", "times": 1}]
    )
    first, second = raw.media("name", b"data"), raw.media("name", b"data")
    assert (first.status, first.reason, first.headers["Retry-After"]) == (429, "rateLimitExceeded", "3")
    assert (second.status, second.body) == (503, b"gone")
    assert raw.get("name").status == 404  # neither happened
    assert server.hits() == [1, 1]


def test_delay(raw: Raw, server: GcsServer):
    server.faults([{"mode": "delay", "delay_s": 0.1, "kinds": ["upload"]}])
    start_s = time.monotonic()
    assert raw.media("name", b"data").status == 200
    assert time.monotonic() - start_s >= 0.1


def test_reset(raw: Raw, server: GcsServer):
    server.faults([{"mode": "reset", "kinds": ["upload", "delete"], "times": 1}])
    with pytest.raises(CUT) as caught:
        raw.media("name", b"data")
    assert not isinstance(caught.value, http.client.RemoteDisconnected)  # which would be an end in good order
    assert raw.get("name").status == 404
    assert raw.media("name", b"data").status == 200


@pytest.mark.parametrize("how", ["media", "multipart", "resumable"])
def test_reset_after_commit_is_a_lost_acknowledgement(raw: Raw, server: GcsServer, how: str):
    server.faults([{"mode": "reset_after_commit", "kinds": ["upload"], "times": 1}])
    with pytest.raises(CUT):
        getattr(raw, how)("name", b"mine", ifGenerationMatch=0)
    assert raw.read("name").body == b"mine"
    assert getattr(raw, how)("name", b"mine", ifGenerationMatch=0).status == 412  # what makes a retry look lost
    server.faults([{"mode": "reset_after_commit", "kinds": ["delete"]}])
    with pytest.raises(CUT):
        raw.delete("name")
    assert raw.get("name").status == 404


@pytest.mark.parametrize("size", [1000, 3 << 20])
def test_a_truncated_download_is_short(raw: Raw, server: GcsServer, size: int):
    raw.media("name", b"x" * size)
    server.faults([{"mode": "truncate", "kinds": ["get_media"], "times": 1}])
    with pytest.raises(http.client.IncompleteRead) as caught:
        raw.read("name")
    assert (len(caught.value.partial), caught.value.expected) == (size // 2, size - size // 2)
    assert len(raw.read("name").body) == size


@pytest.mark.parametrize("size", [1, 3_000_000])
def test_a_corrupt_download_has_the_checksums_of_the_object(raw: Raw, server: GcsServer, size: int):
    raw.media("name", b"x" * size)
    server.faults([{"mode": "corrupt", "times": 1}])
    assert raw.get("name").status == 200, "only downloads are chosen"
    other, whole = raw.read("name"), raw.read("name")
    assert (other.body, whole.body) == (b"y" + b"x" * (size - 1), b"x" * size)
    assert other.headers["x-goog-hash"] == whole.headers["x-goog-hash"]


def test_a_truncated_upload_makes_nothing(raw: Raw, server: GcsServer):
    server.faults([{"mode": "truncate", "kinds": ["upload"]}])
    for how in ("media", "multipart", "resumable"):
        with pytest.raises(CUT):
            getattr(raw, how)("name", b"data" * 100_000)
    server.clear()
    assert raw.names() == []


def test_a_truncated_list_is_no_json(raw: Raw, server: GcsServer):
    server.faults([{"mode": "truncate", "kinds": ["list"]}])
    with pytest.raises(http.client.IncompleteRead):
        raw.list()


def test_stall_until_the_rules_are_replaced(raw: Raw, server: GcsServer):
    server.faults([{"mode": "stall", "kinds": ["upload"]}])
    ended: list[BaseException] = []

    def upload() -> None:
        try:
            raw.media("name", b"data")
        except BaseException as error:
            ended.append(error)

    stalled = threading.Thread(target=upload)
    stalled.start()
    while server.hits() != [1]:  # until the request is there
        assert stalled.is_alive()
    assert raw.get("name").status == 404
    server.clear()
    stalled.join(timeout=PATIENCE_S)
    assert isinstance(ended[0], CUT)
    assert raw.get("name").status == 404


def test_a_client_gives_up_on_a_stalled_request(raw: Raw, server: GcsServer):
    server.faults([{"mode": "stall", "times": 1}])
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=0.05)
    connection.request("DELETE", raw.path("name"))
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    assert raw.get("name").status == 404
    while len(server.log()) < 2:  # the server notices
        pass
    assert {(entry.kind, entry.status, entry.fault) for entry in server.log(2)} == {("delete", 0, "stall"), ("get_meta", 404, "")}


def test_stall_for_a_time(raw: Raw, server: GcsServer):
    server.faults([{"mode": "stall", "stall_s": 0.05}])
    with pytest.raises(CUT):
        raw.get("name")


def test_outage(raw: Raw, server: GcsServer):
    raw.media("name", b"data")
    with server.outage(status=500):
        statuses = {raw.media("name", b"other").status, raw.list().status, raw.delete("name").status, raw.read("name").status}
        assert statuses == {500}
    assert raw.read("name").body == b"data"


def test_a_part_of_a_batch_fails(raw: Raw, server: GcsServer):
    for name in ("a", "b"):
        raw.media(name, b"data")
    server.faults([{"status": 503, "kinds": ["delete"], "match": "/a$"}])
    requests = [f"DELETE {raw.path(name)}" for name in ("a", "b")]
    assert raw.batch(*requests) == [503, 204]
    server.faults([{"mode": "reset_after_commit", "kinds": ["delete"]}])
    with pytest.raises(CUT):
        raw.batch(requests[0])
    assert [(entry.kind, entry.status) for entry in server.log(2)] == [("delete", 0), ("batch", 0)]
    server.faults([{"status": 503, "kinds": ["batch"]}])
    with pytest.raises(AssertionError):
        raw.batch(requests[0])
    assert raw.names() == []


def test_an_upload_in_progress_ends_with_its_client_or_is_whole(raw: Raw, server: GcsServer):
    """A client that dies in the middle of its body makes nothing."""
    address = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    connection.putrequest("POST", f"{raw.uploads}?uploadType=media&name=name")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b"x" * 500)
    connection.close()
    assert raw.get("name").status == 404
    assert raw.names() == []


def test_faults_from_the_start():
    rules = [FaultRule(mode="status", status=502, kinds=("get_bucket",))]
    with GcsServer(buckets=["some-bucket"], faults=json.dumps([rule.model_dump() for rule in rules])) as server:
        assert Raw(server, "some-bucket").send("GET", "/storage/v1/b/some-bucket").status == 502
