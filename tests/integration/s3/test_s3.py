"""S3 as real clients speak it, against both arrangements of the processes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.support.requests import OWNER, READER, s3_client
from tests.support.servers import Stack, stack


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def test_objects_come_back_as_they_were_put(servers: Stack) -> None:
    s3 = servers.s3()
    body = os.urandom(3_000_001)
    put = s3.put_object(
        Bucket="chunks",
        Key="a//b/../c d+\u00e9",
        Body=body,
        ContentType="x/y",
        Metadata={"k": "v"},
        CacheControl="no-cache",
    )
    assert put["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    got = s3.get_object(Bucket="chunks", Key="a//b/../c d+\u00e9")
    assert got["Body"].read() == body
    assert (got["ContentType"], got["Metadata"], got["CacheControl"]) == ("x/y", {"k": "v"}, "no-cache")
    head = s3.head_object(Bucket="chunks", Key="a//b/../c d+\u00e9")
    assert (head["ContentLength"], head["ETag"]) == (len(body), put["ETag"])
    s3.put_object(Bucket="chunks", Key="empty", Body=b"")
    assert s3.get_object(Bucket="chunks", Key="empty")["Body"].read() == b""


def test_delete_is_idempotent_and_missing_keys_are_named(servers: Stack) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="gone", Body=b"x")
    s3.delete_object(Bucket="chunks", Key="gone")
    s3.delete_object(Bucket="chunks", Key="gone")
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="chunks", Key="gone")
    assert code_of(error) == "NoSuchKey"
    with pytest.raises(ClientError) as error:
        s3.head_object(Bucket="chunks", Key="gone")
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404


@pytest.mark.parametrize("version", ["s3", "s3v4"])
def test_presigned_urls_read_and_write(servers: Stack, version: str) -> None:
    s3 = s3_client(servers.url, signature_version=version)
    put = s3.generate_presigned_url("put_object", Params={"Bucket": "chunks", "Key": "signed"}, ExpiresIn=60)
    untyped = {"content-type": ""}  # urllib makes one up, and Version 2 signs it
    with urllib.request.urlopen(urllib.request.Request(put, b"by url", untyped, method="PUT")) as answer:
        assert answer.status == 200
    get = s3.generate_presigned_url("get_object", Params={"Bucket": "chunks", "Key": "signed"}, ExpiresIn=60)
    with urllib.request.urlopen(get) as answer:
        assert answer.read() == b"by url"


def test_keys_may_only_do_what_the_config_says(servers: Stack) -> None:
    servers.s3().create_bucket(Bucket="shared-a")
    servers.s3().put_object(Bucket="shared-a", Key="k", Body=b"x")
    reader = servers.s3(READER)
    assert reader.get_object(Bucket="shared-a", Key="k")["Body"].read() == b"x"
    for call in (
        lambda: reader.put_object(Bucket="shared-a", Key="k", Body=b"y"),
        lambda: reader.get_object(Bucket="chunks", Key="ranged"),
        lambda: reader.list_buckets(),
    ):
        with pytest.raises(ClientError) as error:
            call()
        assert code_of(error) == "AccessDenied"


def test_a_body_that_is_not_what_was_announced_is_never_stored(servers: Stack) -> None:
    """Digest, MD5 and length are checked before anything is visible; the old object stays."""
    servers.s3().put_object(Bucket="chunks", Key="kept", Body=b"old")
    wrong = servers.request("PUT", "/chunks/kept", body=b"new", sent_body=b"nex")
    assert (wrong.status, wrong.code) == (400, "XAmzContentSHA256Mismatch")
    md5 = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    wrong = servers.request("PUT", "/chunks/kept", body=b"new", headers={"content-md5": md5})
    assert (wrong.status, wrong.code, wrong.named_field) == (400, "BadDigest", "content-md5")
    wrong = servers.request("PUT", "/chunks/kept", body=b"new", headers={"content-md5": "!"})
    assert wrong.code == "InvalidDigest"
    assert servers.s3().get_object(Bucket="chunks", Key="kept")["Body"].read() == b"old"


def test_an_empty_put_with_an_rdma_token_creates_no_object(servers: Stack) -> None:
    """Clients take 200 for stored; a token that is not executed must not look stored."""
    for name in ("x-amz-rdma-token", "x-rdma-info", "x-scal-rdma"):
        refused = servers.request("PUT", "/chunks/token", headers={name: "opaque"})
        assert (refused.status, refused.code) == (501, "NotImplemented")
    assert servers.request("GET", "/chunks/token").status == 404


def test_a_get_with_an_rdma_token_answers_with_the_body(servers: Stack) -> None:
    """Declined as the S3-over-RDMA drafts do: no x-amz-rdma-reply, the object itself."""
    servers.s3().put_object(Bucket="chunks", Key="by-body", Body=b"the bytes")
    reply = servers.request("GET", "/chunks/by-body", headers={"x-amz-rdma-token": "opaque"})
    assert (reply.status, reply.body) == (200, b"the bytes")
    assert "x-amz-rdma-reply" not in reply.headers


def test_errors_carry_request_ids_and_heads_no_body(servers: Stack) -> None:
    reply = servers.request("GET", "/chunks/nothing-here")
    assert reply.headers["x-amz-request-id"].encode() in reply.body
    assert servers.request("HEAD", "/chunks/nothing-here").body == b""
    assert servers.request("GET", "/chunks/nothing-here", key=None).code == "AccessDenied"
    assert servers.request("GET", "/_objectcache/health", key=None).body == b'{"status":"ok"}'


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=100, check=False, env={**os.environ, **environment})


@pytest.mark.slow
def test_aws_cli(servers: Stack, tmp_path: Path) -> None:
    """`aws s3 mb, cp, ls, rm, presign` as the README shows them."""
    source = tmp_path / "object.bin"
    source.write_bytes(os.urandom(500_000))
    keys = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1], "AWS_DEFAULT_REGION": "us-east-1"}
    keys["AWS_CONFIG_FILE"] = str(tmp_path / "none")

    def aws(*words: str) -> str:
        command = [sys.executable, "-m", "awscli", "--endpoint-url", servers.url, "s3", *words]
        done = run(command, **keys)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    aws("mb", "s3://from-cli")
    aws("cp", str(source), "s3://from-cli/dir/object.bin")
    assert "500000 dir/object.bin" in aws("ls", "s3://from-cli", "--recursive")
    aws("cp", "s3://from-cli/dir/object.bin", str(tmp_path / "back.bin"))
    assert (tmp_path / "back.bin").read_bytes() == source.read_bytes()
    aws("rm", "s3://from-cli/dir/object.bin")
    assert aws("ls", "s3://from-cli", "--recursive") == ""


def test_curl(servers: Stack, tmp_path: Path) -> None:
    """`curl --aws-sigv4` as the README shows it."""
    source = tmp_path / "object.bin"
    source.write_bytes(os.urandom(100_000))
    sign = ["curl", "-sS", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", ":".join(OWNER)]
    unsigned = ["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
    assert run([*sign, *unsigned, "-T", str(source), f"{servers.url}/chunks/by-curl"]).returncode == 0
    assert run([*sign, f"{servers.url}/chunks/by-curl"]).stdout == source.read_bytes()
    assert b"<Key>by-curl</Key>" in run([*sign, f"{servers.url}/chunks?list-type=2"]).stdout


@pytest.mark.slow
def test_objects_and_generated_credentials_survive_a_restart(tmp_path: Path) -> None:
    """Credentials are made once, kept with mode 0600 and printed once."""
    command = [
        sys.executable,
        "-m",
        "objectcache",
        "serve",
        "--data",
        str(tmp_path / "d"),
        "--port",
        "0",
    ]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("AWS_")}

    def serve_once(first: bool) -> str:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        url = process.stdout.readline().rstrip().rpartition(" ")[2]
        file = tmp_path / "d" / "credentials.json"
        assert file.stat().st_mode & 0o777 == 0o600
        pair = json.loads(file.read_text())
        s3 = Stack(url, tmp_path, process.pid).s3((pair["access_key"], pair["secret_key"]))
        if first:
            s3.create_bucket(Bucket="kept")
            s3.put_object(Bucket="kept", Key="k", Body=b"survives")
        assert s3.get_object(Bucket="kept", Key="k")["Body"].read() == b"survives"
        process.terminate()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert (pair["secret_key"] in errors) == first
        return str(pair["secret_key"])

    assert serve_once(first=True) == serve_once(first=False)


@pytest.mark.slow
def test_bad_configuration_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text, named in [
        ("[storage]\ntheta = 1\n", "storage.theta"),
        ("nonsense", "c.toml"),
        ("[[credentials]]\naccess_key='abc'\nsecret_key='x'\n", "secret_key"),
        ("[internals.storage]\naggregation_bytes = 8192\nwindow_bytes = 4096\n", "aggregation_bytes"),
    ]:
        file.write_text(text)
        done = run([sys.executable, "-m", "objectcache", "serve", "--data", str(tmp_path), "--config", str(file)])
        assert done.returncode == 2
        assert named in done.stderr.decode()


@pytest.mark.slow
def test_a_gateway_without_its_storage_server_says_so(tmp_path: Path) -> None:
    """A retryable 503, not a hang."""
    with stack("apart", tmp_path) as running:
        storage_process = running.processes[0]
        running.s3().create_bucket(Bucket="chunks")
        storage_process.terminate()
        assert storage_process.wait(30) == 0
        reply = running.request("GET", "/chunks/x")
        assert (reply.status, reply.code) == (503, "SlowDown")
        assert "retry-after" in reply.headers
