"""Listings: ListObjects, ListObjectsV2, ListObjectVersions."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.requests import OWNER
from tests.support.s3_calls import fresh_bucket, refused
from tests.support.servers import Stack

TREE = sorted([f"d{i}/f{j}" for i in range(7) for j in range(3)] + ["a", "z", "d3", "d3/\u00e9"], key=str.encode)


@pytest.fixture(scope="module")
def trees() -> dict[str, str]:
    return {}


@pytest.fixture
def tree(servers: Stack, trees: dict[str, str]) -> str:
    """A bucket with the keys of TREE, made once for each of the servers."""
    if servers.url not in trees:
        bucket = trees[servers.url] = fresh_bucket(servers)
        for key in TREE:
            servers.s3().put_object(Bucket=bucket, Key=key, Body=b"x")
    return trees[servers.url]


def collect(servers: Stack, operation: str, bucket: str, size: int, **options: Any) -> tuple[list[str], list[str]]:
    keys, groups = [], []
    pages = (
        servers.s3().get_paginator(operation).paginate(Bucket=bucket, PaginationConfig={"PageSize": size}, **options)
    )
    for page in pages:
        entries = page.get("Contents", []) + page.get("Versions", [])
        keys += [entry["Key"] for entry in entries]
        groups += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        assert len(entries) + len(page.get("CommonPrefixes", [])) <= size
    return keys, groups


@pytest.mark.parametrize("operation", ["list_objects", "list_objects_v2", "list_object_versions"])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_pages_of_any_size_give_every_key_once(servers: Stack, tree: str, operation: str, size: int) -> None:
    assert collect(servers, operation, tree, size) == (TREE, [])
    groups = [f"d{i}/" for i in range(7)]
    assert collect(servers, operation, tree, size, Delimiter="/") == (["a", "d3", "z"], groups)
    inside = ["d3/f0", "d3/f1", "d3/f2", "d3/\u00e9"]
    assert collect(servers, operation, tree, size, Prefix="d3/") == (inside, [])
    assert collect(servers, operation, tree, size, Prefix="d3", Delimiter="/") == (["d3"], ["d3/"])
    assert collect(servers, operation, tree, size, Prefix="d", Delimiter="f") == (
        ["d3", "d3/\u00e9"],
        [f"d{i}/f" for i in range(7)],
    )
    assert collect(servers, operation, tree, size, Prefix="nothing") == ([], [])


def test_listings_start_where_they_are_told(servers: Stack, tree: str) -> None:
    s3 = servers.s3()
    after = [key for key in TREE if key > "d5/f1"]
    assert [e["Key"] for e in s3.list_objects_v2(Bucket=tree, StartAfter="d5/f1")["Contents"]] == after
    assert [e["Key"] for e in s3.list_objects(Bucket=tree, Marker="d5/f1")["Contents"]] == after
    assert [e["Key"] for e in s3.list_object_versions(Bucket=tree, KeyMarker="d5/f1")["Versions"]] == after
    skipped = s3.list_objects(Bucket=tree, Marker="d5/", Delimiter="/")
    assert [e["Prefix"] for e in skipped["CommonPrefixes"]] == ["d6/"]
    assert s3.list_objects_v2(Bucket=tree, StartAfter="zz")["KeyCount"] == 0
    every = s3.list_objects_v2(Bucket=tree, ContinuationToken="")
    assert (every["KeyCount"], every["ContinuationToken"]) == (len(TREE), "")


def test_a_page_says_what_was_asked(servers: Stack, tree: str) -> None:
    s3 = servers.s3()
    first = s3.list_objects(Bucket=tree, MaxKeys=2, Delimiter="/", Prefix="d", Marker="d0")
    assert (first["Name"], first["Prefix"], first["Marker"], first["Delimiter"]) == (tree, "d", "d0", "/")
    assert (first["MaxKeys"], first["IsTruncated"], first["NextMarker"]) == (2, True, "d1/")
    assert "NextMarker" not in s3.list_objects(Bucket=tree, MaxKeys=2)
    second = s3.list_objects_v2(Bucket=tree, MaxKeys=2, StartAfter="a")
    assert (second["StartAfter"], second["KeyCount"], second["IsTruncated"]) == ("a", 2, True)
    entry = second["Contents"][0]
    assert (entry["Size"], entry["ETag"], entry["StorageClass"]) == (
        1,
        '"9dd4e461268c8034f5c8564e155c67a6"',
        "STANDARD",
    )
    assert (entry["ChecksumAlgorithm"], entry["ChecksumType"]) == (["CRC32"], "FULL_OBJECT")
    assert "Owner" not in entry
    fetched = s3.list_objects_v2(Bucket=tree, MaxKeys=1, FetchOwner=True)["Contents"][0]
    assert fetched["Owner"]["ID"] == s3.list_objects(Bucket=tree, MaxKeys=1)["Contents"][0]["Owner"]["ID"] == OWNER[0]
    assert "Delimiter" not in s3.list_objects(Bucket=tree, Delimiter="")


def test_versions_are_all_null_and_latest(servers: Stack, tree: str) -> None:
    s3 = servers.s3()
    page = s3.list_object_versions(Bucket=tree, MaxKeys=2)
    assert [(v["VersionId"], v["IsLatest"]) for v in page["Versions"]] == [("null", True)] * 2
    assert (page["NextKeyMarker"], page["NextVersionIdMarker"]) == (TREE[1], "null")
    next_page = s3.list_object_versions(Bucket=tree, KeyMarker=TREE[1], VersionIdMarker="null", MaxKeys=1)
    assert next_page["Versions"][0]["Key"] == TREE[2]
    assert servers.request("GET", f"/{tree}?versions&version-id-marker=null").code == "InvalidArgument"


def test_what_clean_up_tools_do_empties_a_bucket(servers: Stack) -> None:
    s3, bucket = servers.s3(), fresh_bucket(servers)
    for index in range(25):
        s3.put_object(Bucket=bucket, Key=f"k/{index}", Body=b"x")
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=bucket, PaginationConfig={"PageSize": 10}):
        names = [{"Key": v["Key"], "VersionId": v["VersionId"]} for v in page["Versions"]]
        s3.delete_objects(Bucket=bucket, Delete={"Objects": names, "Quiet": True}, BypassGovernanceRetention=True)
    s3.delete_bucket(Bucket=bucket)
    assert bucket not in [entry["Name"] for entry in s3.list_buckets()["Buckets"]]


def test_no_keys_are_given_when_none_are_asked_for(servers: Stack, tree: str) -> None:
    for call in (servers.s3().list_objects, servers.s3().list_objects_v2, servers.s3().list_object_versions):
        page = call(Bucket=tree, MaxKeys=0)
        assert (page["IsTruncated"], page["MaxKeys"]) == (False, 0)
        assert "Contents" not in page
        assert "Versions" not in page


@pytest.mark.parametrize("query", ["max-keys=x", "max-keys=-1", "max-keys=", "encoding-type=xml", "list-type=3"])
def test_bad_parameters_are_named(servers: Stack, tree: str, query: str) -> None:
    reply = servers.request("GET", f"/{tree}?{query}")
    assert (reply.status, reply.code, reply.named_field) == (400, "InvalidArgument", query.partition("=")[0])


def test_a_token_that_is_not_ours_is_refused(servers: Stack, tree: str) -> None:
    answer = refused(servers.s3().list_objects_v2, Bucket=tree, ContinuationToken="not a token")
    assert answer == (400, "InvalidArgument")


def test_names_are_encoded_where_that_is_asked_for(servers: Stack) -> None:
    """Keys XML has no characters for: as percent-escapes, or as numeric references that lenient parsers take."""
    s3, bucket = servers.s3(), fresh_bucket(servers)
    for key in ("a b+c&d", "x\x01\r\n", "dir\x02/inside"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    encoded = servers.request("GET", f"/{bucket}?list-type=2&encoding-type=url&delimiter=%2F&prefix=").body.decode()
    assert re.findall("<Key>(.*?)</Key>", encoded) == ["a%20b%2Bc%26d", "x%01%0D%0A"]
    assert re.findall("<Prefix>(.*?)</Prefix>", encoded) == ["", "dir%02/"]
    bare = servers.request("GET", f"/{bucket}?list-type=2&delimiter=%2F").body.decode()
    assert re.findall("<Key>(.*?)</Key>", bare, re.DOTALL) == ["a b+c&amp;d", "x&#x1;&#xD;\n"]
    assert re.findall("<Prefix>(.+?)</Prefix>", bare) == ["dir&#x2;/"]
    for operation in ("list_objects", "list_objects_v2", "list_object_versions"):
        keys, groups = collect(servers, operation, bucket, 1, Delimiter="/")
        assert (keys, groups) == (["a b+c&d", "x\x01\r\n"], ["dir\x02/"])
