"""The commands and replies between the storage server and its ucx process: lines of JSON over a socket pair. Pure.

The ucx process maps only the areas that it was given, so the server's memory is named by area and offset. Any UCX peer
may have written into the process that replies. So the server believes a reply only in how a command ended.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from objectcache.adapters.nixl_memory import Memory
from storage_server.planning.area_span import AreaSpan

REPLY_BYTES_MAX = 16_384
REASON_CHARACTERS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class AddPeer:
    """Load a peer's metadata, check that it is of this peer and offers this memory, and open the connection."""

    name: str
    metadata: bytes
    offered: tuple[Memory, ...]


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """Disconnect a peer; its transfers in flight fail."""

    name: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a notice. There is no reply, because any notice may be lost."""

    name: str
    message: bytes


@dataclass(frozen=True, slots=True)
class WriteGroup:
    """The group of payloads that a write belongs to. The peer gets `notice` when the write that `is_last` of the group
    has been posted, all writes of the group have ended well, and no write of the flight has failed.
    """

    flight: int
    index: int
    is_last: bool
    notice: bytes


@dataclass(frozen=True, slots=True)
class WriteSpans:
    """Write areas' spans, one after the other, into the peer's memory, one target after the other."""

    name: str
    spans: tuple[AreaSpan, ...]
    targets: tuple[Memory, ...]
    group: WriteGroup | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Read the peer's memory, one span after the other, into a span of an area."""

    name: str
    sources: tuple[Memory, ...]
    span: AreaSpan


@dataclass(frozen=True, slots=True)
class EndFlight:
    """Forget a flight, which will get no more writes. There is no reply."""

    flight: int


Command = AddPeer | RemovePeer | Notify | WriteSpans | Read | EndFlight


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of command `number`: `counted` bytes were moved, or the command failed for `reason`."""

    number: int
    counted: int = 0
    reason: str | None = None
    is_peer_lost: bool = False


READY = Reply(0)
"""The number of the first reply: the process can take commands or, with a reason, cannot."""


def encode_command(number: int, command: Command) -> bytes:
    """The line that `decode_command` reads."""
    match command:
        case AddPeer(name, metadata, offered):
            fields: list[Any] = ["add", name, base64.b64encode(metadata).decode(), [_memory(one) for one in offered]]
        case RemovePeer(name):
            fields = ["remove", name]
        case Notify(name, message):
            fields = ["notify", name, message.hex()]
        case WriteSpans(name, spans, targets, group):
            wanted = [_memory(target) for target in targets]
            fields = ["write", name, [_area_span(span) for span in spans], wanted, _group(group)]
        case Read(name, sources, span):
            fields = ["read", name, [_memory(source) for source in sources], _area_span(span)]
        case EndFlight(flight):
            fields = ["end", flight]
    return json.dumps([number, *fields], separators=(",", ":")).encode() + b"\n"


def decode_command(line: bytes) -> tuple[int, Command]:
    """A command and its number. The line is not checked, because the process trusts the server."""
    number, kind, *fields = json.loads(line)
    match kind, fields:
        case "add", [name, metadata, offered]:
            return number, AddPeer(name, base64.b64decode(metadata), tuple(Memory(*one) for one in offered))
        case "remove", [name]:
            return number, RemovePeer(name)
        case "notify", [name, message]:
            return number, Notify(name, bytes.fromhex(message))
        case "write", [name, spans, targets, group]:
            belongs = None if group is None else WriteGroup(group[0], group[1], group[2], bytes.fromhex(group[3]))
            places = tuple(AreaSpan(*span) for span in spans)
            return number, WriteSpans(name, places, tuple(Memory(*target) for target in targets), belongs)
        case "read", [name, sources, span]:
            return number, Read(name, tuple(Memory(*source) for source in sources), AreaSpan(*span))
        case "end", [flight]:
            return number, EndFlight(flight)
    raise ValueError(f"unknown command {kind!r}")


def encode_reply(reply: Reply) -> bytes:
    """The line that `decode_reply` reads."""
    reason = None if reply.reason is None else reply.reason[:REASON_CHARACTERS_MAX]
    return json.dumps([reply.number, reply.counted, reason, reply.is_peer_lost]).encode() + b"\n"


def decode_reply(line: bytes) -> Reply:
    """The reply in a line. Raises ValueError for anything else, since a UCX peer may control the process by now."""
    try:
        fields = json.loads(line)
    except RecursionError:
        fields = None
    if not isinstance(fields, list) or [type(field) for field in fields] not in (
        [int, int, str, bool],
        [int, int, type(None), bool],
    ):
        raise ValueError("not a reply")
    return Reply(*fields)


def _memory(memory: Memory) -> list[Any]:
    return [memory.address, memory.nbytes, memory.device]


def _area_span(span: AreaSpan) -> list[int]:
    return [span.area, span.offset, span.nbytes]


def _group(group: WriteGroup | None) -> list[Any] | None:
    return None if group is None else [group.flight, group.index, group.is_last, group.notice.hex()]
