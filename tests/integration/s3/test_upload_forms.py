"""Every form a body can come in, over a socket: the same bytes stored, and nothing when anything is wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from descriptors.objects import ChecksumAlgorithm
from gateway.s3.aws_chunked import SignatureChain
from gateway.s3.payload_form import PayloadForm
from gateway.s3.sigv4 import signing_key
from gateway.s3.upload import checksum_of
from tests.support.requests import s3_client
from tests.support.servers import CONFIG, Stack, started
from tests.support.small_gateway import KEY, Answer, SmallGateway, answer, head_of, sent, signed_headers, small_gateway

DATA = bytes(range(256)) * 1000
CHUNK_BYTES = 65_536


@pytest.fixture(scope="module")
def gateway() -> Iterator[SmallGateway]:
    with small_gateway() as running:
        yield running


def put(gateway: SmallGateway, key: str, body: bytes, headers: dict[str, str], payload_hash: str) -> Answer:
    target = f"/b/{key}"
    signed = signed_headers("PUT", target, headers, payload_hash) | {"Content-Length": str(len(body))}
    return sent(gateway.url, head_of("PUT", target, signed), body)


def chunked(
    data: bytes, signed: dict[str, str], form: PayloadForm, trailers: dict[str, str], chunk_bytes: int
) -> bytes:
    """`data` as a client of this form sends it."""
    chain = None
    if form is not PayloadForm.UNSIGNED_CHUNKS_TRAILER:
        scope = signed["Authorization"].partition("Credential=")[2].partition(",")[0].partition("/")[2]
        seed = signed["Authorization"].partition("Signature=")[2]
        chain = SignatureChain(signing_key(KEY[1], scope), signed["X-Amz-Date"], scope, seed)
    wire = b""
    pieces = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    for piece in [*pieces, b""]:
        extension = "" if chain is None else f";chunk-signature={chain.chunk(hashlib.sha256(piece).hexdigest())}"
        wire += f"{len(piece):x}{extension}\r\n".encode() + piece + (b"\r\n" if piece else b"")
    text = "".join(f"{name}:{value}\n" for name, value in trailers.items())
    wire += text.replace("\n", "\r\n").encode()
    if chain is not None and trailers:
        wire += f"x-amz-trailer-signature:{chain.trailer(hashlib.sha256(text.encode()).hexdigest())}\r\n".encode()
    return wire + b"\r\n"


def put_chunked(
    server: SmallGateway | Stack,
    key: str,
    form: PayloadForm,
    trailers: dict[str, str],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    spoil: tuple[bytes, bytes] = (b"", b""),
) -> Answer:
    target = f"/chunks/{key}"
    headers = {"x-amz-decoded-content-length": str(len(DATA)), "Content-Encoding": "aws-chunked,gzip"}
    if trailers:
        headers["x-amz-trailer"] = next(iter(trailers))
    signed = signed_headers("PUT", target, headers, form.value)
    body = chunked(DATA, signed, form, trailers, chunk_bytes)
    body = body.replace(*spoil, 1) if spoil[0] else body
    return sent(server.url, head_of("PUT", target, signed | {"Content-Length": str(len(body))}), body)


FORMS = [
    (PayloadForm.SIGNED_CHUNKS, False),
    (PayloadForm.SIGNED_CHUNKS_TRAILER, True),
    (PayloadForm.SIGNED_CHUNKS_TRAILER, False),
    (PayloadForm.UNSIGNED_CHUNKS_TRAILER, True),
    (PayloadForm.UNSIGNED_CHUNKS_TRAILER, False),
]


@pytest.mark.parametrize("chunk_bytes", [100, CHUNK_BYTES, 1 << 20])
@pytest.mark.parametrize(("form", "with_trailer"), FORMS)
def test_every_chunked_form_stores_the_decoded_bytes(
    gateway: SmallGateway, form: PayloadForm, with_trailer: bool, chunk_bytes: int
) -> None:
    algorithm = ChecksumAlgorithm.CRC64NVME
    trailers = {algorithm.header: checksum_of(algorithm, DATA)} if with_trailer else {}
    reply = put_chunked(gateway, "chunked", form, trailers, chunk_bytes=chunk_bytes)
    assert reply.status == 200, reply.body
    stored = gateway.storage.puts[-1]
    assert gateway.storage.stored.pop(("chunks", "chunked")) == DATA
    assert stored.checksum is (algorithm if with_trailer else None)
    assert stored.attributes.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize("form", [PayloadForm.SIGNED_CHUNKS_TRAILER, PayloadForm.UNSIGNED_CHUNKS_TRAILER])
@pytest.mark.parametrize(
    ("value", "code"), [("AAAAAA==", "BadDigest"), ("AAAA", "InvalidRequest"), ("no base64", "InvalidRequest")]
)
def test_a_wrong_trailing_checksum_stores_nothing(
    gateway: SmallGateway, form: PayloadForm, value: str, code: str
) -> None:
    assert put_chunked(gateway, "bad", form, {"x-amz-checksum-crc32": value}).code == code
    assert ("chunks", "bad") not in gateway.storage.stored


@pytest.mark.parametrize(
    ("form", "spoil", "code"),
    [
        (PayloadForm.SIGNED_CHUNKS, (b"\x10\x11", b"\x11\x10"), "SignatureDoesNotMatch"),
        (PayloadForm.SIGNED_CHUNKS, (b"10000;", b"0;"), "SignatureDoesNotMatch"),
        (PayloadForm.SIGNED_CHUNKS, (b"10000;", b"10001;"), "IncompleteBody"),
        (PayloadForm.UNSIGNED_CHUNKS_TRAILER, (b"10000\r\n", b"0\r\n"), "IncompleteBody"),
    ],
)
def test_a_chunked_body_changed_on_its_way_stores_nothing(
    gateway: SmallGateway, form: PayloadForm, spoil: tuple[bytes, bytes], code: str
) -> None:
    assert put_chunked(gateway, "bad", form, {}, spoil=spoil).code == code
    assert ("chunks", "bad") not in gateway.storage.stored


def test_a_body_without_any_length_is_refused(gateway: SmallGateway) -> None:
    head = head_of("PUT", "/b/k", signed_headers("PUT", "/b/k", {}))
    reply = sent(gateway.url, head, b"")
    assert (reply.status, reply.code) == (411, "MissingContentLength")


@pytest.mark.parametrize(("announced", "code"), [(5, None), (6, "IncompleteBody"), (4, "IncompleteBody")])
def test_a_transfer_in_http_chunks_has_the_length_it_announces(
    gateway: SmallGateway, announced: int, code: str | None
) -> None:
    headers = signed_headers("PUT", "/b/http", {"x-amz-decoded-content-length": str(announced)})
    head = head_of("PUT", "/b/http", headers | {"Transfer-Encoding": "chunked"})
    reply = sent(gateway.url, head, b"5\r\nhello\r\n0\r\n\r\n")
    assert reply.code == code
    assert (gateway.storage.stored.pop(("b", "http"), None) == b"hello") is (code is None)


def test_aws_chunks_inside_http_chunks_decode(gateway: SmallGateway) -> None:
    """What NIXL's OBJ plugin and botocore over TLS send: no Content-Length at all."""
    form = PayloadForm.UNSIGNED_CHUNKS_TRAILER
    trailers = {"x-amz-checksum-crc64nvme": checksum_of(ChecksumAlgorithm.CRC64NVME, DATA)}
    named = {"x-amz-decoded-content-length": str(len(DATA)), "x-amz-trailer": "x-amz-checksum-crc64nvme"}
    signed = signed_headers("PUT", "/b/nested", named, form.value)
    inner = chunked(DATA, signed, form, trailers, CHUNK_BYTES)
    wire = b"".join(
        f"{len(inner[at : at + 1000]):x}\r\n".encode() + inner[at : at + 1000] + b"\r\n"
        for at in range(0, len(inner), 1000)
    )
    head = head_of("PUT", "/b/nested", signed | {"Transfer-Encoding": "chunked"})
    assert sent(gateway.url, head, wire + b"0\r\n\r\n").status == 200
    assert gateway.storage.stored["b", "nested"] == DATA


