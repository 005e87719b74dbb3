"""Bad input on the layerwise requests: a named error that says which field, and nothing moved."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from descriptors.descriptor import Descriptor, RdmaTarget
from descriptors.descriptor_codec import encode_binary, encode_json
from descriptors.layout import ChunkLayout
from descriptors.messages import AgentRegistration, Region, registration_body
from descriptors.peer_auth import sign_call
from nixl_client.transports.ucx import NixlThread
from objectcache.adapters.nixl_memory import Memory
from tests.support.chunks import make_chunks
from tests.support.requests import OTHER, OWNER, READER, Reply, request
from tests.support.servers import Stack, started
from tests.support.waiting import eventually

LAYOUT = ChunkLayout(num_layers=2, chunk_tokens=16, per_layer_chunk_bytes=3000)
N = 3
W = N * LAYOUT.chunk_bytes


@dataclass
class Agent:
    """A NIXL agent of ours with one registered buffer."""

    receiver: NixlThread
    buffer: np.ndarray
    metadata: bytes

    def registration(self, **changes: Any) -> bytes:
        region = Region("kv", int(self.buffer.ctypes.data), self.buffer.nbytes)
        fields = {"metadata": self.metadata, "regions": (region,), "lifetime_s": 60.0, **changes}
        return registration_body(AgentRegistration(**fields))


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with making_agent() as made:
        yield made


@contextlib.contextmanager
def making_agent() -> Iterator[Agent]:
    receiver = NixlThread()
    buffer = np.zeros(2 * W, dtype=np.uint8)
    registration = receiver.register(Memory(int(buffer.ctypes.data), buffer.nbytes))
    receiver.listen("keeps-the-receiver-polling", lambda _: None)
    yield Agent(receiver, buffer, receiver.metadata())
    receiver.deregister(registration)
    receiver.stop()


@pytest.fixture
def stored(servers: Stack) -> list[str]:
    keys, chunks = make_chunks(N, LAYOUT, seed=7)
    with servers.client("chunks", "http") as client:
        client.put_chunks(keys, list(chunks))
    return keys


def register(servers: Stack, body: bytes, key: tuple[str, str] = OWNER) -> Reply:
    return servers.request("POST", "/_objectcache/agents", body=body, key=key)


def agent_id(servers: Stack, agent: Agent, **changes: Any) -> str:
    reply = register(servers, agent.registration(**changes))
    assert reply.status == 200, reply.body
    return str(json.loads(reply.body)["agent_id"])


def descriptor(keys: list[str], target: RdmaTarget | None = None, **changes: Any) -> Descriptor:
    fields = {"num_layers": 2, "chunk_tokens": 16, "per_layer_chunk_bytes": 3000, "request_id": uuid.uuid4().hex}
    return Descriptor(tuple(keys), rdma_target=target, **{**fields, **changes})


def post(servers: Stack, body: bytes, key: tuple[str, str] = OWNER, **options: Any) -> Reply:
    return servers.request("POST", "/chunks?layerwise", body=body, key=key, **options)


def assert_refused(reply: Reply, status: int, code: str, field: str | None) -> None:
    assert (reply.status, reply.code, reply.named_field) == (status, code, field), reply.body


@pytest.mark.parametrize(
    ("key", "change", "status", "code"),
    [
        ((OWNER[0], "not the secret"), None, 403, "SignatureDoesNotMatch"),
        (("NOBODY", "secret"), None, 403, "InvalidAccessKeyId"),
        (READER, None, 403, "AccessDenied"),
        (OWNER, lambda headers: headers.pop("Authorization"), 403, "AccessDenied"),
        (OWNER, lambda headers: headers.update({"X-Amz-Extra": "1"}), 403, "AccessDenied"),
    ],
    ids=["wrong-secret", "unknown-key", "not-allowed", "unsigned", "added-header"],
)
def test_a_caller_without_the_right_is_told_so(
    servers: Stack, stored: list[str], key: tuple[str, str], change: Any, status: int, code: str
) -> None:
    reply = post(servers, encode_json(descriptor(stored)), key, change=change)
    assert (reply.status, reply.code) == (status, code)


def test_a_skewed_clock_is_refused(servers: Stack, stored: list[str]) -> None:
    old = datetime.now(UTC) - timedelta(minutes=20)
    with mock.patch("botocore.auth.get_current_datetime", return_value=old.replace(tzinfo=None)):
        reply = post(servers, encode_json(descriptor(stored)))
    assert_refused(reply, 403, "RequestTimeTooSkewed", "x-amz-date")


def test_the_descriptor_itself_must_be_signed(servers: Stack, stored: list[str]) -> None:
    """An unsigned body could be replaced on its way; a changed one is found."""
    body = encode_json(descriptor(stored))
    reply = post(servers, body, headers={"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}, change=unsigned_payload)
    assert reply.status in (400, 403)
    reply = post(servers, body, sent_body=body.replace(b'"num_layers":2', b'"num_layers":1'))
    assert_refused(reply, 400, "XAmzContentSHA256Mismatch", "x-amz-content-sha256")


def unsigned_payload(headers: dict[str, str]) -> None:
    headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"", "InvalidDescriptor", "body"),
        (b"{", "InvalidDescriptor", "body"),
        (b"[]", "InvalidDescriptor", "body"),
        (b"OCD", "InvalidDescriptor", "body"),
        (b"OCD\x02" + b"\0" * 40, "InvalidDescriptor", "version"),
        (b'{"version":1}', "InvalidDescriptor", "chunk_keys"),
        (b'{"version":3,"chunk_keys":["a"],"num_layers":1,"chunk_tokens":1,"per_layer_chunk_bytes":1}',
         "InvalidDescriptor", "version"),
        (b'{"version":1,"chunk_keys":[],"num_layers":1,"chunk_tokens":1,"per_layer_chunk_bytes":1}',
         "InvalidDescriptor", "chunk_keys"),
        (b'{"version":1,"chunk_keys":["a","a"],"num_layers":1,"chunk_tokens":1,"per_layer_chunk_bytes":1}',
         "InvalidDescriptor", "chunk_keys[1]"),
    ],
)  # fmt: skip
def test_malformed_descriptors_are_named(servers: Stack, body: bytes, code: str, field: str) -> None:
    assert_refused(post(servers, body), 400, code, field)


def test_an_oversized_descriptor_is_refused(servers: Stack) -> None:
    assert_refused(post(servers, b" " * ((16 << 20) + 1)), 400, "EntityTooLarge", "content-length")


def test_a_truncated_descriptor_is_refused(servers: Stack, stored: list[str]) -> None:
    whole = encode_binary(descriptor(stored))
    for cut in (10, 30, len(whole) - 1):
        assert post(servers, whole[:cut]).code == "InvalidDescriptor"


def test_missing_and_odd_chunks_are_404_with_their_index(servers: Stack, stored: list[str]) -> None:
    servers.s3().put_object(Bucket="chunks", Key="odd-size", Body=b"x")
    reply = post(servers, encode_json(descriptor([stored[0], "never-stored", stored[1]])))
    assert_refused(reply, 404, "NoSuchChunk", "chunk_keys[1]")
    assert b"<ChunkIndex>1</ChunkIndex>" in reply.body
    reply = post(servers, encode_json(descriptor([*stored, "odd-size"])))
    assert_refused(reply, 404, "ChunkSizeMismatch", "chunk_keys[3]")
    reply = servers.request("POST", "/no-such-bucket?layerwise", body=encode_json(descriptor(stored)))
    assert_refused(reply, 404, "NoSuchBucket", "bucket")


def test_targets_must_lie_inside_a_region_of_the_callers_live_agent(
    servers: Stack, stored: list[str], agent: Agent
) -> None:
    """Every way a target can be wrong, with the field, and not a byte written."""
    mine = agent_id(servers, agent)
    size = agent.buffer.nbytes
    cases = [
        (RdmaTarget("nobody", "kv", 0, W), 404, "NoSuchAgent", "rdma_target.agent_id"),
        (RdmaTarget(mine, "other", 0, W), 400, "InvalidDescriptor", "rdma_target.region_id"),
        (RdmaTarget(mine, "kv", size - W + 1, W), 400, "InvalidDescriptor", "rdma_target.length"),
        (RdmaTarget(mine, "kv", 0, size + 1), 400, "InvalidDescriptor", "rdma_target.length"),
    ]
    for target, status, code, field in cases:
        assert_refused(post(servers, encode_json(descriptor(stored, target))), status, code, field)
    small = encode_json(descriptor(stored, RdmaTarget(mine, "kv", 0, W))).replace(
        f'"length":{W}'.encode(), b'"length":9'
    )
    assert_refused(post(servers, small), 400, "InvalidDescriptor", "rdma_target.length")
    no_id = encode_json(descriptor(stored, RdmaTarget(mine, "kv", 0, W)))
    no_id = json.dumps({k: v for k, v in json.loads(no_id).items() if k != "request_id"}).encode()
    assert_refused(post(servers, no_id), 400, "InvalidDescriptor", "request_id")
    theirs = post(servers, encode_json(descriptor(stored, RdmaTarget(mine, "kv", 0, W))), OTHER)
    assert_refused(theirs, 403, "AccessDenied", "rdma_target.agent_id")
    assert not agent.buffer.any()
    assert servers.request("DELETE", f"/_objectcache/agents/{mine}").status == 204
    gone = post(servers, encode_json(descriptor(stored, RdmaTarget(mine, "kv", 0, W))))
    assert_refused(gone, 404, "NoSuchAgent", "rdma_target.agent_id")


@pytest.mark.slow
def test_an_agents_time_runs_out_unless_renewed(servers: Stack, stored: list[str], agent: Agent) -> None:
    mine = agent_id(servers, agent, lifetime_s=0.4)

    def asked() -> Reply:
        return post(servers, encode_json(descriptor(stored, RdmaTarget(mine, "kv", 0, W))))

    assert eventually(lambda: asked().status != 200)
    agent.buffer[:] = 0
    reply = asked()
    assert (reply.status, reply.code) in [(400, "ExpiredToken"), (404, "NoSuchAgent")]
    assert reply.named_field == "rdma_target.agent_id"
    mine = agent_id(servers, agent, lifetime_s=2.0)
    first_ends_s = time.monotonic() + 2.0
    renewed = servers.request("POST", f"/_objectcache/agents/{mine}", body=b'{"lifetime_s": 60}')
    assert json.loads(renewed.body)["expires_at"] > time.time() + 50
    assert eventually(lambda: time.monotonic() > first_ends_s)
    assert asked().status == 200
    assert agent.buffer.any()
    agent.buffer[:] = 0
    for method, key, code in [("POST", OTHER, "AccessDenied"), ("DELETE", OTHER, "AccessDenied")]:
        body = b'{"lifetime_s": 60}' if method == "POST" else b""
        assert servers.request(method, f"/_objectcache/agents/{mine}", body=body, key=key).code == code
    assert servers.request("DELETE", f"/_objectcache/agents/{mine}").status == 204
    assert servers.request("DELETE", f"/_objectcache/agents/{mine}").code == "NoSuchAgent"


def test_an_agent_name_belongs_to_the_key_that_took_it(servers: Stack, stored: list[str], agent: Agent) -> None:
    """Loading another key's metadata of that name would redirect the owner's writes."""
    mine = agent_id(servers, agent)
    assert_refused(register(servers, agent.registration(), OTHER), 409, "AgentConflict", "metadata")
    assert post(servers, encode_json(descriptor(stored, RdmaTarget(mine, "kv", 0, W)))).status == 200
    agent.buffer[:] = 0
    servers.request("DELETE", f"/_objectcache/agents/{mine}")


@pytest.mark.slow
def test_registrations_are_checked(servers: Stack, agent: Agent) -> None:
    address, size = int(agent.buffer.ctypes.data), agent.buffer.nbytes

    def body(**changes: Any) -> bytes:
        fields = json.loads(agent.registration())
        fields.update(changes)
        return json.dumps(fields).encode()

    def region(**changes: Any) -> list[dict[str, Any]]:
        return [{"region_id": "kv", "address": address, "length": size, "device": "cpu", **changes}]

    not_a_uuid = agent.metadata.replace(b"Agent$", b"Agent\x03", 1)
    renamed = bytearray(agent.metadata)
    renamed[24:60] = b"x" * 36
    cases = [
        (body(metadata="!!"), "metadata"),
        (body(metadata=base64.b64encode(b"garbage").decode()), "metadata"),
        (body(metadata=base64.b64encode(not_a_uuid).decode()), "metadata"),
        (body(metadata=base64.b64encode(bytes(renamed)).decode()), "metadata"),
        (body(metadata=base64.b64encode(agent.metadata[:200]).decode()), "metadata"),
        (body(regions=[]), "regions"),
        (body(regions=region() * 2), "regions[1].region_id"),
        (body(regions=region(device="tpu")), "regions[0].device"),
        (body(regions=region(length=0)), "regions.0.length"),
        (body(regions=region(length=size + (1 << 30))), "metadata"),
        (body(regions=region(address=4096)), "metadata"),
        (body(lifetime_s=0), "lifetime_s"),
        (body(lifetime_s=10**9), "lifetime_s"),
        (body(extra=1), "extra"),
        (b"not json", "body"),
    ]
    for sent, field in cases:
        reply = register(servers, sent)
        assert (reply.status, reply.named_field) == (400, field), (field, reply.body)


@pytest.mark.slow
def test_mutated_metadata_is_refused_or_harmless(servers: Stack, stored: list[str], agent: Agent) -> None:
    """Whatever bytes arrive, the server answers and goes on serving others. (NIXL keeps half of what it half loaded, so
    the name itself may be spoilt: the mutations have one of their own.)
    """
    with making_agent() as spoilt:
        send_mutations(servers, spoilt)
    mine = agent_id(servers, agent)
    assert post(servers, encode_json(descriptor(stored, RdmaTarget(mine, "kv", 0, W)))).status == 200
    agent.buffer[:] = 0
    servers.request("DELETE", f"/_objectcache/agents/{mine}")


def send_mutations(servers: Stack, agent: Agent) -> None:
    rng = np.random.default_rng(3)
    for _ in range(25):
        mutated = bytearray(agent.metadata)
        for at in rng.integers(0, len(mutated), 4):
            mutated[at] = int(rng.integers(0, 256))
        reply = register(servers, agent.registration(metadata=bytes(mutated)))
        assert reply.status in (200, 400), reply.body
        if reply.status == 200:
            servers.request("DELETE", f"/_objectcache/agents/{json.loads(reply.body)['agent_id']}")
    for size in (0, 1, 100, 5000):
        assert register(servers, agent.registration(metadata=os.urandom(size))).status == 400


def test_a_replayed_descriptor_is_refused(servers: Stack, stored: list[str], agent: Agent) -> None:
    """One signed request, one write into the buffer; another key may use the same id."""
    mine = agent_id(servers, agent)
    once = descriptor(stored, RdmaTarget(mine, "kv", 0, W))
    body = encode_binary(once)
    assert post(servers, body).status == 200
    assert agent.buffer.any()
    agent.buffer[:] = 0
    assert_refused(post(servers, body), 409, "RequestReplayed", "request_id")
    assert not agent.buffer.any()
    plain = descriptor(stored, request_id=once.request_id)
    assert post(servers, encode_json(plain), OTHER).status == 200
    servers.request("DELETE", f"/_objectcache/agents/{mine}")


def test_an_id_cancelled_before_it_arrives_is_refused_when_it_does(servers: Stack, stored: list[str]) -> None:
    """After the answer to DELETE nothing is written on the request's behalf, not even by a late request."""
    late = descriptor(stored)
    assert servers.request("DELETE", f"/_objectcache/requests/{late.request_id}").status == 204
    assert servers.request("DELETE", f"/_objectcache/requests/{late.request_id}").status == 204
    assert_refused(post(servers, encode_json(late)), 409, "RequestReplayed", "request_id")
    assert servers.request("DELETE", "/_objectcache/requests/short").named_field == "request_id"


def test_calls_past_the_gateway_need_the_peer_secret(tmp_path: Path) -> None:
    """A storage server on loopback answers its gateways and nobody else."""
    (tmp_path / "d").mkdir()
    with started("storage-server", "--data", str(tmp_path / "d"), "--listen", "127.0.0.1:0") as (url, _):
        secret = (tmp_path / "d" / "peer-secret").read_text().strip().encode()
        call = base64.urlsafe_b64encode(b'{"access_key": "OWNER"}').decode()
        empty = hashlib.sha256(b"").hexdigest()
        now = time.time()
        for auth, status in [
            (sign_call(secret, "objects.list_buckets", call, empty, now), 200),
            (sign_call(secret, "objects.list_buckets", call, empty, now - 120), 403),
            (sign_call(secret, "objects.list_buckets", call, empty, now + 600), 403),
            (sign_call(secret, "objects.delete_object", call, empty, now), 403),
            (sign_call(b"x" * 64, "objects.list_buckets", call, empty, now), 403),
            ("v1 9999999999 x y", 403),
            ("", 403),
        ]:
            headers = {"x-objectcache-call": call, "x-objectcache-peer-auth": auth}
            assert request(url, "POST", "/v1/objects.list_buckets", headers=headers).status == status
