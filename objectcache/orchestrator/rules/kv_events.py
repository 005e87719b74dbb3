"""vLLM's KV events: what a batch says, and whether batches are missing.

A batch comes as three frames: a topic, its number (8 bytes, big-endian), and msgpack `[time, [events], rank]`. Events
are maps that are tagged `type`, or arrays that begin with their tag in older versions. Source: `vllm/distributed/
kv_events.py` of vLLM 0.32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

import msgspec

EVENTS_MAX = 65_536
"""One batch has no more events."""
BATCH_BLOCKS_MAX = 65_536
"""All events of one batch have no more blocks; a step of an engine stores no more."""
NAME_BYTES_MAX = 64
TEXT_MAX = 512
EXTRA_CHARACTERS_MAX = 4096
"""The text of what else the KV of one block depends on has no more characters."""
EXTRAS_MAX = 64
EXTRA_BYTES_MAX, EXTRA_LISTS_MAX = 256 << 10, 16
"""All blocks of an event have no more bytes of it, and each block no more lists and maps. A byte of a text or a hash
may look like one.
"""
FIELD_BYTES_MAX = 4096
_CONTAINERS = [bytes([each]) for each in (*range(0x80, 0xA0), *range(0xDC, 0xE0))]
"""The bytes with which maps and lists begin."""
BLOCK_TOKENS_MAX = 65_536
GPU = "GPU"
_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")

BlockName = int | bytes
"""The engine's own hash of a block."""


