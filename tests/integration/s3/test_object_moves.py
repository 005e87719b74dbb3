"""The five S3 paths, GET and PUT: the same objects whichever way their bytes go, and nothing stored on a failure."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from botocore.auth import S3SigV4Auth

from descriptors.descriptor import Delivery, Descriptor, OnMissing, RdmaTarget
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.messages import AgentRegistration, Region, registration_body
from descriptors.rdma_token import TOKEN_HEADER, ObjectPath, RdmaToken, encode_token
from nixl_client.client import Client
from nixl_client.objects import Path
from nixl_client.session.agent import ClientAgent
from tests.integration.test_refusals import Agent, agent_id, making_agent, register
from tests.support.chunks import make_chunks
from tests.support.requests import OTHER, OWNER, Reply, s3_client
from tests.support.servers import Stack, started

MIB = 1 << 20
SIZES = (0, 1, 4096, 65_536, 65_537, 1_000_003, 4 * MIB, 4 * MIB + 1, 20 * MIB + 77)
LAYOUT = ChunkLayout(num_layers=6, chunk_tokens=16, per_layer_chunk_bytes=20_000)
NONE: Mapping[str, str] = {}


def data_of(nbytes: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with making_agent() as made:
        yield made


@pytest.fixture(scope="module")
def client(servers: Stack) -> Iterator[Client]:
    with servers.client("chunks", "ucx") as made:
        yield made


@pytest.fixture(scope="module")
def buffer() -> np.ndarray:
    """One registered buffer for a module's worth of objects."""
    return np.zeros(24 * MIB, dtype=np.uint8)


def is_apart(servers: Stack) -> bool:
    return len(servers.processes) == 2


def token(servers: Stack, agent: Agent, length: int, offset: int = 0, **changes: Any) -> RdmaToken:
    made = RdmaToken(agent_id(servers, agent), "kv", offset, length, uuid.uuid4().hex)
    return replace(made, **changes)


def get_with(servers: Stack, name: str, value: RdmaToken | str, **options: Any) -> Reply:
    return with_token(servers, "GET", name, value, **options)


def put_with(servers: Stack, name: str, value: RdmaToken | str, **options: Any) -> Reply:
    return with_token(servers, "PUT", name, value, **options)


