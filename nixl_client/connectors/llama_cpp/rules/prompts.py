"""The prompts of requests to llama.cpp's server, as far as they can be cached. Pure."""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from nixl_client.connectors.llama_cpp.rules.slot_file import TOKENS_MAX, Tokens

CHATS = frozenset({"/v1/chat/completions", "/chat/completions"})
COMPLETIONS = frozenset({"/v1/completions", "/completions", "/completion"})
PATHS = CHATS | COMPLETIONS
PARSED_BYTES_MAX = 1 << 20
"""A longer body goes on unread: it would hold the event loop."""
BRACES_MAX = 1 << 16
"""Messages with more braces go on unread: each may be an object. Few texts have as many."""
_Raw = msgspec.Raw
_NONE = msgspec.Raw(b"")
_ONE_ANSWER = (b"", b"1", b"null")


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """The prompt of one request: messages for the server's chat template, a text, or tokens."""

    has_messages: bool = False
    text: str | None = None
    tokens: Tokens | None = None


class _Fields(msgspec.Struct):
    """The fields that decide, as JSON. All others are passed over, and no values are made of them."""

    id_slot: _Raw = _NONE
    lora: _Raw = _NONE
    cache_prompt: _Raw = _NONE
    n: _Raw = _NONE
    n_cmpl: _Raw = _NONE
    prompt: _Raw = _NONE
    messages: _Raw = _NONE


class _Message(msgspec.Struct, gc=False):
    content: _Raw = _NONE


class _Part(msgspec.Struct, gc=False):
    type: str


_FIELDS = msgspec.json.Decoder(_Fields)
_MESSAGES, _PARTS = msgspec.json.Decoder(list[_Message]), msgspec.json.Decoder(list[_Part])
_TEXT, _TOKENS = msgspec.json.Decoder(str), msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]])


def prompt_of(path: str, body: bytes) -> AskedPrompt | None:
    """The prompt that one slot will hold. None for other requests, and for those that choose a slot themselves, have
    adapters of their own, several answers, images or sounds. A MiB takes up to 20 ms.
    """
    if path not in PATHS or len(body) > PARSED_BYTES_MAX or not body.lstrip().startswith(b"{"):
        return None
    try:
        return _asked(path, _FIELDS.decode(body))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _asked(path: str, fields: _Fields) -> AskedPrompt | None:
    said = {name: bytes(getattr(fields, name)) for name in fields.__struct_fields__}
    if said["id_slot"] or said["lora"] or said["cache_prompt"] not in (b"", b"true"):
        return None
    if said["n"] not in _ONE_ANSWER or said["n_cmpl"] not in _ONE_ANSWER:
        return None
    if path in CHATS:
        if said["messages"].count(b"{") > BRACES_MAX:
            return None
        is_text = all(map(_is_text, _MESSAGES.decode(said["messages"])))
        return AskedPrompt(has_messages=True) if is_text else None
    if said["prompt"].startswith(b'"'):
        return AskedPrompt(text=_TEXT.decode(said["prompt"]))
    tokens = _TOKENS.decode(said["prompt"])
    return AskedPrompt(tokens=np.fromiter(tokens, np.uint32, len(tokens))) if 0 < len(tokens) <= TOKENS_MAX else None


def may_use_slots(method: str, path: str) -> bool:
    """Whether a request may write a slot's file, or have a slot hold what a file has. Files of slots tell neither the
    model nor the adapters that computed them, and each name is one more file in memory.
    """
    return method not in ("GET", "HEAD", "OPTIONS") and "slots" in path.split("/")


def without_reuse(body: bytes) -> bytes:
    """The body of a request for which the server shifts no KV (`n_cache_reuse`): KV that was computed behind another
    text is not the prompt's own, and would be stored as such. Of a field that is there twice the last one counts. A
    name may be escaped. The server reads no further than to a NUL.
    """
    is_object = body.removeprefix(BOM_UTF8).lstrip().startswith(b"{")
    if not is_object or not (b"cache_reuse" in body or b"\\u" in body):
        return body
    text = body.partition(b"\0")[0].rstrip()
    if not text.endswith(b"}"):  # the server will not read it either
        return body
    fields = text[:-1].rstrip()
    return fields + (b"" if fields.endswith(b"{") else b",") + b'"n_cache_reuse":0}'


def may_change_adapters(method: str, path: str, body: bytes) -> bool:
    """Whether a request may set adapters' scales, or leave KV of its own ones in a slot; a name may be escaped."""
    return method != "GET" and ("lora-adapters" in path or b"lora" in body or b"\\u00" in body)


def tokens_in(value: Any) -> Tokens | None:
    """The tokens of a JSON array; None where it is not all tokens."""
    if not isinstance(value, list) or len(value) > TOKENS_MAX or set(map(type, value)) - {int}:
        return None
    if value and not 0 <= min(value) <= max(value) < 1 << 31:
        return None
    return np.fromiter(value, np.uint32, len(value))


def in_slot(body: bytes, index: int) -> bytes:
    """The body of a request that runs in this slot."""
    start = body.index(b"{") + 1
    return body[:start] + b'"id_slot":%d,' % index + body[start:]


def _is_text(message: _Message) -> bool:
    content = bytes(message.content)
    return not content.startswith(b"[") or all(part.type == "text" for part in _PARTS.decode(content))
