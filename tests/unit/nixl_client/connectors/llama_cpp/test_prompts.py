"""The requests that get a slot, and how it is said to the server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nixl_client.connectors.llama_cpp.rules.prompts import PARSED_BYTES_MAX, in_slot, prompt_of

CHAT, COMPLETION = "/v1/chat/completions", "/completion"
TEXT_PART, IMAGE_PART = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}


def asked(path: str, **document: Any) -> Any:
    return prompt_of(path, json.dumps(document).encode())


def test_prompts_are_texts_tokens_or_messages() -> None:
    assert asked(COMPLETION, prompt="abc").text == "abc"
    assert asked("/v1/completions", prompt=[1, 2, 3]).tokens.tolist() == [1, 2, 3]
    assert asked(CHAT, messages=[{"role": "user", "content": "a"}]).has_messages
    assert asked(CHAT, messages=[{"role": "user", "content": [TEXT_PART]}], stream=True).has_messages


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/infill", {"prompt": "a"}),
        (COMPLETION, {"prompt": ["a", "b"]}),
        (COMPLETION, {"prompt": [1, "b"]}),
        (COMPLETION, {"prompt": [True]}),
        (COMPLETION, {"prompt": []}),
        (COMPLETION, {"prompt": "a", "id_slot": 1}),
        (COMPLETION, {"prompt": "a", "lora": [{"id": 0, "scale": 1}]}),
        (COMPLETION, {"prompt": "a", "cache_prompt": False}),
        (COMPLETION, {"prompt": "a", "n": 2}),
        (COMPLETION, {"prompt": "a", "n_cmpl": 2}),
        (CHAT, {"messages": "a"}),
        (CHAT, {"messages": ["a"]}),
        (CHAT, {"messages": [{"role": "user", "content": [TEXT_PART, IMAGE_PART]}]}),
    ],
)
def test_other_requests_go_on_as_they_are(path: str, document: dict[str, Any]) -> None:
    assert asked(path, **document) is None


@pytest.mark.parametrize("body", [b"", b"[]", b'"a"', b"{", b"\xff", b"[" * 100_000, b" " * (PARSED_BYTES_MAX + 1)])
def test_bodies_that_are_no_request_go_on_as_they_are(body: bytes) -> None:
    assert prompt_of(COMPLETION, body) is None


def test_the_slot_is_written_ahead_of_what_the_client_has_said() -> None:
    """The body is not encoded anew, so that the server reads every other byte as the client wrote it."""
    assert in_slot(b' {"prompt": 1e400}', 3) == b' {"id_slot":3,"prompt": 1e400}'