@pytest.mark.parametrize(
    ("headers", "payload_hash", "code"),
    [
        ({}, hashlib.sha256(DATA).hexdigest(), None),
        ({}, hashlib.sha256(b"other").hexdigest(), "XAmzContentSHA256Mismatch"),
        ({"Content-MD5": base64.b64encode(hashlib.md5(DATA).digest()).decode()}, "UNSIGNED-PAYLOAD", None),
        ({"Content-MD5": base64.b64encode(hashlib.md5(b"other").digest()).decode()}, "UNSIGNED-PAYLOAD", "BadDigest"),
        ({"x-amz-checksum-sha1": "A" * 27 + "="}, "UNSIGNED-PAYLOAD", "BadDigest"),
    ],
)
def test_digests_in_headers_reach_the_storage_side(
    gateway: SmallGateway, headers: dict[str, str], payload_hash: str, code: str | None
) -> None:
    reply = put(gateway, "whole", DATA, headers, payload_hash)
    assert reply.code == code
    assert (gateway.storage.stored.pop(("b", "whole"), None) == DATA) is (code is None)


@pytest.mark.parametrize("form", [PayloadForm.UNSIGNED, *(form for form, with_trailer in FORMS if not with_trailer)])
def test_small_documents_come_in_every_form_too(gateway: SmallGateway, form: PayloadForm) -> None:
    """A client that streams signatures does so for an XML body as well. What is not XML says it was understood."""
    body, target = b"not xml", "/b?lifecycle"
    headers = {"x-amz-decoded-content-length": str(len(body))} if form.is_chunked else {}
    signed = signed_headers("PUT", target, headers, form.value)
    wire = chunked(body, signed, form, {}, 5) if form.is_chunked else body
    reply = sent(gateway.url, head_of("PUT", target, signed | {"Content-Length": str(len(wire))}), wire)
    assert reply.code == "MalformedXML"


