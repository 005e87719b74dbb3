"""The prompts of requests to llama.cpp's server, as far as they can be cached. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nixl_client.connectors.llama_cpp.rules.slot_file import TOKENS_MAX, Tokens

CHATS = frozenset({"/v1/chat/completions", "/chat/completions"})
COMPLETIONS = frozenset({"/v1/completions", "/completions", "/completion"})
PATHS = CHATS | COMPLETIONS
PARSED_BYTES_MAX = 1 << 20
"""A longer body goes on unread: it would hold the event loop."""


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """The prompt of one request: messages for the server's chat template, a text, or tokens."""

    has_messages: bool = False
    text: str | None = None
    tokens: Tokens | None = None


def prompt_of(path: str, body: bytes) -> AskedPrompt | None:
    """The prompt that one slot will hold. None for other requests, and for those that choose a slot themselves, have
    adapters of their own, several answers, images or sounds.
    """
    if path not in PATHS or len(body) > PARSED_BYTES_MAX:
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not body.lstrip().startswith(b"{"):
        return None
    if {"id_slot", "lora"} & document.keys() or document.get("cache_prompt", True) is not True:
        return None
    if document.get("n", 1) not in (1, None) or document.get("n_cmpl", 1) not in (1, None):
        return None
    if path in CHATS:
        messages = document.get("messages")
        is_text = isinstance(messages, list) and all(_is_text(message) for message in messages)
        return AskedPrompt(has_messages=True) if is_text else None
    prompt = document.get("prompt")
    if isinstance(prompt, str):
        return AskedPrompt(text=prompt)
    found = tokens_in(prompt)
    return None if found is None or not len(found) else AskedPrompt(tokens=found)


def may_change_adapters(method: str, path: str, body: bytes) -> bool:
    """Whether a request may set adapters' scales, or leave KV of its own ones in a slot; a name may be escaped."""
    return method != "GET" and ("lora-adapters" in path or b"lora" in body or b"\\u00" in body)


def tokens_in(value: Any) -> Tokens | None:
    """The tokens of a JSON array; None where it is not all tokens."""
    if not isinstance(value, list) or len(value) > TOKENS_MAX or set(map(type, value)) - {int}:
        return None
    if value and not 0 <= min(value) <= max(value) < 1 << 31:
        return None
    return np.array(value, np.uint32)


def in_slot(body: bytes, index: int) -> bytes:
    """The body of a request that runs in this slot."""
    start = body.index(b"{") + 1
    return body[:start] + b'"id_slot":%d,' % index + body[start:]


def _is_text(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    content = message.get("content")
    if not isinstance(content, list):
        return True
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