class WrongEventError(ValueError):
    """A batch that is not what the format says; the message names the field."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that an engine holds from now on, each behind the one before. `parent` is None at a prompt's start. The
    tokens are those of all blocks. `extras` has, for each block, what else its KV depends on.
    """

    names: tuple[BlockName, ...]
    parent: BlockName | None
    tokens: tuple[int, ...]
    block_tokens: int
    adapter: str = ""
    medium: str = GPU
    extras: tuple[tuple[Any, ...], ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that an engine holds no more."""

    names: tuple[BlockName, ...]
    medium: str = GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine holds no block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one message, and the engine's clock when it was sent (Unix seconds)."""

    sent_at: float
    events: tuple[Event, ...]
    rank: int = 0


_Names = Annotated[list[int | bytes], msgspec.Meta(max_length=BATCH_BLOCKS_MAX)]
_Raw = msgspec.Raw
_NONE = msgspec.Raw(b"\xc0")


class _Batch(msgspec.Struct):
    ts: float
    events: Annotated[list[_Raw], msgspec.Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: int | None = None


class _BatchArray(_Batch, array_like=True):
    """The same as an array."""


class _Tag(msgspec.Struct, array_like=True):
    type: str


class _Event(msgspec.Struct):
    """An event as it came. The long lists have no lists in them, since the interpreter would make each under its lock;
    the other fields are read when their lengths are known.
    """

    type: str
    block_hashes: _Names | None = None
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] | None = None
    block_size: _Raw = _NONE
    lora_id: _Raw = _NONE
    medium: _Raw = _NONE
    lora_name: _Raw = _NONE
    extra_keys: _Raw = _NONE
    group_idx: _Raw = _NONE


class _Stored(_Event, array_like=True):
    """The same as an array, in the order of _STORED_FIELDS."""


class _Removed(msgspec.Struct, array_like=True):
    type: str
    block_hashes: _Names | None = None
    medium: _Raw = _NONE
    group_idx: _Raw = _NONE


_BATCH, _BATCH_ARRAY = msgspec.msgpack.Decoder(_Batch), msgspec.msgpack.Decoder(_BatchArray)
_TAG, _EVENT = msgspec.msgpack.Decoder(_Tag), msgspec.msgpack.Decoder(_Event)
_STORED, _REMOVED = msgspec.msgpack.Decoder(_Stored), msgspec.msgpack.Decoder(_Removed)


def read_batch(payload: bytes) -> Batch:
    """A message, decoded. Raises msgspec.DecodeError for what is none, WrongEventError."""
    read = (_BATCH_ARRAY if _is_array(payload) else _BATCH).decode(payload)
    return batch_of([read.ts, list(map(_fields_of, read.events)), read.data_parallel_rank])


def _is_array(payload: bytes) -> bool:
    return payload[:1] in (b"\xdc", b"\xdd") or 0x90 <= (payload or b"\0")[0] <= 0x9F


def _fields_of(raw: msgspec.Raw) -> dict[str, Any]:
    """An event's fields. Raises msgspec.DecodeError, WrongEventError."""
    payload = bytes(raw)
    if not _is_array(payload):
        event: _Event | _Removed = _EVENT.decode(payload)
    else:
        kind = _TAG.decode(payload).type
        if kind not in ("BlockStored", "BlockRemoved"):
            return {"type": kind}
        event = (_STORED if kind == "BlockStored" else _REMOVED).decode(payload)
    found = {name: getattr(event, name) for name in event.__struct_fields__}
    block_count = len(event.block_hashes or ())
    return {
        name: _decoded(value, name, block_count) if isinstance(value, msgspec.Raw) else value
        for name, value in found.items()
    }


def _decoded(raw: msgspec.Raw, name: str, block_count: int) -> object:
    payload = bytes(raw)
    if name != "extra_keys":
        if len(payload) > FIELD_BYTES_MAX:
            raise WrongEventError(f"{name} has {len(payload)} bytes, at most {FIELD_BYTES_MAX} are read")
    elif len(payload) > EXTRA_BYTES_MAX or sum(map(payload.count, _CONTAINERS)) > EXTRA_LISTS_MAX * (block_count + 64):
        raise WrongEventError("extra_keys are too long, or have too many lists")
    return msgspec.msgpack.decode(payload)


def batch_of(document: object) -> Batch:
    """A decoded message. Events of unknown kinds are left out. Raises WrongEventError."""
    if isinstance(document, dict):
        document = [document.get("ts"), document.get("events"), document.get("data_parallel_rank")]
    if not isinstance(document, list | tuple) or len(document) < 2:
        raise WrongEventError("a batch must have a time and events")
    sent_at, events = document[0], document[1]
    rank = document[2] if len(document) > 2 and document[2] is not None else 0
    if not isinstance(sent_at, int | float) or not isinstance(events, list | tuple) or not isinstance(rank, int):
        raise WrongEventError("time, events or rank are of the wrong kind")
    if not math.isfinite(sent_at):
        raise WrongEventError(f"the time of a batch is {sent_at}")
    if len(events) > EVENTS_MAX:
        raise WrongEventError(f"events: {len(events)} in one batch, at most {EVENTS_MAX} are read")
    found = tuple(each for each in map(_event, events) if each is not None)
    block_count = sum(map(block_count_of, found))
    if block_count > BATCH_BLOCKS_MAX:
        raise WrongEventError(f"block_hashes: {block_count} in one batch, at most {BATCH_BLOCKS_MAX} are read")
    return Batch(float(sent_at), found, rank)


def block_count_of(event: Event) -> int:
    """How many blocks the event names."""
    return 0 if isinstance(event, AllBlocksCleared) else len(event.names)


def block_tokens_of(event: Event) -> int:
    """The tokens of each block that the event tells of; 1 where it tells of none."""
    return event.block_tokens if isinstance(event, BlockStored) else 1


def sliced(event: Event, blocks_max: int) -> Iterator[Event]:
    """The same as events of at most so many blocks each, one behind the other."""
    if block_count_of(event) <= blocks_max or isinstance(event, AllBlocksCleared):
        yield event
        return
    for start in range(0, len(event.names), blocks_max):
        end = start + blocks_max
        if isinstance(event, BlockRemoved):
            yield replace(event, names=event.names[start:end])
            continue
        yield replace(
            event,
            names=event.names[start:end],
            parent=event.names[start - 1] if start else event.parent,
            tokens=event.tokens[start * event.block_tokens : end * event.block_tokens],
            extras=event.extras[start:end],
        )


def _event(document: object) -> Event | None:
    if isinstance(document, dict):
        kind, fields = document.get("type"), document
    elif isinstance(document, list | tuple) and document:
        kind = document[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, document[1:], strict=False))
    else:
        raise WrongEventError("an event must be a map or an array")
    match kind:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return BlockRemoved(_names(fields), _medium(fields), _number(fields, "group_idx"))
        case "AllBlocksCleared":
            return AllBlocksCleared()
    return None


def _stored(fields: dict[str, Any]) -> BlockStored:
    names, tokens, block_tokens = _names(fields), fields.get("token_ids"), fields.get("block_size")
    if not isinstance(block_tokens, int) or not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise WrongEventError(f"block_size must be from 1 to {BLOCK_TOKENS_MAX}")
    if not isinstance(tokens, list | tuple) or len(tokens) != block_tokens * len(names):
        raise WrongEventError(f"token_ids: {len(names)} blocks of {block_tokens} tokens need as many")
    parent = fields.get("parent_block_hash")
    if parent is not None and not _is_name(parent):
        raise WrongEventError(f"parent_block_hash must be a number or at most {NAME_BYTES_MAX} bytes")
    extras = fields.get("extra_keys") or ()
    if not isinstance(extras, list | tuple) or (extras and len(extras) != len(names)):
        raise WrongEventError("extra_keys must have an entry for each block")
    lora = fields.get("lora_name") or fields.get("lora_id")
    if lora is not None and not isinstance(lora, int | str):
        raise WrongEventError("lora_name must be a text")
    return BlockStored(
        names=names,
        parent=parent,
        tokens=tuple(tokens),
        block_tokens=block_tokens,
        adapter="" if lora is None else str(lora)[:TEXT_MAX],
        medium=_medium(fields),
        extras=tuple(_extra(each) for each in extras),
        group=_number(fields, "group_idx"),
    )


