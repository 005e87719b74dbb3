"""The parts of a request's body that are read, and the frames in which a reading process gets its work and answers.
Pure.

JSON of megabytes takes seconds to parse and holds the interpreter meanwhile. So large bodies are read in processes of
their own (`orchestrator.readers`), and what comes back needs no parsing: bytes as they go on, token ids as uint32, and
a head of a few fields.

    bytes of the head (u32) | head: a JSON object with "blobs", their lengths | the blobs
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from objectcache.orchestrator.rules.openai_requests import (
    Asked,
    RequestKind,
    TokenIds,
    WrongRequestError,
    json_of,
    read_request,
    response_key,
    token_ids,
)

HEAD = struct.Struct("<I")
HEAD_BYTES_MAX = 1 << 20
BLOB_BYTES_MAX = 1 << 28
DEPTH_MAX = 256
"""Deeper than tools' schemas are, and a quarter of what Python's parser takes."""
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A text in JSON. One without an end goes to the end of the body, or each quote in it would be looked for again."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")
TRANSFER_PARAMS = "kv_transfer_params"
ENGINES_OWN = frozenset(
    {
        TRANSFER_PARAMS, "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "rid",
        "request_id", "data_parallel_rank", "extra_key", "session_params", "routed_dp_rank", "disagg_prefill_dp_rank",
    }
)  # fmt: skip
"""Fields by which a client could have an engine read KV of others, or take its request for another one."""
OF_TENANTS = frozenset({"priority", "conversation"})
"""Fields that engines obey, which tenants must not choose: a priority comes from the configuration, and a conversation
is known to an engine only, which does not know whose it is.
"""
ENGINE_ARGUMENTS = "vllm_xargs"
"""A map in which vLLM passes fields on to its connectors."""
READ_HEADERS = ("x-session-id", "x-objectcache-session")


@dataclass(frozen=True, slots=True)
class Order:
    """How a body is to be read: `headers` are those of READ_HEADERS, in lower case. `scope` has what the engine is
    told beside the body, and may answer by: the client's own key among it. `with_key`: the answer may be kept, and
    needs a name.
    """

    kind: RequestKind
    headers: Mapping[str, str]
    tenant: str = ""
    has_salt: bool = False
    scope: str = ""
    with_key: bool = False


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body as it may go on, what it asks for, and the name of its answer, where that may be kept."""

    raw: bytes
    asked: Asked
    response_key: str | None = None


def read_body(raw: bytes, order: Order) -> ReadBody:
    """Read a body. Raises WrongRequestError."""
    try:
        return _read(raw, order)
    except RecursionError:
        raise WrongRequestError("the body is too deep") from None


def _read(raw: bytes, order: Order) -> ReadBody:
    body = document_of(raw)
    dropped = ENGINES_OWN | OF_TENANTS if order.tenant else ENGINES_OWN
    changed = {name: value for name, value in body.items() if name not in dropped}
    arguments = changed.get(ENGINE_ARGUMENTS)
    if isinstance(arguments, dict):
        changed[ENGINE_ARGUMENTS] = {name: value for name, value in arguments.items() if name not in dropped}
    elif arguments is not None:
        raise WrongRequestError(f"{ENGINE_ARGUMENTS} must be a map", ENGINE_ARGUMENTS)
    if order.has_salt and order.tenant:
        salt = f"{order.tenant}\n{body.get('cache_salt') or ''}"
        changed["cache_salt"] = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()
    asked = read_request(order.kind, changed, order.headers)
    if order.tenant and asked.session:  # a name that two tenants give is two sessions
        asked = dataclasses.replace(asked, session=f"{order.tenant}\n{asked.session}")
    key = None
    if order.with_key and asked.is_deterministic and asked.is_generating and _is_stateless(order.kind, changed):
        key = response_key(f"{order.tenant}\n{order.scope}", order.kind, changed)
    return ReadBody(raw if changed == body else json_of(changed), asked, key)


def _is_stateless(kind: RequestKind, body: Mapping[str, Any]) -> bool:
    """Whether the engine keeps nothing of the answer, and answers from nothing that it has kept."""
    if kind is not RequestKind.RESPONSES:
        return True
    return body.get("store") is False and not body.get("conversation") and not body.get("previous_response_id")


