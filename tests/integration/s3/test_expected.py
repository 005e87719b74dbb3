"""Small things that clients of S3 expect, each seen to fail with a real one."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from gateway.s3.sigv4 import trimmed, trimmed_widely
from tests.support.requests import OWNER, Reply, request, s3_client, signed
from tests.support.servers import Stack, stack, started
from tests.support.waiting import eventually


def refused(call: object, **arguments: object) -> str:
    with pytest.raises(ClientError) as error:
        call(**arguments)  # type: ignore[operator]
    return str(error.value.response["Error"]["Code"])


def aws(servers: Stack, folder: Path, *words: str, region: str = "us-east-1") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": OWNER[0],
        "AWS_SECRET_ACCESS_KEY": OWNER[1],
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_CONFIG_FILE": str(folder / "none"),
    }
    command = [str(Path(sys.executable).parent / "aws"), "--endpoint-url", servers.url, "s3", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_a_plus_in_a_copys_source_is_a_space(servers: Stack) -> None:
    """Clients encode the source as a form is encoded."""
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="with a space", Body=b"space")
    s3.put_object(Bucket="chunks", Key="with+a+plus", Body=b"plus")
    for source, body in (("/chunks/with+a+space", b"space"), ("/chunks/with%2Ba%2Bplus", b"plus")):
        assert request(servers.url, "PUT", "/chunks/copied", headers={"x-amz-copy-source": source}).status == 200
        assert s3.get_object(Bucket="chunks", Key="copied")["Body"].read() == body
    upload = s3.create_multipart_upload(Bucket="chunks", Key="parts")["UploadId"]
    target = f"/chunks/parts?partNumber=1&uploadId={upload}"
    headers = {"x-amz-copy-source": "/chunks/with+a+space"}
    assert request(servers.url, "PUT", target, headers=headers).status == 200
    headers = {"x-amz-copy-source": "/chunks/with+a+space", "x-amz-copy-source-range": "bytes=0-99"}
    assert request(servers.url, "PUT", target, headers=headers).code == "InvalidArgument"
    s3.abort_multipart_upload(Bucket="chunks", Key="parts", UploadId=upload)


@pytest.mark.slow
def test_a_second_sync_uploads_nothing(servers: Stack, tmp_path: Path) -> None:
    """A file written and uploaded within one second is not older than its object."""
    folder = tmp_path / "files"
    folder.mkdir()
    assert eventually(lambda: time.time() % 1 >= 0.6)
    for number in range(5):
        (folder / f"file-{number}").write_text("x")
    assert aws(servers, tmp_path, "sync", str(folder), "s3://chunks/sync/").stdout.count("upload:") == 5
    assert aws(servers, tmp_path, "sync", str(folder), "s3://chunks/sync/").stdout == ""
    listed = servers.s3().list_objects_v2(Bucket="chunks", Prefix="sync/")["Contents"]
    for found in listed:
        assert found["LastModified"].timestamp() >= (folder / Path(found["Key"]).name).stat().st_mtime
        head = servers.s3().head_object(Bucket="chunks", Key=found["Key"])
        assert head["LastModified"] == found["LastModified"].replace(microsecond=0)
        servers.s3().get_object(Bucket="chunks", Key=found["Key"], IfUnmodifiedSince=head["LastModified"])
        assert refused(
            servers.s3().get_object, Bucket="chunks", Key=found["Key"], IfModifiedSince=head["LastModified"]
        ) in ("304", "NotModified")


@pytest.mark.slow
def test_making_ones_own_bucket_again_and_listing_from_another_region(servers: Stack, tmp_path: Path) -> None:
    for _ in range(2):
        assert aws(servers, tmp_path, "mb", "s3://made-twice").returncode == 0
    listed = aws(servers, tmp_path, "ls", region="eu-west-3")
    assert (listed.returncode, "made-twice" in listed.stdout) == (0, True), listed.stderr
    elsewhere = aws(servers, tmp_path, "ls", "s3://made-twice", region="eu-west-3")
    assert elsewhere.returncode != 0 or elsewhere.stdout == ""


@pytest.mark.parametrize("space", ["\u00a0", "\u2003", "\u3000", "\u0085"])
def test_only_ascii_spaces_are_collapsed_in_signed_headers(servers: Stack, space: str) -> None:
    """S3 leaves other spaces as they are; botocore does not. Either signature is of the value that was sent."""
    value = f"a{space}{space}b  c"
    assert trimmed(value) == f"a{space}{space}b c"
    assert trimmed_widely(value) == "a b c"
    collapsed = {"x-amz-meta-name": "a b c"}

    def as_sent(headers: dict[str, str]) -> None:
        headers["x-amz-meta-name"] = value.encode().decode("latin-1")

    reply = request(servers.url, "PUT", "/chunks/spaces", headers=collapsed, change=as_sent)
    assert reply.status == 200, "as botocore signs it"


def signed_as_s3_says(url: str, target: str, value: str) -> dict[str, str]:
    """Headers of a PUT without a body and with x-amz-meta-name. In the signed form of the value only ASCII spaces are
    collapsed, as S3's documentation says. This is another signer than botocore's and than the server's.
    """
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    empty = hashlib.sha256(b"").hexdigest()
    canonical = re.sub(" +", " ", value.strip(" "))
    headers = {"host": urlsplit(url).netloc, "x-amz-content-sha256": empty, "x-amz-date": date}
    lines = "".join(f"{name}:{text}\n" for name, text in {**headers, "x-amz-meta-name": canonical}.items())
    names = ";".join([*headers, "x-amz-meta-name"])
    scope = f"{date[:8]}/us-east-1/s3/aws4_request"
    digest = hashlib.sha256(f"PUT\n{target}\n\n{lines}\n{names}\n{empty}".encode()).hexdigest()
    key = f"AWS4{OWNER[1]}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{digest}".encode(), "sha256").hex()
    claim = f"AWS4-HMAC-SHA256 Credential={OWNER[0]}/{scope},SignedHeaders={names},Signature={signature}"
    sent = value.encode().decode("latin-1")  # http.client writes headers as Latin-1
    return {**headers, "x-amz-meta-name": sent, "Authorization": claim}


@pytest.mark.parametrize("space", ["\u00a0", "\u2003", "\u3000", "\u0085"])
@pytest.mark.parametrize(
    "form", ["a{0}{0}b  c", "{0}a b{0}", "a {0} b", "  a{0}  "], ids=["within", "ends", "mixed", "out"]
)
def test_a_signer_that_leaves_other_spaces_as_they_are_is_accepted(servers: Stack, space: str, form: str) -> None:
    """And the value is kept as it was sent. Collapsed, it would be another one than the signer signed."""
    value = form.format(space)
    headers = signed_as_s3_says(servers.url, "/chunks/spaced", value)
    reply = request(servers.url, "PUT", "/chunks/spaced", headers=headers, key=None)
    assert reply.status == 200, reply.body
    other = {**headers, "x-amz-meta-name": headers["x-amz-meta-name"] + "d"}
    assert request(servers.url, "PUT", "/chunks/spaced", headers=other, key=None).code == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    ("subresource", "code"),
    [
        ("policy", "NoSuchBucketPolicy"),
        ("cors", "NoSuchCORSConfiguration"),
        ("encryption", "ServerSideEncryptionConfigurationNotFoundError"),
        ("tagging", "NoSuchTagSet"),
        ("website", "NoSuchWebsiteConfiguration"),
        ("publicAccessBlock", "NoSuchPublicAccessBlockConfiguration"),
        ("ownershipControls", "OwnershipControlsNotFoundError"),
        ("replication", "ReplicationConfigurationNotFoundError"),
        ("object-lock", "ObjectLockConfigurationNotFoundError"),
    ],
)
def test_a_configuration_that_is_absent_is_not_found(servers: Stack, subresource: str, code: str) -> None:
    reply = request(servers.url, "GET", f"/chunks?{subresource}")
    assert (reply.status, reply.code) == (404, code)
    assert request(servers.url, "GET", f"/no-such-bucket?{subresource}").code == "NoSuchBucket"


def test_options_without_an_origin_is_a_bad_request(servers: Stack) -> None:
    def ask(headers: dict[str, str]) -> tuple[int, str | None]:
        connection = http.client.HTTPConnection(urlsplit(servers.url).netloc, timeout=60)
        with contextlib.closing(connection):
            connection.request("OPTIONS", "/chunks/k", headers=headers)
            answer = connection.getresponse()
            return answer.status, Reply(answer.status, {}, answer.read()).code

    assert ask({}) == (400, "BadRequest")
    preflight = {"Origin": "http://example.com", "Access-Control-Request-Method": "GET"}
    assert ask(preflight) == (403, "AccessForbidden")


def test_a_completion_that_names_a_part_twice_is_out_of_order(servers: Stack) -> None:
    s3 = servers.s3()
    upload = s3.create_multipart_upload(Bucket="chunks", Key="twice")["UploadId"]
    named = {"Bucket": "chunks", "Key": "twice", "UploadId": upload}
    etag = s3.upload_part(**named, PartNumber=1, Body=b"x")["ETag"]
    for first in (etag, '"' + "0" * 32 + '"'):
        parts = [{"PartNumber": 1, "ETag": first}, {"PartNumber": 1, "ETag": etag}]
        assert refused(s3.complete_multipart_upload, **named, MultipartUpload={"Parts": parts}) == "InvalidPartOrder"
    s3.abort_multipart_upload(**named)


def test_a_completion_of_sha256_parts_names_their_checksums(servers: Stack) -> None:
    s3 = servers.s3()
    named = {"Bucket": "chunks", "Key": "summed"}
    named["UploadId"] = s3.create_multipart_upload(**named, ChecksumAlgorithm="SHA256")["UploadId"]
    part = s3.upload_part(**named, PartNumber=1, Body=b"x", ChecksumAlgorithm="SHA256")
    bare = [{"PartNumber": 1, "ETag": part["ETag"]}]
    assert refused(s3.complete_multipart_upload, **named, MultipartUpload={"Parts": bare}) == "InvalidRequest"
    whole = [{**bare[0], "ChecksumSHA256": part["ChecksumSHA256"]}]
    s3.complete_multipart_upload(**named, MultipartUpload={"Parts": whole})


def test_tags_come_back_sorted(servers: Stack) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="tagged", Body=b"x", Tagging="b=2&c=3&a=1")
    assert [tag["Key"] for tag in s3.get_object_tagging(Bucket="chunks", Key="tagged")["TagSet"]] == ["a", "b", "c"]


def continue_or_refusal(url: str, target: str) -> bytes:
    """What a client that holds its body back hears first."""
    place = urlsplit(url)
    headers = signed(url, "PUT", target, b"x" * 1000, {"Expect": "100-continue"}, OWNER)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"PUT {target} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: 1000\r\n{lines}\r\n"
    with socket.create_connection((place.hostname, place.port), timeout=60) as sock:
        sock.sendall(head.encode())
        first = sock.recv(12)
        if first == b"HTTP/1.1 100":
            while b"\r\n\r\n" not in first:
                first += sock.recv(100)
            sock.sendall(b"x" * 1000)
            return first[:12] + b" then " + sock.recv(12)
        return first


def check_leave(url: str) -> None:
    assert continue_or_refusal(url, "/chunks/held-back") == b"HTTP/1.1 100 then HTTP/1.1 200"
    for _ in range(3):
        assert continue_or_refusal(url, "/no-such-bucket/k") == b"HTTP/1.1 404"
    assert continue_or_refusal(url, "/chunks/held-back") == b"HTTP/1.1 100 then HTTP/1.1 200"


def test_a_body_nobody_wants_is_refused_before_it_is_sent(servers: Stack) -> None:
    """Also where another process than the gateway knows that."""
    check_leave(servers.url)


@pytest.mark.slow
def test_workers_refuse_early_too(tmp_path: Path) -> None:
    environment = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    serve = ("serve", "--data", str(tmp_path), "--port", "0", "--workers", "3")
    with started(*serve, environment=environment) as (url, _):
        s3_client(url).create_bucket(Bucket="chunks")
        for _ in range(6):
            check_leave(url)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--log-level", "info", "serve"), ("serve", "--log-level", "info")])
def test_the_log_level_goes_before_or_after_the_command(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "objectcache", *words, "--data", str(tmp_path / "file" / "x"), "--port", "0"]
    (tmp_path / "file").write_text("no folder")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Not a directory" in done.stderr) == (1, True)


@pytest.mark.slow
def test_health_includes_the_storage_side(tmp_path: Path) -> None:
    """A gateway whose storage server is gone serves nothing, and a load balancer should know."""
    with stack("apart", tmp_path) as running:
        health = "/_objectcache/health"
        assert request(running.url, "GET", health, key=None).status == 200
        storage = running.processes[0]
        storage.kill()
        storage.wait()
        assert eventually(lambda: request(running.url, "GET", health, key=None).status == 503)
