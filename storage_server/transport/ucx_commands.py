"""What the storage server and its ucx process say to each other: lines of JSON over a socket pair.

The process has no memory of the server's but the areas it was given, so our memory is named by area and offset. Replies
come from a process that every UCX peer may have written into: nothing in them is believed but how a command ended.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapters.nixl_agent import Memory

REPLY_BYTES_MAX = 16_384
REASON_CHARACTERS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Place:
    """`nbytes` bytes from `offset` of an area."""

    area: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AddPeer:
    """Load a peer's metadata, check that it is the one named and offers this memory, greet it."""

    name: str
    metadata: bytes
    offered: tuple[Memory, ...]


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """Disconnect a peer; its transfers in flight fail."""

    name: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a notice. It is not answered: any notice may be lost."""

    name: str
    message: bytes


@dataclass(frozen=True, slots=True)
class Group:
    """What a write belongs to: when the `is_last` of a group has been posted and all of the group have ended well, as
    all of the flight so far, the peer is sent `notice`.
    """

    flight: int
    index: int
    is_last: bool
    notice: bytes


@dataclass(frozen=True, slots=True)
class Write:
    """Write places, one after the other, into the peer's memory."""

    name: str
    places: tuple[Place, ...]
    target: Memory
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Read the peer's memory, one span after the other, into a place."""

    name: str
    sources: tuple[Memory, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class EndFlight:
    """Nothing more of this flight will come. It is not answered."""

    flight: int


Command = AddPeer | RemovePeer | Notify | Write | Read | EndFlight


@dataclass(frozen=True, slots=True)
class Reply:
    """How command `number` ended: `counted` bytes were moved, or it failed for `reason`."""

    number: int
    counted: int = 0
    reason: str | None = None
    is_peer_lost: bool = False


READY = Reply(0)
"""The first reply: the process can take commands. With a reason: it cannot."""


def encode_command(number: int, command: Command) -> bytes:
    """The line `decode_command` reads."""
    match command:
        case AddPeer(name, metadata, offered):
            fields: list[Any] = ["add", name, base64.b64encode(metadata).decode(), [_memory(one) for one in offered]]
        case RemovePeer(name):
            fields = ["remove", name]
        case Notify(name, message):
            fields = ["notify", name, message.hex()]
        case Write(name, places, target, group):
            fields = ["write", name, [_place(place) for place in places], _memory(target), _group(group)]
        case Read(name, sources, place):
            fields = ["read", name, [_memory(source) for source in sources], _place(place)]
        case EndFlight(flight):
            fields = ["end", flight]
    return json.dumps([number, *fields], separators=(",", ":")).encode() + b"\n"


def decode_command(line: bytes) -> tuple[int, Command]:
    """A command and its number; the server is believed."""
    number, kind, *fields = json.loads(line)
    match kind, fields:
        case "add", [name, metadata, offered]:
            return number, AddPeer(name, base64.b64decode(metadata), tuple(Memory(*one) for one in offered))
        case "remove", [name]:
            return number, RemovePeer(name)
        case "notify", [name, message]:
            return number, Notify(name, bytes.fromhex(message))
        case "write", [name, places, target, group]:
            belongs = None if group is None else Group(group[0], group[1], group[2], bytes.fromhex(group[3]))
            return number, Write(name, tuple(Place(*place) for place in places), Memory(*target), belongs)
        case "read", [name, sources, place]:
            return number, Read(name, tuple(Memory(*source) for source in sources), Place(*place))
        case "end", [flight]:
            return number, EndFlight(flight)
    raise ValueError(f"unknown command {kind!r}")


def encode_reply(reply: Reply) -> bytes:
    """The line `decode_reply` reads."""
    reason = None if reply.reason is None else reply.reason[:REASON_CHARACTERS_MAX]
    return json.dumps([reply.number, reply.counted, reason, reply.is_peer_lost]).encode() + b"\n"


def decode_reply(line: bytes) -> Reply:
    """Raises ValueError for anything but a reply: the process may be somebody else's by now."""
    fields = json.loads(line)
    if not isinstance(fields, list) or [type(field) for field in fields] not in (
        [int, int, str, bool],
        [int, int, type(None), bool],
    ):
        raise ValueError("not a reply")
    return Reply(*fields)


def _memory(memory: Memory) -> list[Any]:
    return [memory.address, memory.nbytes, memory.device]


def _place(place: Place) -> list[int]:
    return [place.area, place.offset, place.nbytes]


def _group(group: Group | None) -> list[Any] | None:
    return None if group is None else [group.flight, group.index, group.is_last, group.notice.hex()]


def places_of(areas: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> tuple[Place, ...]:
    """Our (address, nbytes) spans as places; `areas` are (address, nbytes) by number. Raises ValueError for memory that
    is in none.
    """
    places = []
    for address, nbytes in spans:
        for number, (start, size) in enumerate(areas):
            if start <= address and address + nbytes <= start + size:
                places.append(Place(number, address - start, nbytes))
                break
        else:
            raise ValueError("the memory is not shared with the ucx process")
    return tuple(places)