def test_requests_of_our_own_demand_a_signed_body(gateway: SmallGateway) -> None:
    """Whoever relays a request must not be able to change which buffer is written."""
    body = json.dumps({"keys": ["k"]}).encode()
    for form, code in (
        (PayloadForm.UNSIGNED, "InvalidRequest"),
        (PayloadForm.UNSIGNED_CHUNKS_TRAILER, "InvalidRequest"),
    ):
        signed = signed_headers("POST", "/b?lookup", {}, form.value) | {"Content-Length": str(len(body))}
        assert sent(gateway.url, head_of("POST", "/b?lookup", signed), body).code == code


@pytest.mark.parametrize(("form", "with_trailer"), FORMS)
def test_running_servers_store_every_chunked_form_and_give_it_back(
    servers: Stack, form: PayloadForm, with_trailer: bool
) -> None:
    """The whole path, with the real storage side computing and keeping the checksum."""
    algorithm = ChecksumAlgorithm.CRC32C
    expected = checksum_of(algorithm, DATA)
    trailers = {algorithm.header: expected} if with_trailer else {}
    assert put_chunked(servers, f"{form.name}-{with_trailer}", form, trailers).status == 200
    got = servers.s3().get_object(Bucket="chunks", Key=f"{form.name}-{with_trailer}", ChecksumMode="ENABLED")
    assert got["Body"].read() == DATA
    assert got["ContentEncoding"] == "gzip"
    assert got.get("ChecksumCRC32C") == (expected if with_trailer else None)


