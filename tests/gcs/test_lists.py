"""Lists come in pages, in order, with what was asked for."""

from __future__ import annotations

from tests.gcs.raw import Raw


def test_pages(raw: Raw):
    names = [f"a/{index:02}" for index in range(7)]
    for name in [*names, "b"]:
        raw.media(name, b"data")
    pages: list[list[str]] = []
    token: dict[str, str] = {}
    while True:
        page = raw.list(prefix="a/", maxResults=3, **token).json
        pages.append([item["name"] for item in page["items"]])
        if "nextPageToken" not in page:
            break
        token = {"pageToken": page["nextPageToken"]}
        raw.delete(pages[-1][-1])  # the next page still begins behind it
    assert pages == [names[:3], names[3:6], names[6:]]
    assert raw.list(pageToken="?").status == 400
    assert raw.list(maxResults=-1).status == 400


def test_folders_are_results_too(raw: Raw):
    for name in ("a", "b/1", "b/2", "c", "d/1/2", "d/3", "e/"):
        raw.media(name, b"")
    whole = raw.list(delimiter="/").json
    assert ([item["name"] for item in whole["items"]], whole["prefixes"]) == (["a", "c"], ["b/", "d/", "e/"])
    seen: list[str] = []
    token: dict[str, str] = {}
    for _ in range(3):
        page = raw.list(delimiter="/", maxResults=2, **token).json
        seen += [item["name"] for item in page.get("items", [])] + page.get("prefixes", [])
        token = {"pageToken": page.get("nextPageToken", "")}
    assert (seen, token) == (["a", "b/", "c", "d/", "e/"], {"pageToken": ""})
    inner = raw.list(prefix="d/", delimiter="/").json
    assert ([item["name"] for item in inner["items"]], inner["prefixes"]) == (["d/3"], ["d/1/"])
    assert raw.names(delimiter="/", includeTrailingDelimiter="true") == ["a", "c", "e/"]
    assert raw.list(prefix="d", delimiter="/1/").json["prefixes"] == ["d/1/"]


def test_offsets(raw: Raw):
    for name in ("a", "b", "c/1", "c/2", "d"):
        raw.media(name, b"")
    assert raw.names(startOffset="b", endOffset="d") == ["b", "c/1", "c/2"]
    page = raw.list(startOffset="c/2", delimiter="/").json
    assert ([item["name"] for item in page["items"]], page["prefixes"]) == (["d"], ["c/"])


def test_fields(raw: Raw):
    for name in ("a", "b/1"):
        raw.media(name, b"data")
    page = raw.list(delimiter="/", fields="items(name,size),prefixes,nextPageToken").json
    assert page == {"items": [{"name": "a", "size": "4"}], "prefixes": ["b/"]}
    assert raw.list(fields="items/name").json == {"items": [{"name": "a"}, {"name": "b/1"}]}
    assert raw.get("a", fields="name").json == {"name": "a"}
    assert raw.media("a", b"more", fields="size").json == {"size": "4"}
    assert raw.get("a", fields="items(name").status == 400
    assert "acl" not in raw.get("a").json
    assert "acl" in raw.get("a", projection="full").json


def test_what_lists_do_not_have_is_an_error(raw: Raw):
    assert raw.list(matchGlob="**").status == 501
    assert raw.list(softDeleted="true").status == 501
