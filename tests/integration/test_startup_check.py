"""A connector finds out, when an engine starts, whether the store is there, and says so in one line."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from descriptors.objects import BucketCache
from nixl_client.client import Client
from nixl_client.connectors.startup import say
from nixl_client.connectors.vllm.early import check_early
from nixl_client.session.check import Checked, check
from tests.support.requests import OWNER, READER
from tests.support.servers import Stack


def checked(url: str, bucket: str, key: tuple[str, str] = OWNER) -> Checked:
    with Client(url, bucket, access_key=key[0], secret_key=key[1]) as client:
        return check(client.http, bucket, 5.0)


def test_a_bucket_that_is_missing_is_made_as_a_cache_once(servers: Stack) -> None:
    first, second = (checked(servers.url, "made-at-start") for _ in range(2))
    assert (first.is_good, first.was_made) == (True, True)
    assert "made the bucket made-at-start as a cache" in first.text
    assert (second.is_good, second.was_made) == (True, False)
    assert "ok, bucket made-at-start" in second.text
    assert "http" in second.text
    head = servers.s3().head_bucket(Bucket="made-at-start")["ResponseMetadata"]["HTTPHeaders"]
    assert head["x-amz-objectcache-cache"] == BucketCache().text()


def test_a_bucket_of_before_stays_what_it_is(servers: Stack) -> None:
    servers.s3().create_bucket(Bucket="kept-at-start")
    assert not checked(servers.url, "kept-at-start").was_made
    head = servers.s3().head_bucket(Bucket="kept-at-start")["ResponseMetadata"]["HTTPHeaders"]
    assert "x-amz-objectcache-cache" not in head


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (("NOBODY", "x" * 20), "the server does not know this access key"),
        ((OWNER[0], "x" * 20), "the secret key is not that of the access key"),
        (READER, "AccessDenied"),
    ],
)
def test_a_key_that_may_not_is_told(servers: Stack, key: tuple[str, str], said: str) -> None:
    found = checked(servers.url, "not-to-be-made", key)
    assert not found.is_good
    assert said in found.text


def test_the_options_and_the_store_are_checked_before_an_engine_loads(
    servers: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    caplog.set_level(logging.INFO, "nixl_client")
    for _ in range(2):
        check_early({"endpoint": servers.url, "bucket": "early-bucket"})
    (line,) = [record.message for record in caplog.records if "early-bucket" in record.message]
    assert "made the bucket early-bucket as a cache" in line
    with pytest.raises(ValueError, match="chunk_token"):
        check_early({"endpoint": servers.url, "chunk_token": 16})
    check_early({"endpoint": "http://127.0.0.1:1", "bucket": f"of-{servers.storage_pid}"})  # not checked before
    assert "ObjectCache IS NOT USED until this is mended" in caplog.text


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Something else that speaks HTTP."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", "is an S3 service, and no ObjectCache"),
        (200, b"<html>", "answers, but not as ObjectCache does"),
        (200, b"[]", "answers, but not as ObjectCache does"),
        (502, b"bad gateway", "no ObjectCache at"),
        (400, b"<Error><Code>InvalidArgument</Code><ChunkIndex>\xc2\xb2</ChunkIndex></Error>", "InvalidArgument"),
        (400, b"<Error><Code>InvalidArgument</Code><LayerIndex>" + b"9" * 9000 + b"</LayerIndex></Error>", "refuses"),
    ],
)
def test_another_service_is_told_from_ours(status: int, body: bytes, said: str) -> None:
    with answering(status, body) as url:
        found = checked(url, "kv-cache")
    assert not found.is_good
    assert said in found.text


def test_the_line_is_a_warning_where_nobody_answers(servers: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nixl_client")
    with Client(servers.url, "said-at-start", access_key=OWNER[0], secret_key=OWNER[1]) as client:
        assert say(client, "chunks of 8 MiB")
    (line,) = [each for each in caplog.records if each.name == "nixl_client.connectors.startup"]
    assert (line.levelno, line.getMessage().endswith("; chunks of 8 MiB")) == (logging.INFO, True)
    caplog.clear()
    with answering(503, b"") as url, Client(url, "kv-cache", access_key="A", secret_key="B" * 20) as client:
        assert not say(client)
    (line,) = [each for each in caplog.records if each.name == "nixl_client.connectors.startup"]
    assert line.levelno == logging.WARNING
    assert "IS NOT USED" in line.getMessage()
