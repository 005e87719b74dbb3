"""Caches that S3 clients make: a header with CreateBucket, and one in the answer of HeadBucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from descriptors.headers import CACHE_HEADER
from tests.support.requests import OWNER, READER, s3_client
from tests.support.servers import Stack, started


def create(s3: Any, bucket: str, cache: str) -> None:
    def say(params: dict[str, Any], **_: object) -> None:
        params["headers"][CACHE_HEADER] = cache

    s3.meta.events.register("before-call.s3.CreateBucket", say)
    try:
        s3.create_bucket(Bucket=bucket)
    finally:
        s3.meta.events.unregister("before-call.s3.CreateBucket", say)


def said(s3: Any, bucket: str) -> str | None:
    found: str | None = s3.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"].get(CACHE_HEADER)
    return found


def test_a_client_makes_a_cache_and_sees_that_it_is_one(servers: Stack) -> None:
    s3 = servers.s3()
    create(s3, "sized", "64MiB")
    create(s3, "whole", "auto")
    s3.create_bucket(Bucket="kept")
    assert [said(s3, bucket) for bucket in ("sized", "whole", "kept")] == [str(64 << 20), "auto", None]


@pytest.mark.parametrize("text", ["", "much", "80%", "9" * 1000, "1"])
def test_a_cache_that_cannot_be_is_refused_and_no_bucket_made(servers: Stack, text: str) -> None:
    s3 = servers.s3()
    with pytest.raises(ClientError) as refused:
        create(s3, "wrong", text)
    assert refused.value.response["Error"]["Code"] == "InvalidArgument"
    assert CACHE_HEADER in refused.value.response["Error"]["Message"]
    with pytest.raises(ClientError, match="404"):
        s3.head_bucket(Bucket="wrong")


@pytest.mark.slow
def test_a_server_makes_the_caches_that_it_is_told_of(tmp_path: Path) -> None:
    """Each for a key that may make it; and says at its start what it has, and what to type next."""
    config = tmp_path / "config.toml"
    lines = ['[[buckets]]\nname = "declared"\ncapacity_bytes = "64MiB"\n']
    for key, bucket in (OWNER, "asked"), (READER, "declared"):
        lines.append(f'[[credentials]]\naccess_key = "{key[0]}"\nsecret_key = "{key[1]}"\nbuckets = ["{bucket}"]\n')
    config.write_text("".join(lines))
    serve = ("serve", "--data", str(tmp_path / "d"), "--port", "0", "--config", str(config), "--cache", "asked")
    with started(*serve) as (url, process):
        assert said(s3_client(url, OWNER), "asked") == "auto"
        assert said(s3_client(url, READER), "declared") == str(64 << 20)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(9)]
        assert "declared (64 MiB)" in lines[2]
        assert f"{OWNER[0]}, {READER[0]} (from the configuration)" in lines[6]
        assert f"{url}/_objectcache/" in lines[7]
        assert f"objectcache status {url}" in lines[8]
    with started(*serve[:-2]) as (url, _):  # what a cache was made as, it stays
        assert said(s3_client(url, OWNER), "asked") == "auto"
