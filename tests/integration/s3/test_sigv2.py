"""Version 2 signatures in the query: what `generate_presigned_url` and `aws s3 presign` make unless told otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import boto3
import pytest
from botocore.config import Config

from tests.support.requests import OWNER, READER, s3_client
from tests.support.servers import Stack
from tests.support.small_gateway import small_gateway
from tests.support.waiting import eventually


def default_client(url: str, style: str, key: tuple[str, str] = OWNER) -> Any:
    """A client whose presigned URLs are as botocore makes them by default."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        config=Config(s3={"addressing_style": style}),
    )


def fetch(url: str, method: str = "GET", data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, named, method=method)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_default_presigned_urls_read_and_write(servers: Stack) -> None:
    s3 = default_client(servers.url, "path")
    put = s3.generate_presigned_url(
        "put_object", Params={"Bucket": "chunks", "Key": "v2/a b+\u00e9", "Metadata": {"k": "v"}, "ContentType": "x/y"}
    )
    assert "AWSAccessKeyId" in put, "this client signs with Version 4 by default: the test proves nothing"
    assert fetch(put, "PUT", b"by url", content_type="x/y")[0] == 200
    named = {"Bucket": "chunks", "Key": "v2/a b+\u00e9"}
    assert fetch(s3.generate_presigned_url("get_object", Params=named)) == (200, b"by url")
    assert fetch(s3.generate_presigned_url("head_object", Params=named), "HEAD") == (200, b"")
    kept = servers.s3().head_object(**named)
    assert (kept["Metadata"], kept["ContentType"]) == ({"k": "v"}, "x/y")
    shown = s3.generate_presigned_url("get_object", Params={**named, "ResponseContentType": "a/b"})
    assert fetch(shown)[0] == 200


def test_a_bucket_may_be_named_by_the_host(servers: Stack) -> None:
    servers.s3().put_object(Bucket="chunks", Key="v2-host", Body=b"x")
    port = urlsplit(servers.url).port
    s3 = default_client(f"http://localhost:{port}", "virtual")
    url = s3.generate_presigned_url("get_object", Params={"Bucket": "chunks", "Key": "v2-host"})
    place = urlsplit(url)
    assert place.hostname == "chunks.localhost"
    here = f"http://127.0.0.1:{port}{place.path}?{place.query}"
    assert fetch(here, host=place.netloc) == (200, b"x")


@pytest.mark.parametrize("operation", ["delete_object", "list_objects_v2", "list_buckets", "delete_bucket"])
def test_other_requests_are_not_taken(servers: Stack, operation: str) -> None:
    in_bucket = {"Bucket": "chunks"}
    params = {"delete_object": {**in_bucket, "Key": "k"}, "list_buckets": {}}.get(operation, in_bucket)
    url = default_client(servers.url, "path").generate_presigned_url(operation, Params=params)
    method = {"delete_object": "DELETE", "delete_bucket": "DELETE"}.get(operation, "GET")
    assert fetch(url, method)[0] == 403


def test_descriptors_copies_and_tokens_are_never_presigned(servers: Stack) -> None:
    """What the URL carries as headers counts as headers."""
    s3 = default_client(servers.url, "path")
    s3.put_object(Bucket="chunks", Key="v2-source", Body=b"x")
    params = {"Bucket": "chunks", "Key": "v2-copy"}
    url = s3.generate_presigned_url("copy_object", Params={**params, "CopySource": "chunks/v2-source"})
    assert fetch(url, "PUT", b"")[0] == 403
    get = s3.generate_presigned_url("get_object", Params={"Bucket": "chunks", "Key": "v2-source"})
    status, body = fetch(get, x_amz_objectcache_descriptor="e30")
    assert (status, b"AccessDenied" in body or b"SignatureDoesNotMatch" in body) == (403, True)


def test_a_key_may_do_by_url_what_it_may_do_otherwise(servers: Stack) -> None:
    reader = default_client(servers.url, "path", READER)
    url = reader.generate_presigned_url("put_object", Params={"Bucket": "shared-v2", "Key": "k"})
    assert fetch(url, "PUT", b"x")[0] == 403


@pytest.mark.slow
def test_an_expired_url_says_so_in_both_versions(servers: Stack) -> None:
    for config in ({}, {"signature_version": "s3v4"}):
        s3 = s3_client(servers.url, **config)
        url = s3.generate_presigned_url("get_object", Params={"Bucket": "chunks", "Key": "k"}, ExpiresIn=1)
        if not config:
            parts = urlsplit(url)
            query = dict(parse_qsl(parts.query)) | {"Expires": str(int(time.time()) - 10)}
            url = parts._replace(query=urlencode(query)).geturl()
        else:
            assert eventually(lambda url=url: fetch(url)[0] == 403)  # type: ignore[misc]
        status, body = fetch(url)
        assert (status, b"<Code>AccessDenied</Code>" in body, b"Request has expired" in body) == (403, True, True)


def test_they_can_be_turned_off() -> None:
    with small_gateway(allows_sigv2=False) as gateway:
        status, body = fetch(f"{gateway.url}/b/k?AWSAccessKeyId=a&Signature=b&Expires={int(time.time()) + 10}")
        assert (status, b"AWS4-HMAC-SHA256" in body) == (400, True)


@pytest.mark.slow
def test_the_commands_own_urls_work(servers: Stack, tmp_path: Path) -> None:
    servers.s3().put_object(Bucket="chunks", Key="v2-cli", Body=b"cli")
    command = [
        str(Path(sys.executable).parent / "aws"),
        "--endpoint-url",
        servers.url,
        "s3",
        "presign",
        "s3://chunks/v2-cli",
    ]
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": OWNER[0],
        "AWS_SECRET_ACCESS_KEY": OWNER[1],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert fetch(made.stdout.strip()) == (200, b"cli")