@pytest.mark.parametrize("form", [PayloadForm.SIGNED_CHUNKS_TRAILER, PayloadForm.UNSIGNED_CHUNKS_TRAILER])
def test_running_servers_keep_nothing_of_a_body_whose_trailer_is_wrong(servers: Stack, form: PayloadForm) -> None:
    """The trailer comes after every byte has been written."""
    assert put_chunked(servers, "wrong", form, {"x-amz-checksum-crc32c": "AAAAAA=="}).code == "BadDigest"
    listed = servers.s3().list_objects_v2(Bucket="chunks", Prefix="wrong")
    assert listed["KeyCount"] == 0


def test_running_servers_refuse_a_changed_chunk_and_a_changed_trailer(servers: Stack) -> None:
    for spoil, code in (
        ((b"\x10\x11", b"\x11\x10"), "SignatureDoesNotMatch"),
        ((b"sum-sha1:", b"sum-sha1x:"), "MalformedTrailerError"),
    ):
        trailers = {"x-amz-checksum-sha1": checksum_of(ChecksumAlgorithm.SHA1, DATA)}
        reply = put_chunked(servers, "changed", PayloadForm.SIGNED_CHUNKS_TRAILER, trailers, spoil=spoil)
        assert reply.code == code
    assert servers.s3().list_objects_v2(Bucket="chunks", Prefix="changed")["KeyCount"] == 0


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three processes on one port, of which one owns the store."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "config.toml").write_text(CONFIG)
    serve = ("serve", "--data", str(folder / "d"), "--port", "0", "--workers", "3", "--config")
    with started(*serve, str(folder / "config.toml")) as (url, process):
        running = Stack(url, folder / "d", process.pid, [process])
        running.s3().create_bucket(Bucket="chunks")
        yield running


@pytest.mark.parametrize(("form", "with_trailer"), FORMS)
def test_every_worker_stores_every_chunked_form(workers: Stack, form: PayloadForm, with_trailer: bool) -> None:
    """The kernel gives each connection to any of them."""
    algorithm = ChecksumAlgorithm.CRC32C
    trailers = {algorithm.header: checksum_of(algorithm, DATA)} if with_trailer else {}
    for number in range(8):
        key = f"{form.name}-{with_trailer}-{number}"
        assert put_chunked(workers, key, form, trailers).status == 200
        assert workers.s3().get_object(Bucket="chunks", Key=key)["Body"].read() == DATA
        wrong = put_chunked(workers, f"wrong-{number}", form, {"x-amz-checksum-crc32c": "AAAAAA=="})
        assert wrong.code == ("BadDigest" if form is not PayloadForm.SIGNED_CHUNKS else None) or wrong.status == 400
    assert workers.s3().list_objects_v2(Bucket="chunks", Prefix="wrong").get("KeyCount") == 0


@pytest.mark.parametrize("version", ["s3", "s3v4"])
def test_every_worker_takes_presigned_urls(workers: Stack, version: str) -> None:
    """URLs of both versions of signing are taken; one that was changed is refused by all workers."""
    s3 = s3_client(workers.url, signature_version=version)
    for number in range(8):
        key = f"presigned-{version}-{number}"
        for method, call in (("PUT", "put_object"), ("GET", "get_object")):
            url = s3.generate_presigned_url(call, Params={"Bucket": "chunks", "Key": key}, ExpiresIn=60)
            assert requests_at(url, method).status == 200
            assert requests_at(url.replace(key, f"other-{key}"), method).status == 403


def requests_at(url: str, method: str) -> Answer:
    """One request of its own connection, as whoever has the URL sends it."""
    place = urlsplit(url)
    body = DATA if method == "PUT" else b""
    head = (
        f"{method} {place.path}?{place.query} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((place.hostname, place.port), timeout=30) as sock:
        sock.sendall(head.encode() + body)
        return answer(sock)
