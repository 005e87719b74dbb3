"""The calls and answers between the server and its Mooncake process: lines of JSON over a socket pair. Pure.

The process maps only the areas that it was given, so memory is named by area and offset. An attacker who reaches
Mooncake's ports may control this process, so the server uses nothing of an answer but its codes and a shortened reason
for the log.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from storage_server.planning.area_span import AreaSpan

KEYS_MAX = 1_000
"""One call has no more keys."""
LINE_BYTES_MAX = 4 << 20
ANSWER_BYTES_MAX = 64 << 10
"""An answer has a code for each of the KEYS_MAX keys, or a reason. It is parsed on the event loop."""
REASON_CHARACTERS_MAX = 1_000


class CallKind(Enum):
    """The kind of a call. Calls of one kind are carried out one after the other, those of several side by side."""

    GET = "get"
    PUT = "put"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Join:
    """The store that is joined, and what this host brings: see RemoteDramSettings."""

    master: str
    host: str
    segment_bytes: int
    protocol: str
    devices: str


@dataclass(frozen=True, slots=True)
class MooncakeCall:
    """GET and PUT have one key, whose value lies in `spans`, one after the other; REMOVE has none of them."""

    number: int
    kind: CallKind
    keys: tuple[str, ...]
    spans: tuple[AreaSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class MooncakeAnswer:
    """Mooncake's code for each key of a call, or, for joining, none; or what went wrong."""

    number: int
    codes: tuple[int, ...]
    problem: str | None = None


def encode_join(join: Join) -> bytes:
    """One line."""
    return _line([join.master, join.host, join.segment_bytes, join.protocol, join.devices])


def decode_join(line: bytes) -> Join:
    """Raises ValueError."""
    return Join(*json.loads(line))


def encode_call(call: MooncakeCall) -> bytes:
    """One line."""
    spans = [[span.area, span.offset, span.nbytes] for span in call.spans]
    return _line([call.number, call.kind.value, list(call.keys), spans])


def decode_call(line: bytes) -> MooncakeCall:
    """Raises ValueError."""
    number, kind, keys, spans = json.loads(line)
    return MooncakeCall(number, CallKind(kind), tuple(keys), tuple(AreaSpan(*span) for span in spans))


def encode_answer(answer: MooncakeAnswer) -> bytes:
    """One line."""
    problem = None if answer.problem is None else answer.problem[:REASON_CHARACTERS_MAX]
    return _line([answer.number, list(answer.codes), problem])


def decode_answer(line: bytes) -> MooncakeAnswer:
    """Raises ValueError for anything that `encode_answer` does not make."""
    try:
        decoded = json.loads(line)
    except RecursionError:
        decoded = None
    match decoded:
        case [int() as number, list() as codes, None | str() as problem] if _are_ints([number, *codes]):
            return MooncakeAnswer(number, tuple(codes), None if problem is None else problem[:REASON_CHARACTERS_MAX])
    raise ValueError("the Mooncake process gave no valid answer")


def _are_ints(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _line(values: list[Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"
