"""JSON bodies beside the descriptor: prefix lookup, agent registration and renewal, and their answers.

pydantic checks what arrives; the rest of the code sees frozen values. Refusals name the field
(docs/reference/protocol.md).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from descriptors.cluster import MEMBERS_MAX
from descriptors.descriptor import (
    ACCEPTED_CODECS_MAX,
    ADDRESS_MAX,
    CHUNK_COUNT_MAX,
    DELIVERY_BYTES_MAX,
    OBJECT_KEY_BYTES_MAX,
    Accept,
    key_bytes,
    require_name,
)
from descriptors.descriptor_codec import accept_fields, parse_accept
from descriptors.errors import CallerError, ErrorCode
from descriptors.json_body import parse_body
from descriptors.presence import Presence, leading_count, parse_presence, presence_text
from descriptors.recompute import Advice, AdviceRequest
from descriptors.recompute_json import advice_fields, advice_from_fields, compute_fields, parse_compute
from descriptors.tiers import TierRuns, parse_tiers, tier_fields

LEASE_S_MAX = 3_600
AGENT_LIFETIME_S_MAX = 86_400
AGENT_REGIONS_MAX = 256
AGENT_METADATA_BYTES_MAX = 1 << 20
DOWNLINK_MIN, DOWNLINK_MAX = 1e6, 1e13
"""In bytes/s: a delivery must not be drawn out at will."""

_DEVICE = re.compile(r"(cpu|cuda:\d{1,3})\Z")


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """The question how many of `chunk_keys`, from the first, are stored; with `each`, which of them are. `lease_s` > 0
    asks the server to keep the chunks for that many seconds, also in a bounded cache. `compute` asks for advice on
    loading. Chunks that are stored encoded count as far as `accept` takes them. `tiers` asks where the chunks lie.
    """

    chunk_keys: tuple[str, ...]
    lease_s: float = 0.0
    compute: AdviceRequest | None = None
    accept: Accept | None = None
    tiers: bool = False
    each: bool = False


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The number of keys, from the first, that are stored without a gap; advice, tiers, and which keys are stored, if
    they were asked for. A partial answer counts what is cached: the service behind the cache, which may have more, did
    not answer.
    """

    matched: int
    advice: Advice | None = None
    is_partial: bool = False
    tiers: TierRuns | None = None
    present: Presence | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """A registered buffer of an agent: address and length in bytes in the client's address space."""

    region_id: str
    address: int
    length: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class AgentRegistration:
    """An agent to register for `lifetime_s` seconds, with the regions that descriptors may name. Exactly one is given
    of `metadata`, of a NIXL agent, `shm_ticket`, of a connection over which shared memory was handed in, and
    `shm_tickets`, of connections to several members of a cluster, by their ids. `host_id`, where given, tells a
    server whether it is on the same host; only speed depends on it.

    `downlink_bytes_per_s`, where given, is what the link into its memory carries: servers write there no faster.

    In a cluster an agent that is registered already is made known to more members, under its `agent_id`: to those that
    `shm_tickets` or `members` name.
    """

    metadata: bytes
    regions: tuple[Region, ...]
    lifetime_s: float
    shm_ticket: str | None = None
    host_id: str = ""
    shm_tickets: Mapping[str, str] = field(default_factory=dict)
    agent_id: str | None = None
    members: tuple[str, ...] = ()
    downlink_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class AgentRenewal:
    """A longer lease for a registered agent. When the agent's memory has changed, also its regions, with new metadata
    where it is a NIXL agent.
    """

    lifetime_s: float
    metadata: bytes | None = None
    regions: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentLease:
    """The answer to a registration: the agent id for descriptors, and the end of the lease (Unix seconds). In a cluster
    also the ids of members: `members` know the agent, `unknown_to` do not, since they have joined or restarted, and
    `unreached` could not be told.
    """

    agent_id: str
    expires_at: float
    members: tuple[str, ...] = ()
    unknown_to: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """The scheduler's state on a storage server. Without a link rate nothing is paced or counted."""

    policy: str
    rates: str
    link_bytes_per_s: float | None
    margin_bytes_per_s: float
    epoch: int
    layerwise_active: int
    layerwise_waiting: int
    chunkwise_active: int
    chunkwise_waiting: int
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class Transports:
    """The transports besides http that a server offers. `shm_socket` is the abstract Unix socket at which memory is
    handed in. It can be reached from the server's own host only; a client that reaches it knows that it is on that
    host. A cluster has `shm_sockets` instead, by the ids of its members, where all of them offer shm.
    """

    ucx: bool
    shm_socket: str | None
    shm_sockets: Mapping[str, str] = field(default_factory=dict)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _LookupModel(_Model):
    chunk_keys: Annotated[list[str], Field(min_length=1, max_length=CHUNK_COUNT_MAX, fail_fast=True)]
    lease_s: Annotated[float, Field(ge=0, le=LEASE_S_MAX, allow_inf_nan=False)] = 0.0
    compute: dict[str, object] | None = None
    accept: Annotated[list[str], Field(max_length=ACCEPTED_CODECS_MAX, fail_fast=True)] | None = None
    element: str | None = None
    max_error: float | None = None
    max_loss: float | None = None
    tiers: bool = False
    each: bool = False


