"""The requests that get a slot, and how it is said to the server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nixl_client.connectors.llama_cpp.rules.prompts import (
    BRACES_MAX,
    PARSED_BYTES_MAX,
    in_slot,
    may_use_slots,
    prompt_of,
    without_reuse,
)

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


def test_more_messages_than_any_chat_has_go_on_unread() -> None:
    """To make objects of them would hold the event loop."""
    assert asked(CHAT, messages=[{}] * BRACES_MAX).has_messages
    assert asked(CHAT, messages=[{}] * (BRACES_MAX + 1)) is None


@pytest.mark.parametrize("name", ["id_slot", "i\\u0064_slot", "lora", "l\\u006fra"])
def test_a_field_counts_however_its_name_is_written(name: str) -> None:
    """The server would find the slot that the client names behind ours, and the last one counts."""
    body = f'{{"prompt": "a", "{name}": [], "x": [{{}}]}}'.encode()
    assert prompt_of(COMPLETION, body) is None
    assert prompt_of(COMPLETION, body.replace(name.encode(), b"other")) is not None


@pytest.mark.parametrize("said", ['"n_cache_reuse": 1', '"n_c\\u0061che_reuse": 1, "n_cache_reuse": 256'])
def test_no_request_has_the_server_shift_kv(said: str) -> None:
    """KV that was computed behind another text would be stored as that of this prompt."""
    changed = without_reuse(f' {{"prompt": "a", {said} }}\n'.encode())
    assert json.loads(changed) == {"prompt": "a", "n_cache_reuse": 0}


@pytest.mark.parametrize(
    ("before", "behind"), [(b"", b"\0"), (b"", b" \0 {}"), (b"\xef\xbb\xbf", b""), (b" \n", b"\0\0}")]
)
def test_what_the_server_does_not_read_hides_nothing(before: bytes, behind: bytes) -> None:
    """llama.cpp's parser takes a NUL for the end, and a byte order mark for nothing."""
    changed = without_reuse(before + b'{"n_cache_reuse": 1}' + behind)
    assert json.loads(changed.decode("utf-8-sig")) == {"n_cache_reuse": 0}


@pytest.mark.parametrize("body", [b'{"prompt": "a"}', b"", b"[1]", b"--form\r\ncache_reuse\r\n--form--\r\n"])
def test_other_bodies_go_on_byte_by_byte(body: bytes) -> None:
    assert without_reuse(body) is body


def test_an_empty_object_stays_one() -> None:
    assert json.loads(without_reuse(b"{ }")) == {}
    assert json.loads(without_reuse(b'{"\\u0061": {}}')) == {"a": {}, "n_cache_reuse": 0}


@pytest.mark.parametrize(
    ("method", "path", "is_so"),
    [
        ("POST", "/slots/0", True),
        ("PUT", "/api/slots/0", True),
        ("GET", "/slots", False),
        ("POST", "/completion", False),
        ("POST", "/slotsave", False),
    ],
)
def test_slots_are_not_for_clients(method: str, path: str, *, is_so: bool) -> None:
    assert may_use_slots(method, path) is is_so