def with_token(
    servers: Stack,
    method: str,
    name: str,
    value: RdmaToken | str,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> Reply:
    text = value if isinstance(value, str) else encode_token(value)
    return servers.request(method, f"/chunks/{name}", headers={TOKEN_HEADER: text, **(headers or {})}, **options)


def is_stored(servers: Stack, key: str) -> bool:
    return servers.request("HEAD", f"/chunks/{key}").status == 200


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("path", list(Path))
def test_an_object_comes_back_byte_for_byte_whichever_way_it_went(
    servers: Stack, client: Client, buffer: np.ndarray, path: Path, nbytes: int
) -> None:
    """Stored by one path, read by every other; the ETag is the MD5 as for any put."""
    offset, data, key = 4099, data_of(nbytes), f"way-{path.value}-{nbytes}"
    buffer[offset : offset + nbytes] = data
    if path is Path.BUFFER and is_apart(servers):
        with pytest.raises(ObjectCacheError, match="NotImplemented"):
            client.objects.put_object(key, buffer, offset=offset, length=nbytes, path=path)
        return
    put = client.objects.put_object(key, buffer, offset=offset, length=nbytes, path=path)
    assert (put.etag, put.path, put.nbytes) == (hashlib.md5(data.tobytes()).hexdigest(), path, nbytes)
    assert servers.s3().get_object(Bucket="chunks", Key=key)["Body"].read() == data.tobytes()
    for way in Path:
        buffer[:] = 0xA5
        got = client.objects.get_object(key, buffer, offset=offset, length=nbytes + 10, path=way)
        assert (got.nbytes, got.etag) == (nbytes, put.etag)
        assert got.path is (Path.TCP if way is Path.BUFFER and is_apart(servers) else way)
        assert np.array_equal(buffer[offset : offset + nbytes], data)
        assert not np.any(buffer[:offset] != 0xA5)
        assert not np.any(buffer[offset + nbytes :] != 0xA5)


def test_the_answer_says_what_a_get_says_and_carries_no_byte(servers: Stack, agent: Agent) -> None:
    data = data_of(9_000)
    servers.s3().put_object(
        Bucket="chunks", Key="told", Body=data.tobytes(), Metadata={"who": "me"}, ContentType="text/x", CacheControl="c"
    )
    reply = get_with(servers, "told", token(servers, agent, 9_000, 5), headers={"x-amz-checksum-mode": "ENABLED"})
    assert (reply.status, reply.body, reply.headers["content-length"]) == (200, b"", "0")
    assert reply.headers["x-amz-rdma-reply"] == "200"
    assert reply.headers["x-amz-rdma-bytes-transferred"] == "9000"
    assert reply.headers["etag"] == f'"{hashlib.md5(data.tobytes()).hexdigest()}"'
    told = ("content-type", "cache-control", "x-amz-meta-who")
    assert [reply.headers[name] for name in told] == ["text/x", "c", "me"]
    assert {"last-modified", "x-amz-checksum-crc32"} <= set(reply.headers)
    assert np.array_equal(agent.buffer[5:9005], data)


@pytest.mark.parametrize(("spec", "first", "last"), [("0-0", 0, 0), ("100-70000", 100, 70000), ("-7", 79_993, 79_999)])
def test_a_range_is_a_206_in_the_reply(
    servers: Stack, client: Client, buffer: np.ndarray, agent: Agent, spec: str, first: int, last: int
) -> None:
    """A 206 without a body is no HTTP, so the answer is 200 and the reply's header says 206."""
    data = data_of(80_000)
    servers.s3().put_object(Bucket="chunks", Key="ranged", Body=data.tobytes())
    here = token(servers, agent, 0)
    big = replace(here, length=len(agent.buffer))
    reply = get_with(servers, "ranged", big, headers={"Range": f"bytes={spec}"})
    count = last - first + 1
    if count > len(agent.buffer):
        assert (reply.status, reply.code) == (400, "InvalidArgument")
    else:
        assert (reply.status, reply.headers["x-amz-rdma-reply"]) == (200, "206")
        assert reply.headers["content-range"] == f"bytes {first}-{last}/80000"
        assert reply.headers["x-amz-rdma-bytes-transferred"] == str(count)
        assert np.array_equal(agent.buffer[:count], data[first : last + 1])
    got = client.objects.get_object("ranged", buffer, byte_range=(first, last))
    assert got.nbytes == count
    assert np.array_equal(buffer[:count], data[first : last + 1])


def test_conditions_hold_past_http_too(servers: Stack, agent: Agent) -> None:
    servers.s3().put_object(Bucket="chunks", Key="if", Body=b"0123456789")
    etag = f'"{hashlib.md5(b"0123456789").hexdigest()}"'
    agent.buffer[:] = 0
    fresh = lambda: token(servers, agent, 100)  # noqa: E731
    assert get_with(servers, "if", fresh(), headers={"If-None-Match": etag}).status == 304
    assert get_with(servers, "if", fresh(), headers={"If-Match": '"x"'}).code == "PreconditionFailed"
    assert get_with(servers, "if", fresh(), headers={"Range": "bytes=50-60"}).status == 416
    assert get_with(servers, "none", fresh()).code == "NoSuchKey"
    assert not agent.buffer.any()
    whole = get_with(servers, "if", fresh(), headers={"Range": "bytes=2-3", "If-Range": '"other"'})
    assert (whole.headers["x-amz-rdma-reply"], agent.buffer[:10].tobytes()) == ("200", b"0123456789")
    part = get_with(servers, "if", fresh(), headers={"Range": "bytes=2-3", "If-Range": etag})
    assert (part.headers["x-amz-rdma-reply"], agent.buffer[:2].tobytes()) == ("206", b"23")


def test_a_put_past_http_keeps_what_a_put_keeps(servers: Stack, agent: Agent) -> None:
    """Metadata, tags, type and checksums; those of the headers are the object's."""
    agent.buffer[:3000] = data_of(3000)
    body = agent.buffer[:3000].tobytes()
    sha1 = base64.b64encode(hashlib.sha1(body).digest()).decode()
    md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
    headers = {"x-amz-meta-a": "b", "content-type": "text/y", "x-amz-checksum-sha1": sha1, "content-md5": md5}
    reply = put_with(servers, "kept-past", token(servers, agent, 3000), headers={**headers, "x-amz-tagging": "t=1"})
    assert (reply.status, reply.headers["x-amz-rdma-reply"]) == (200, "200")
    assert reply.headers["x-amz-checksum-sha1"] == sha1
    found = servers.s3().get_object(Bucket="chunks", Key="kept-past", ChecksumMode="ENABLED")
    assert (found["Metadata"], found["ContentType"], found["ChecksumSHA1"]) == ({"a": "b"}, "text/y", sha1)
    assert (found["TagCount"], found["Body"].read()) == (1, body)


def test_a_put_past_http_obeys_its_conditions_and_checksums(servers: Stack, agent: Agent) -> None:
    """What is refused changes nothing."""
    agent.buffer[:100] = 7
    servers.s3().put_object(Bucket="chunks", Key="there", Body=b"old")
    wrong = base64.b64encode(hashlib.md5(b"else").digest()).decode()
    crc = {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-sdk-checksum-algorithm": "CRC32"}
    for headers, code in (
        ({"If-None-Match": "*"}, "PreconditionFailed"),
        ({"If-Match": '"0"'}, "PreconditionFailed"),
        ({"content-md5": wrong}, "BadDigest"),
        (crc, "BadDigest"),
        ({"x-amz-server-side-encryption": "AES256"}, "NotImplemented"),
        ({"x-rdma-info": "more"}, "NotImplemented"),
        ({"x-amz-copy-source": "/chunks/there"}, "NotImplemented"),
    ):
        assert put_with(servers, "there", token(servers, agent, 100), headers=headers).code == code
    assert put_with(servers, "there?uploadId=x&partNumber=1", token(servers, agent, 100)).code == "NotImplemented"
    assert servers.s3().get_object(Bucket="chunks", Key="there")["Body"].read() == b"old"
    reply = servers.request("PUT", "/no-such-bucket/x", headers={TOKEN_HEADER: encode_token(token(servers, agent, 9))})
    assert reply.code == "NoSuchBucket"


def test_a_put_with_a_token_has_no_body(servers: Stack, agent: Agent) -> None:
    """Which of the two would be the object?"""
    reply = put_with(servers, "two-bodies", token(servers, agent, 10), body=b"0123456789")
    assert (reply.status, reply.code) == (400, "InvalidRequest")
    reply = put_with(servers, "two-bodies", token(servers, agent, 10), body=b"x", sent_body=b"")
    assert (reply.status, reply.code) == (400, "XAmzContentSHA256Mismatch")
    assert not is_stored(servers, "two-bodies")
    unsigned = token(servers, agent, 10)
    with mock.patch.object(S3SigV4Auth, "payload", return_value="UNSIGNED-PAYLOAD"):
        assert put_with(servers, "no-body", unsigned).status == 200
    assert is_stored(servers, "no-body")


def test_boto3_can_send_tokens(servers: Stack, agent: Agent) -> None:
    """It waits for 100 Continue before its empty body, and would send that body's CRC as the object's."""
    agent.buffer[:2000] = data_of(2000)
    value = encode_token(token(servers, agent, 2000))
    s3 = s3_client(servers.url, request_checksum_calculation="when_required")
    s3.meta.events.register(
        "before-sign.s3.PutObject", lambda request, **_: request.headers.add_header(TOKEN_HEADER, value)
    )
    s3.put_object(Bucket="chunks", Key="boto", Metadata={"by": "boto3"})
    found = s3.get_object(Bucket="chunks", Key="boto")
    assert (found["Metadata"], found["Body"].read()) == ({"by": "boto3"}, agent.buffer[:2000].tobytes())


def test_a_token_is_used_once(servers: Stack, agent: Agent) -> None:
    """A replayed write into a buffer in use again would be another's bytes; a replayed put would store them."""
    servers.s3().put_object(Bucket="chunks", Key="once", Body=b"first")
    once = token(servers, agent, 100)
    assert get_with(servers, "once", once).status == 200
    agent.buffer[:] = 1
    again = get_with(servers, "once", once)
    assert (again.status, again.code) == (409, "RequestReplayed")
    put = put_with(servers, "replayed", once)
    assert (put.status, put.code) == (409, "RequestReplayed")
    assert np.all(agent.buffer == 1)
    assert not is_stored(servers, "replayed")
    stored = token(servers, agent, 5)
    assert put_with(servers, "twice", stored).status == 200
    agent.buffer[:] = 2
    assert put_with(servers, "twice", stored).code == "RequestReplayed"
    assert servers.s3().get_object(Bucket="chunks", Key="twice")["Body"].read() == b"\1" * 5


def test_a_cancelled_id_is_used_up(servers: Stack, agent: Agent) -> None:
    early = token(servers, agent, 10)
    assert servers.request("DELETE", f"/_objectcache/requests/{early.request_id}").status == 204
    assert put_with(servers, "cancelled", early).code == "RequestReplayed"
    assert not is_stored(servers, "cancelled")


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_tokens_for_memory_that_is_not_the_callers_are_refused(servers: Stack, agent: Agent, method: str) -> None:
    """As a descriptor's rdma_target is; the object in the way stays as it is."""
    servers.s3().put_object(Bucket="chunks", Key="safe", Body=b"safe")
    agent.buffer[:] = 0
    good = token(servers, agent, 100)
    size = len(agent.buffer)
    for bad, status, code in (
        (replace(good, agent_id="nobody"), 404, "NoSuchAgent"),
        (replace(good, region_id="other"), 400, "InvalidDescriptor"),
        (replace(good, offset=size - 99), 400, "InvalidDescriptor"),
        (replace(good, offset=1 << 63, length=1 << 62), 400, "InvalidDescriptor"),
        (replace(good, offset=size + 1, length=0), 400, "InvalidDescriptor"),
    ):
        reply = with_token(servers, method, "safe", bad)
        assert (reply.status, reply.code) == (status, code), bad
    theirs = with_token(servers, method, "safe", good, key=OTHER)
    assert (theirs.status, theirs.code) == (403, "AccessDenied")
    short = replace(good, agent_id=agent_id(servers, agent, lifetime_s=1e-6))
    assert with_token(servers, method, "safe", short).code in ("ExpiredToken", "NoSuchAgent")
    assert not agent.buffer.any()
    assert servers.s3().get_object(Bucket="chunks", Key="safe")["Body"].read() == b"safe"


def packed(fields: Any) -> str:
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return "objectcache-1." + base64.urlsafe_b64encode(data).decode().rstrip("=")


FIELDS = {"agent_id": "a", "region_id": "kv", "offset": 0, "length": 1, "request_id": "0123456789abcdef"}


@pytest.mark.parametrize(
    "text",
    [
        "objectcache-1.",
        "objectcache-1.!!",
        "objectcache-1." + "A" * 2000,
        packed(b"\xff"),
        packed([]),
        packed({}),
        packed({**FIELDS, "extra": 1}),
        packed({**FIELDS, "path": "sideways"}),
        packed({**FIELDS, "offset": -1}),
        packed({**FIELDS, "offset": 1.0}),
        packed({**FIELDS, "length": True}),
        packed({**FIELDS, "length": 1 << 64}),
        packed({**FIELDS, "offset": 1 << 63, "length": 1 << 63}),
        packed({**FIELDS, "request_id": "short"}),
        packed({**FIELDS, "agent_id": "a/b"}),
        packed({**FIELDS, "region_id": ""}),
        packed(b'{"offset":' + b"9" * 600 + b"}"),
    ],
)
def test_a_spoilt_token_of_ours_is_refused_by_name(servers: Stack, text: str) -> None:
    for method in ("GET", "PUT"):
        reply = with_token(servers, method, "spoilt", text)
        assert (reply.status, reply.code, reply.named_field) == (400, "InvalidArgument", TOKEN_HEADER)
    assert not is_stored(servers, "spoilt")


@pytest.mark.parametrize("text", ["opaque", "objectcache-2.abc", "OBJECTCACHE-1.x", "cuobj:0:ffff"])
def test_tokens_of_others_are_declined(servers: Stack, text: str) -> None:
    """A GET comes with its body and without the reply's header; a PUT creates nothing."""
    servers.s3().put_object(Bucket="chunks", Key="others", Body=b"the body")
    reply = get_with(servers, "others", text)
    assert (reply.status, reply.body) == (200, b"the body")
    assert "x-amz-rdma-reply" not in reply.headers
    assert put_with(servers, "others-put", text).code == "NotImplemented"
    assert not is_stored(servers, "others-put")


def test_the_token_must_be_signed_in_headers(servers: Stack, agent: Agent) -> None:
    """One added on the way, or one in a presigned request, which could be replayed for days, moves nothing."""
    value = encode_token(token(servers, agent, 10))
    added = servers.request("PUT", "/chunks/added", change=lambda headers: headers.update({TOKEN_HEADER: value}))
    assert added.status == 403
    assert not is_stored(servers, "added")


def test_an_object_larger_than_its_room_is_not_written(servers: Stack, agent: Agent) -> None:
    servers.s3().put_object(Bucket="chunks", Key="large", Body=b"x" * 101)
    agent.buffer[:] = 0
    for path in ObjectPath:
        reply = get_with(servers, "large", token(servers, agent, 100, path=path))
        if path is ObjectPath.DIRECT or not is_apart(servers):
            assert (reply.status, reply.code, reply.named_field) == (400, "InvalidArgument", TOKEN_HEADER)
    assert not agent.buffer.any()


def test_a_gateway_elsewhere_declines_to_stage(servers: Stack, agent: Agent) -> None:
    """It has no UCX; where gateway and storage server are one process it is done."""
    servers.s3().put_object(Bucket="chunks", Key="staged", Body=b"staged bytes")
    reply = get_with(servers, "staged", token(servers, agent, 100, path=ObjectPath.BUFFER))
    put = put_with(servers, "staged-put", token(servers, agent, 12, path=ObjectPath.BUFFER))
    if is_apart(servers):
        assert (reply.body, "x-amz-rdma-reply" in reply.headers) == (b"staged bytes", False)
        assert (put.status, put.code) == (501, "NotImplemented")
        assert not is_stored(servers, "staged-put")
    else:
        assert (reply.body, reply.headers["x-amz-rdma-reply"]) == (b"", "200")
        assert servers.s3().get_object(Bucket="chunks", Key="staged-put")["Body"].read() == b"staged bytes"


def test_without_ucx_every_token_is_declined(tmp_path: Any, agent: Agent) -> None:
    environment = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    with started("serve", "--data", str(tmp_path), "--port", "0", environment=environment) as (
        url,
        process,
    ):
        servers = Stack(url, tmp_path, process.pid, [process])
        servers.s3().create_bucket(Bucket="chunks")
        servers.s3().put_object(Bucket="chunks", Key="k", Body=b"body")
        value = RdmaToken("agent", "kv", 0, 100, uuid.uuid4().hex)
        assert get_with(servers, "k", value).body == b"body"
        assert put_with(servers, "p", value).code == "NotImplemented"
        assert not is_stored(servers, "p")
        body = encode_binary(chunk_puts(["c"], "agent"))
        assert servers.request("PUT", "/chunks?layerwise", body=body).code == "NotImplemented"


@pytest.mark.slow
def test_any_worker_passes_tokens_on_to_the_stores_owner(tmp_path: Any, agent: Agent) -> None:
    """It has neither the client's agent nor UCX; every request here comes over a connection of its own."""
    environment = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    serve = ("serve", "--data", str(tmp_path), "--port", "0", "--workers", "3", "--ucx")
    with started(*serve, environment=environment) as (url, process):
        servers = Stack(url, tmp_path, process.pid, [process])
        servers.s3().create_bucket(Bucket="chunks")
        here = token(servers, agent, 5000)
        for number in range(12):
            data = data_of(5000, number)
            agent.buffer[:5000] = data
            assert put_with(servers, f"w-{number}", replace(here, request_id=uuid.uuid4().hex)).status == 200
            agent.buffer[:5000] = 0
            reply = get_with(servers, f"w-{number}", replace(here, request_id=uuid.uuid4().hex))
            assert (reply.status, reply.headers["x-amz-rdma-reply"]) == (200, "200")
            assert np.array_equal(agent.buffer[:5000], data)


def chunk_puts(keys: list[str], agent: str, **changes: Any) -> Descriptor:
    fields: dict[str, Any] = {
        "chunk_keys": tuple(keys),
        "num_layers": LAYOUT.num_layers,
        "chunk_tokens": LAYOUT.chunk_tokens,
        "per_layer_chunk_bytes": LAYOUT.per_layer_chunk_bytes,
        "delivery": Delivery.CHUNK_MAJOR,
        "rdma_target": RdmaTarget(agent, "kv", 0, LAYOUT.delivery_bytes(len(keys))),
        "request_id": uuid.uuid4().hex,
    }
    return Descriptor(**{**fields, **changes})


@pytest.mark.parametrize("delivery", [Delivery.CHUNK_MAJOR, Delivery.LAYER_MAJOR])
@pytest.mark.parametrize(
    "layout", [LAYOUT, ChunkLayout(5, 16, 1_300_001), ChunkLayout(3, 1, 7)], ids=["small", "many-slots", "tiny"]
)
def test_many_chunks_are_stored_from_one_buffer(
    servers: Stack, client: Client, layout: ChunkLayout, delivery: Delivery
) -> None:
    """Batch and Agg, back by descriptor GET in both modes: what was scattered out of layers is gathered into them."""
    keys, chunks = make_chunks(3 if layout.chunk_bytes > MIB else 21, layout, seed=hash((layout, delivery)) % 9999)
    flat = chunks.reshape(-1)
    if delivery is Delivery.LAYER_MAJOR:
        shape = (len(keys), layout.num_layers, layout.per_layer_chunk_bytes)
        flat = np.ascontiguousarray(chunks.reshape(shape).transpose(1, 0, 2)).reshape(-1)
    buffer = np.zeros(layout.delivery_bytes(len(keys)) + 11, dtype=np.uint8)
    buffer[11:] = flat
    etags = client.objects.put_chunks(keys, layout, buffer, offset=11, delivery=delivery)
    assert etags == [hashlib.md5(chunk.tobytes()).hexdigest() for chunk in chunks]
    for way in (Delivery.CHUNK_MAJOR, Delivery.LAYER_MAJOR):
        buffer[:] = 0
        client.fetch(keys, layout, buffer, delivery=way).wait(60)
        shape = (len(keys), layout.num_layers, layout.per_layer_chunk_bytes)
        wanted = chunks.reshape(shape)
        if way is Delivery.LAYER_MAJOR:
            wanted = wanted.transpose(1, 0, 2)
        assert np.array_equal(buffer[:-11], wanted.reshape(-1))
    client.release_buffer(buffer)


def test_a_put_of_chunks_says_of_each_whether_it_is_stored(servers: Stack, agent: Agent) -> None:
    small = {"num_layers": 2, "per_layer_chunk_bytes": 100}
    keys = [f"put-{index}" for index in range(5)]
    here = agent_id(servers, agent)
    agent.buffer[:1000] = data_of(1000)
    wanted = chunk_puts(keys, here, **small, rdma_target=RdmaTarget(here, "kv", 0, 1000))
    reply = servers.request("PUT", "/chunks?layerwise", body=encode_binary(wanted))
    answer = json.loads(reply.body)
    assert (reply.status, answer["stored"], reply.headers["x-amz-rdma-reply"]) == (200, 5, "200")
    assert [put["key"] for put in answer["chunks"]] == keys
    for index, put in enumerate(answer["chunks"]):
        body = agent.buffer[index * 200 : (index + 1) * 200].tobytes()
        assert put["etag"] == hashlib.md5(body).hexdigest()
    again = servers.request("PUT", "/chunks?layerwise", body=encode_binary(wanted))
    assert (again.status, again.code) == (409, "RequestReplayed")


def test_puts_of_chunks_that_make_no_sense_store_nothing(servers: Stack, agent: Agent) -> None:
    here = agent_id(servers, agent)
    small = {"num_layers": 1, "per_layer_chunk_bytes": 10}
    room = RdmaTarget(here, "kv", 0, 20)
    keys = ["senseless-1", "senseless-2"]
    good = chunk_puts(keys, here, **small, rdma_target=room)
    for bad, status, code, field in (
        (replace(good, rdma_target=None), 400, "InvalidDescriptor", "rdma_target"),
        (replace(good, delivery=Delivery.AUTO), 400, "InvalidDescriptor", "delivery"),
        (replace(good, rdma_target=replace(room, region_id="x")), 400, "InvalidDescriptor", "rdma_target.region_id"),
        (replace(good, rdma_target=replace(room, offset=1 << 40)), 400, "InvalidDescriptor", "rdma_target.length"),
        (replace(good, rdma_target=replace(room, agent_id="x")), 404, "NoSuchAgent", "rdma_target.agent_id"),
    ):
        reply = servers.request("PUT", "/chunks?layerwise", body=encode_binary(bad))
        assert (reply.status, reply.code, reply.named_field) == (status, code, field)
    for target, code in (("/none-such?layerwise", "NoSuchBucket"), ("/chunks/k?layerwise", "MethodNotAllowed")):
        assert servers.request("PUT", target, body=encode_binary(good)).code == code
    theirs = servers.request("PUT", "/chunks?layerwise", body=encode_binary(good), key=OTHER)
    assert theirs.code == "AccessDenied"
    with mock.patch.object(S3SigV4Auth, "payload", return_value="UNSIGNED-PAYLOAD"):
        unsigned = servers.request("PUT", "/chunks?layerwise", body=encode_binary(good))
    assert (unsigned.status, unsigned.code) == (400, "InvalidRequest")
    assert not any(is_stored(servers, key) for key in keys)


def test_a_client_forgotten_by_the_server_registers_anew(
    servers: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal for an agent that is gone comes before anything is moved, so the request may be sent again."""
    buffer = data_of(5000)
    agent_ids: list[str] = []
    agent_id_of = ClientAgent.agent_id

    def recorded(agent: ClientAgent) -> str:
        agent_ids.append(agent_id_of(agent))
        return agent_ids[-1]

    monkeypatch.setattr(ClientAgent, "agent_id", recorded)
    client.objects.put_object("before", buffer)
    assert servers.request("DELETE", f"/_objectcache/agents/{agent_ids[-1]}").status == 204
    assert client.objects.put_object("after", buffer).etag == hashlib.md5(buffer.tobytes()).hexdigest()
    with pytest.raises(ObjectCacheError) as missing:
        client.objects.get_object("no-such-object", buffer)
    assert missing.value.code is ErrorCode.NO_SUCH_KEY
    with pytest.raises(ValueError, match="not within"):
        client.objects.put_object("outside", buffer, offset=1, length=5000)
    client.release_buffer(buffer)


def test_every_path_says_where_its_time_went(servers: Stack, client: Client, buffer: np.ndarray, agent: Agent) -> None:
    """Figure 10's parts: milliseconds in the gateway, the storage side and on the way."""
    parts = re.compile(r"gateway;dur=\d+\.\d+, storage;dur=\d+\.\d+, transfer;dur=(\d+\.\d+)")
    for path in (Path.TCP, Path.DIRECT):
        put = client.objects.put_object("timed", buffer, length=2 * MIB, path=path)
        got = client.objects.get_object("timed", buffer, length=2 * MIB, path=path)
        for moved in (put, got):
            match = parts.fullmatch(moved.headers["x-amz-objectcache-timing"])
            assert match is not None
            if path is Path.DIRECT:
                assert float(match[1]) > 0
    here = agent_id(servers, agent)
    wanted = chunk_puts(["timed-chunk"], here, num_layers=1, per_layer_chunk_bytes=100)
    body = encode_binary(replace(wanted, rdma_target=RdmaTarget(here, "kv", 0, 100)))
    reply = servers.request("PUT", "/chunks?layerwise", body=body)
    assert parts.fullmatch(reply.headers["x-amz-objectcache-timing"])
    for target in (RdmaTarget(here, "kv", 0, 100), None):
        got = replace(wanted, rdma_target=target, request_id=uuid.uuid4().hex)
        reply = servers.request("POST", "/chunks?layerwise", body=encode_binary(got))
        assert parts.fullmatch(reply.headers["x-amz-objectcache-timing"])


def test_registrations_of_the_module_are_complete(servers: Stack, agent: Agent) -> None:
    """OnMissing says nothing of puts, and two regions of one agent are told apart."""
    half = len(agent.buffer) // 2
    address = int(agent.buffer.ctypes.data)
    regions = (Region("low", address, half), Region("high", address + half, half))
    body = registration_body(AgentRegistration(agent.metadata, regions, 60.0))
    both = str(json.loads(register(servers, body).body)["agent_id"])
    agent.buffer[:half], agent.buffer[half:] = 1, 2
    target = RdmaTarget(both, "high", 0, 10)
    small = {"num_layers": 1, "per_layer_chunk_bytes": 10, "on_missing": OnMissing.PREFIX}
    put = chunk_puts(["of-high"], both, **small, rdma_target=target)
    assert servers.request("PUT", "/chunks?layerwise", body=encode_binary(put)).status == 200
    assert servers.s3().get_object(Bucket="chunks", Key="of-high")["Body"].read() == b"\2" * 10