class _RegionModel(_Model):
    region_id: str
    address: Annotated[int, Field(ge=0, le=ADDRESS_MAX)]
    length: Annotated[int, Field(ge=1, le=ADDRESS_MAX)]
    device: str = "cpu"


_Ticket = Annotated[str, Field(min_length=1, max_length=64)]
_Lifetime = Annotated[float, Field(gt=0, le=AGENT_LIFETIME_S_MAX, allow_inf_nan=False)]


class _RegistrationModel(_Model):
    metadata: str | None = None
    shm_ticket: _Ticket | None = None
    shm_tickets: Annotated[dict[str, _Ticket], Field(max_length=MEMBERS_MAX)] = {}
    agent_id: str | None = None
    members: Annotated[list[str], Field(max_length=MEMBERS_MAX)] = []
    host_id: Annotated[str, Field(max_length=64)] = ""
    regions: Annotated[list[_RegionModel], Field(min_length=1, max_length=AGENT_REGIONS_MAX, fail_fast=True)]
    lifetime_s: _Lifetime
    downlink_bytes_per_s: Annotated[float, Field(ge=DOWNLINK_MIN, le=DOWNLINK_MAX, allow_inf_nan=False)] | None = None


class _RenewalModel(_Model):
    lifetime_s: _Lifetime
    metadata: str | None = None
    regions: Annotated[list[_RegionModel], Field(max_length=AGENT_REGIONS_MAX, fail_fast=True)] = []


def parse_lookup(body: bytes) -> LookupRequest:
    """A lookup's body. Raises CallerError(InvalidArgument), which names the field."""
    model = parse_body(_LookupModel, body, _refuse)
    if len(set(model.chunk_keys)) != len(model.chunk_keys):
        first = {key: index for index, key in reversed(list(enumerate(model.chunk_keys)))}
        twice = next(index for index, key in enumerate(model.chunk_keys) if first[key] != index)
        raise _refuse(f"chunk_keys[{twice}]", "appears twice")  # each would be looked up, with all that it has
    for index, key in enumerate(model.chunk_keys):
        if not 1 <= key_bytes(key) <= OBJECT_KEY_BYTES_MAX:
            raise _refuse(f"chunk_keys[{index}]", f"must be a key of 1 to {OBJECT_KEY_BYTES_MAX} bytes of UTF-8")
    if model.each and (model.tiers or model.compute is not None):
        raise _refuse("each", "asks about single chunks: tiers and compute are about a prefix")
    compute = None if model.compute is None else parse_compute(model.compute, _refuse)
    if compute is not None:
        delivery_bytes = compute.layout.delivery_bytes(len(model.chunk_keys))
        if delivery_bytes > DELIVERY_BYTES_MAX:
            problem = f"makes N*L*S {delivery_bytes} bytes, at most {DELIVERY_BYTES_MAX}"
            raise _refuse("compute.per_layer_chunk_bytes", problem)
    try:
        accept = parse_accept(model.accept, model.element, model.max_error, model.max_loss)
    except CallerError as error:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, error.message, field=error.field) from None
    return LookupRequest(
        chunk_keys=tuple(model.chunk_keys),
        lease_s=model.lease_s,
        compute=compute,
        accept=accept,
        tiers=model.tiers,
        each=model.each,
    )


def parse_registration(body: bytes) -> AgentRegistration:
    """A registration's body. Raises CallerError(InvalidArgument), which names the field."""
    model = parse_body(_RegistrationModel, body, _refuse)
    if [model.metadata is None, model.shm_ticket is None, not model.shm_tickets].count(False) != 1:
        raise _refuse("metadata", "or shm_ticket or shm_tickets is needed, and only one of them")
    if model.agent_id is not None:
        require_name(model.agent_id, "agent_id")
    return AgentRegistration(
        metadata=_metadata(model.metadata) or b"",
        regions=_regions(model.regions),
        lifetime_s=model.lifetime_s,
        shm_ticket=model.shm_ticket,
        host_id=model.host_id,
        shm_tickets=model.shm_tickets,
        agent_id=model.agent_id,
        members=tuple(model.members),
        downlink_bytes_per_s=model.downlink_bytes_per_s,
    )


def parse_renewal(body: bytes) -> AgentRenewal:
    """A renewal's body. New metadata never comes without regions. Raises CallerError(InvalidArgument)
    with the field.
    """
    model = parse_body(_RenewalModel, body, _refuse)
    if model.metadata is not None and not model.regions:
        raise _refuse("regions", "and metadata are renewed together or not at all")
    return AgentRenewal(model.lifetime_s, _metadata(model.metadata), _regions(model.regions))