def edited(raw: bytes, drop: Sequence[str], put: Mapping[str, Any], handed_over: bytes = b"") -> bytes:
    """The body without some fields, and with others. `handed_over` is JSON that a prefill engine has for the engine
    that goes on: it joins the TRANSFER_PARAMS of `put`. Raises WrongRequestError.
    """
    kept = {name: value for name, value in document_of(raw).items() if name not in drop}
    if handed_over:
        put = {**put, TRANSFER_PARAMS: {**document_of(handed_over), **put.get(TRANSFER_PARAMS, {})}}
    try:
        return json_of({**kept, **put})
    except RecursionError:
        raise WrongRequestError("the body is too deep") from None


def document_of(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body, in UTF-8, of which no value is nested deeper than DEPTH_MAX: deeper ones can be read
    and then not be written. Raises WrongRequestError.
    """
    if depth_of(raw) > DEPTH_MAX:
        raise WrongRequestError(f"the body is too deep: its values may be nested {DEPTH_MAX} deep")
    try:
        document = json.loads(raw.decode("utf-8-sig", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise WrongRequestError(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise WrongRequestError("the body must be a JSON object")
    return document


def depth_of(raw: bytes) -> int:
    """How deep the values of a JSON text are nested. It is not parsed, so its depth costs no stack."""
    brackets = np.frombuffer(_TEXT.sub(b"", raw).translate(_STEPS, _NO_BRACKETS), np.int8)
    return int(np.cumsum(brackets, dtype=np.int32).max(initial=0))


def answered_tokens(answer: bytes) -> TokenIds:
    """The token ids of an engine's answer to `/tokenize`. Raises ValueError."""
    try:
        tokens = document_of(answer).get("tokens")
    except WrongRequestError as error:  # it is no client's
        raise ValueError(f"an answer: {error}") from None
    if not isinstance(tokens, list):
        raise ValueError("the answer has no tokens")
    return token_ids(tokens)


def handed_over(answer: bytes) -> bytes:
    """The TRANSFER_PARAMS of an engine's answer, as JSON; empty where it has none. Raises WrongRequestError."""
    params = document_of(answer).get(TRANSFER_PARAMS)
    return json_of(params) if isinstance(params, dict) and params else b""


def packed(head: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> list[bytes]:
    """The pieces of a frame."""
    text = json.dumps({**head, "blobs": [len(blob) for blob in blobs]}).encode()
    return [HEAD.pack(len(text)) + text, *blobs]


def head_of(text: bytes) -> tuple[dict[str, Any], list[int]]:
    """The head of a frame, and the lengths of its blobs. Raises ValueError."""
    head = json.loads(text)
    lengths = head.pop("blobs")
    if not all(type(each) is int and 0 <= each <= BLOB_BYTES_MAX for each in lengths):
        raise ValueError("a frame with blobs of no length")
    return head, lengths


def packed_order(order: Order) -> dict[str, Any]:
    """An order as a head."""
    return {**dataclasses.asdict(order), "kind": order.kind.value, "headers": dict(order.headers)}


def order_of(head: Mapping[str, Any]) -> Order:
    """The order that `packed_order` packed."""
    return Order(**{**head, "kind": RequestKind(head["kind"])})


def packed_body(read: ReadBody, raw: bytes) -> list[bytes]:
    """A frame with what was read of `raw`, which goes back only where it was changed."""
    asked = read.asked
    head = {
        "model": asked.model,
        "output_tokens": asked.output_tokens,
        "is_stream": asked.is_stream,
        "session": asked.session,
        "salt": asked.salt,
        "is_deterministic": asked.is_deterministic,
        "sequence_tokens": asked.sequence_tokens,
        "prompt_tokens": asked.prompt_tokens,
        "previous": asked.previous,
        "document_digest": asked.document_digest,
    }
    said = {"kind": asked.kind.value, "asked": head, "response_key": read.response_key}
    has = {"has_tokens": asked.tokens is not None, "has_document": asked.to_tokenize is not None}
    tokens = b"" if asked.tokens is None else asked.tokens.tobytes()
    changed = b"" if read.raw is raw else read.raw
    return packed({**said, **has}, (changed, tokens, asked.to_tokenize or b""))


def body_of(head: Mapping[str, Any], blobs: Sequence[bytes], raw: bytes) -> ReadBody:
    """The inverse of `packed_body`."""
    changed, tokens, document = blobs
    asked = Asked(
        kind=RequestKind(head["kind"]),
        tokens=np.frombuffer(tokens, np.uint32) if head["has_tokens"] else None,
        to_tokenize=document if head["has_document"] else None,
        **head["asked"],
    )
    return ReadBody(changed or raw, asked, head["response_key"])
