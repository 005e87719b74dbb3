"""The requests that S3 does not have: descriptor GET, prefix lookup, agents, cancel (docs/reference/protocol.md)."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict

from aiohttp import web

from descriptors.descriptor import DESCRIPTOR_BYTES_MAX, Descriptor, invalid
from descriptors.descriptor_codec import decode_descriptor
from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import (
    CHUNKS_HEADER,
    DESCRIPTOR_HEADER,
    EPOCH_HEADER,
    FORMS_HEADER,
    MODE_HEADER,
    RATE_HEADER,
    RDMA_BYTES_HEADER,
    RDMA_REPLY_HEADER,
    UNSETTLED_HEADER,
    WRITERS_HEADER,
)
from descriptors.layer_forms import forms_text
from descriptors.messages import (
    AGENT_METADATA_BYTES_MAX,
    AgentLease,
    lookup_answer_body,
    parse_lookup,
    parse_registration,
    parse_renewal,
)
from descriptors.storage_api import DeliveryStart
from descriptors.tracing import REQUEST_ID_HEADER, TIMING_HEADER, timing_header
from gateway.call import Call
from objectcache.adapters.response_sink import ResponseSink

KEY_BYTES = 80
"""A key takes so many bytes of memory besides its characters, with its places in a tuple and in tables."""


async def layerwise(call: Call) -> web.StreamResponse:
    """POST /{bucket}?layerwise with the descriptor in the body."""
    _refuse_range(call)
    return await _deliver(call, await call.document(decode_descriptor, DESCRIPTOR_BYTES_MAX))


async def layerwise_header(call: Call) -> web.StreamResponse:
    """GET /{bucket}/{first key} with the descriptor in a header."""
    _refuse_range(call)
    try:
        text = call.request.headers[DESCRIPTOR_HEADER]
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise invalid(DESCRIPTOR_HEADER, "is not base64url") from None
    descriptor = decode_descriptor(data)
    if descriptor.chunk_keys[0] != call.request.key:
        raise invalid("chunk_keys[0]", "must be the key in the request's path")
    return await _deliver(call, descriptor)


async def lookup(call: Call) -> web.StreamResponse:
    """POST /{bucket}?lookup: how many of these keys, from the first, are stored, and whether to load them."""
    request = await call.document(parse_lookup, DESCRIPTOR_BYTES_MAX)
    with _held_keys(call, request.chunk_keys):
        answer = await call.storage.prefixes.lookup(call.access_key, call.request.bucket, request)
    call.trace.facts = {"chunks": len(request.chunk_keys), "matched": answer.matched}
    return web.Response(body=lookup_answer_body(answer), content_type="application/json")


async def transports(call: Call) -> web.StreamResponse:
    """GET /_objectcache/transports: the transports that the storage server offers."""
    offered = await call.storage.status.transports(call.access_key)
    of_members = {"shm_sockets": dict(offered.shm_sockets)} if offered.shm_sockets else {}
    return _json({"ucx": offered.ucx, "shm_socket": offered.shm_socket, **of_members})


async def scheduler(call: Call) -> web.StreamResponse:
    """GET /_objectcache/scheduler: the scheduler's settings, and the deliveries under way."""
    return _json(asdict(await call.storage.status.scheduler(call.access_key)))


async def register_agent(call: Call) -> web.StreamResponse:
    registration = await call.document(parse_registration, 2 * AGENT_METADATA_BYTES_MAX)
    return _lease(await call.storage.agents.register_agent(call.access_key, registration))


async def renew_agent(call: Call) -> web.StreamResponse:
    renewal = await call.document(parse_renewal, 2 * AGENT_METADATA_BYTES_MAX)
    return _lease(await call.storage.agents.renew_agent(call.access_key, _last_segment(call), renewal))


async def delete_agent(call: Call) -> web.StreamResponse:
    """Delete an agent. Answers when every write into the agent's memory has drained."""
    await call.storage.agents.delete_agent(call.access_key, _last_segment(call), _member_ids(call))
    return web.Response(status=204)


async def cancel_request(call: Call) -> web.StreamResponse:
    """Cancel a request. Answers when every posted write has drained. An unknown id is marked as used."""
    await call.storage.prefixes.cancel(call.access_key, _last_segment(call), _member_ids(call))
    return web.Response(status=204)


def _held_keys(call: Call, keys: Sequence[str]) -> AbstractContextManager[None]:
    return call.held(sum(map(len, keys)) + KEY_BYTES * len(keys))


async def _deliver(call: Call, descriptor: Descriptor) -> web.StreamResponse:
    trace = call.trace
    trace.name(descriptor.request_id)

    def head(start: DeliveryStart) -> dict[str, str]:
        trace.name(start.request_id)
        return {**_headers(start), TIMING_HEADER: timing_header(trace.timing())}

    sink = ResponseSink(call.http, head)
    with _held_keys(call, descriptor.chunk_keys):
        outcome = await call.storage.prefixes.deliver(call.access_key, call.request.bucket, descriptor, sink)
    trace.moved(outcome.moved)
    trace.facts = {
        "transport": "http" if descriptor.rdma_target is None else "memory",
        "mode": outcome.start.mode.value,
        "chunks": len(descriptor.chunk_keys),
        "matched": outcome.start.chunk_count,
    }
    if sink.response is not None:
        await sink.response.write_eof()
        return sink.response
    headers = _headers(outcome.start)
    headers[RDMA_REPLY_HEADER] = "200"
    headers[RDMA_BYTES_HEADER] = str(outcome.transferred_bytes)
    if outcome.given_up:
        headers[UNSETTLED_HEADER] = ",".join(outcome.given_up)
    return web.Response(headers=headers)


def _headers(start: DeliveryStart) -> dict[str, str]:
    headers = {
        MODE_HEADER: start.mode.value,
        CHUNKS_HEADER: str(start.chunk_count),
        REQUEST_ID_HEADER: start.request_id,
    }
    if start.grant.epoch:
        headers[RATE_HEADER] = str(start.grant.rate_bytes_per_s)
        headers[EPOCH_HEADER] = str(start.grant.epoch)
    if start.forms is not None:
        headers[FORMS_HEADER] = forms_text(start.forms)
    return headers


def _refuse_range(call: Call) -> None:
    if "range" in call.request.headers:
        raise CallerError(ErrorCode.INVALID_REQUEST, "Range does not go with a descriptor", field="range")


def _member_ids(call: Call) -> tuple[str, ...]:
    """The storage servers that the client says must answer."""
    return tuple(name for name in call.request.headers.get(WRITERS_HEADER, "").split(",") if name)


def _last_segment(call: Call) -> str:
    return call.request.key.rpartition("/")[2]


def _lease(lease: AgentLease) -> web.Response:
    of_cluster = {"members": lease.members, "unknown_to": lease.unknown_to, "unreached": lease.unreached}
    said = {name: list(members) for name, members in of_cluster.items() if members}
    return _json({"agent_id": lease.agent_id, "expires_at": lease.expires_at, **said})


def _json(fields: dict[str, object]) -> web.Response:
    return web.Response(body=json.dumps(fields).encode(), content_type="application/json")