def lookup_body(request: LookupRequest) -> bytes:
    """The JSON `parse_lookup` reads."""
    fields: dict[str, object] = {"chunk_keys": list(request.chunk_keys), "lease_s": request.lease_s}
    if request.compute is not None:
        fields["compute"] = compute_fields(request.compute)
    if request.accept is not None:
        fields |= accept_fields(request.accept)
    if request.tiers:
        fields["tiers"] = True
    if request.each:
        fields["each"] = True
    return _dump(fields)


def lookup_answer_body(answer: LookupAnswer) -> bytes:
    """The JSON `parse_lookup_answer` reads."""
    fields: dict[str, object] = {"matched": answer.matched}
    if answer.advice is not None:
        fields["advice"] = advice_fields(answer.advice)
    if answer.is_partial:
        fields["partial"] = True
    if answer.tiers is not None:
        fields["tiers"] = tier_fields(answer.tiers)
    if answer.present is not None:
        fields |= {"keys": len(answer.present), "present": presence_text(answer.present)}
    return json.dumps(fields).encode()


def parse_lookup_answer(body: bytes) -> LookupAnswer:
    """A lookup's answer. Unknown fields are ignored. Raises KeyError and ValueError for anything else."""
    fields = json.loads(body)
    advice, matched, tiers = fields.get("advice"), int(fields["matched"]), fields.get("tiers")
    read_advice = None if advice is None else advice_from_fields(advice)
    read_tiers = None if tiers is None else parse_tiers(tiers, matched)
    present = None
    if "present" in fields:
        present = parse_presence(fields["present"], _key_count(fields["keys"]))
        if leading_count(present) != matched:
            raise ValueError("matched and present do not agree")
    return LookupAnswer(matched, read_advice, fields.get("partial") is True, read_tiers, present)


def _key_count(count: object) -> int:
    if type(count) is not int or not 1 <= count <= CHUNK_COUNT_MAX:
        raise ValueError("keys is no count of keys")
    return count


def registration_body(request: AgentRegistration) -> bytes:
    """The JSON `parse_registration` reads."""
    fields: dict[str, object] = {
        "regions": [_region_fields(region) for region in request.regions],
        "lifetime_s": request.lifetime_s,
    }
    if request.agent_id is not None:
        fields["agent_id"] = request.agent_id
    if request.members:
        fields["members"] = list(request.members)
    if request.shm_tickets:
        fields["shm_tickets"] = dict(request.shm_tickets)
    elif request.shm_ticket is not None:
        fields["shm_ticket"] = request.shm_ticket
    else:
        fields["metadata"] = base64.b64encode(request.metadata).decode()
    if request.host_id:
        fields["host_id"] = request.host_id
    if request.downlink_bytes_per_s is not None:
        fields["downlink_bytes_per_s"] = request.downlink_bytes_per_s
    return _dump(fields)


def renewal_body(request: AgentRenewal) -> bytes:
    """The JSON `parse_renewal` reads."""
    fields: dict[str, object] = {"lifetime_s": request.lifetime_s}
    if request.metadata is not None:
        fields["metadata"] = base64.b64encode(request.metadata).decode()
    if request.regions:
        fields["regions"] = [_region_fields(region) for region in request.regions]
    return _dump(fields)


def _region_fields(region: Region) -> dict[str, object]:
    return {
        "region_id": region.region_id,
        "address": region.address,
        "length": region.length,
        "device": region.device,
    }


def _dump(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _regions(models: list[_RegionModel]) -> tuple[Region, ...]:
    regions = []
    seen: set[str] = set()
    for index, model in enumerate(models):
        require_name(model.region_id, f"regions[{index}].region_id")
        if model.region_id in seen:
            raise _refuse(f"regions[{index}].region_id", "appears twice")
        if not _DEVICE.match(model.device):
            raise _refuse(f"regions[{index}].device", "must be cpu or cuda:N")
        if model.address + model.length > ADDRESS_MAX:
            raise _refuse(f"regions[{index}].length", "passes the end of the address space")
        seen.add(model.region_id)
        regions.append(Region(model.region_id, model.address, model.length, model.device))
    return tuple(regions)


def _metadata(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        metadata = base64.b64decode(text)
    except (binascii.Error, ValueError):
        raise _refuse("metadata", "is not base64") from None
    if not 1 <= len(metadata) <= AGENT_METADATA_BYTES_MAX:
        raise _refuse("metadata", f"must be 1 to {AGENT_METADATA_BYTES_MAX} bytes, not {len(metadata)}")
    return metadata


def _refuse(field: str, problem: str) -> CallerError:
    return CallerError(ErrorCode.INVALID_ARGUMENT, f"{field} {problem}", field=field)