def _names(fields: dict[str, Any]) -> tuple[BlockName, ...]:
    names = fields.get("block_hashes")
    if not isinstance(names, list | tuple) or not all(map(_is_name, names)):
        raise WrongEventError(f"block_hashes must be numbers or at most {NAME_BYTES_MAX} bytes")
    return tuple(names)


def _is_name(name: object) -> bool:
    return isinstance(name, int) or (isinstance(name, bytes) and len(name) <= NAME_BYTES_MAX)


def _medium(fields: dict[str, Any]) -> str:
    said = fields.get("medium") or GPU
    if not isinstance(said, str):
        raise WrongEventError("medium must be a text")
    return said[:TEXT_MAX]


def _extra(said: object) -> tuple[Any, ...]:
    found = tuple(said) if isinstance(said, list | tuple) else ()
    if found and (len(found) > EXTRAS_MAX or _size_of(found) > EXTRA_CHARACTERS_MAX):
        raise WrongEventError(f"extra_keys: more than {EXTRA_CHARACTERS_MAX} characters for a block")
    return found


def _size_of(said: Sequence[Any]) -> int:
    """About how many characters these keys have as text, of which no more are looked at than may be there."""
    nbytes, rest = 0, list(said)
    while rest and nbytes <= EXTRA_CHARACTERS_MAX:
        each = rest.pop()
        if isinstance(each, list | tuple):
            nbytes += 2
            rest += each[:EXTRA_CHARACTERS_MAX]
        elif isinstance(each, dict):
            nbytes += 2
            rest += list(each.items())[:EXTRA_CHARACTERS_MAX]
        else:
            nbytes += len(each) + 4 if isinstance(each, str | bytes) else 8
    return nbytes


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if value is None:
        return 0
    if not isinstance(value, int):
        raise WrongEventError(f"{name} must be a number")
    return value


def name_bytes(name: BlockName) -> bytes:
    """The engine's name of a block as bytes, which differ where names do."""
    if isinstance(name, bytes):
        return b"b" + name
    return b"i" + name.to_bytes(max(8, name.bit_length() // 8 + 1), "little", signed=True)


class BatchTurn(Enum):
    """The use of a batch of some number."""

    TAKE = "take"
    DROP = "drop"
    REPLAY = "replay"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class KnownBatch:
    """The last batch that was taken: its number, and when the engine sent it. Another start of the engine has another
    batch of that number.
    """

    number: int
    sent_at: float


class BatchOrder:
    """Batches are numbered from 0, in each start of an engine. Example: after batch 6 comes 9, so 7 and 8 are missing:
    the answer is REPLAY, and `expected` says 7.
    """

    def __init__(self, known: KnownBatch | None = None) -> None:
        self.known = known
        """The last batch; None before the first."""
        self._latest_at = 0.0 if known is None else known.sent_at

    @property
    def expected(self) -> int | None:
        """The number of the next batch; None before the first."""
        return None if self.known is None else self.known.number + 1

    def turn(self, number: int, sent_at: float) -> BatchTurn:
        """The use of a batch of this number. A number that was there already is a repetition, or a new start of the
        engine where the batch was sent later than all before.
        """
        expected = self.expected
        if expected is None or number > expected:
            return BatchTurn.REPLAY if number != 0 else BatchTurn.TAKE
        if number == expected:
            return BatchTurn.TAKE
        return BatchTurn.RESTART if sent_at > self._latest_at else BatchTurn.DROP

    def took(self, number: int, sent_at: float) -> None:
        """The batch of this number is in the index, or lost for good."""
        self.known = KnownBatch(number, sent_at)
        self._latest_at = max(self._latest_at, sent_at)

    def restart(self) -> None:
        """Nothing is known of the engine's batches."""
        self.known = None


def token_root(event: BlockStored, index: int) -> tuple[str, bytes]:
    """The salt of the event's first block, where it begins a prompt, and what else the block at `index` depends on.

    vLLM puts the adapter's name into the extra keys of every block, and the salt behind it in those of the first.
    """
    extras = event.extras[index] if event.extras else ()
    rest = [each for each in extras if each != event.adapter]
    is_first = index == 0 and event.parent is None
    if is_first and rest and isinstance(rest[-1], str):
        return rest[-1], _text_of(rest[:-1])
    return "", _text_of(rest)


def _text_of(extras: Sequence[Any]) -> bytes:
    return repr(tuple(extras)).encode() if extras else b""
