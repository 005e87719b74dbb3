"""What is read of a body is the same in a process of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.orchestrator.rules.openai_requests import RequestKind, WrongRequestError
from objectcache.orchestrator.rules.reading import (
    DEPTH_MAX,
    HEAD,
    Order,
    answered_tokens,
    body_of,
    depth_of,
    edited,
    handed_over,
    head_of,
    order_of,
    packed_body,
    packed_order,
    read_body,
)

COMPLETIONS = Order(RequestKind.COMPLETIONS, {})


def raw(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def split(frame: bytes) -> tuple[dict[str, Any], list[bytes]]:
    (length,) = HEAD.unpack(frame[: HEAD.size])
    head, lengths = head_of(frame[HEAD.size : HEAD.size + length])
    at, blobs = HEAD.size + length, []
    for each in lengths:
        blobs.append(frame[at : at + each])
        at += each
    assert at == len(frame)
    return head, blobs


@given(
    st.sampled_from(["text", "ids", "batch"]),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_what_was_read_comes_back_from_a_frame(
    form: str, ids: list[int], text: str, has_salt: bool, with_key: bool
) -> None:
    prompt: Any = {"text": text, "ids": ids, "batch": [ids, ids]}[form]
    body = raw(prompt=prompt, temperature=0, user="u", stream=True, kv_transfer_params={"a": 1})
    order = Order(RequestKind.COMPLETIONS, {"x-session-id": "s"}, "tenant", has_salt, "Bearer k", with_key)
    assert order_of(json.loads(json.dumps(packed_order(order)))) == order
    read = read_body(body, order)
    again = body_of(*split(b"".join(packed_body(read, body))), body)
    assert again.raw == read.raw
    assert again.response_key == read.response_key
    for name in ("kind", "model", "to_tokenize", "output_tokens", "is_stream", "session", "salt", "prompt_tokens",
                 "document_digest"):  # fmt: skip
        assert getattr(again.asked, name) == getattr(read.asked, name), name
    if form == "ids":
        assert again.asked.tokens is not None
        assert again.asked.tokens.tolist() == ids
    else:
        assert again.asked.tokens is None


def test_a_body_goes_on_as_it_came_but_for_what_engines_give_each_other() -> None:
    body = raw(prompt="a", more=[1.0, {"x": None}])
    assert read_body(body, COMPLETIONS).raw is body
    for name in ("kv_transfer_params", "ec_transfer_params"):
        assert json.loads(read_body(raw(prompt="a", **{name: {"remote": "x"}}), COMPLETIONS).raw) == {
            "model": "m",
            "prompt": "a",
        }


def test_engines_get_no_field_by_which_a_client_could_steer_them() -> None:
    """vLLM hands the arguments on to its connectors."""
    asked = {"kv_transfer_params": "x", "mine": 1}
    body = raw(prompt="p", rid="a", bootstrap_room=1, priority=-9, vllm_xargs=asked)
    found = json.loads(read_body(body, COMPLETIONS).raw)
    assert found == {"model": "m", "prompt": "p", "priority": -9, "vllm_xargs": {"mine": 1}}
    assert "priority" not in json.loads(read_body(body, replace(COMPLETIONS, tenant="t")).raw)
    with pytest.raises(WrongRequestError):
        read_body(raw(prompt="p", vllm_xargs="kv_transfer_params"), COMPLETIONS)


def test_tenants_share_neither_salts_nor_sessions_nor_answers() -> None:
    body = raw(prompt="a", temperature=0, user="u", cache_salt="s")
    read = [
        read_body(body, Order(RequestKind.COMPLETIONS, {}, tenant, True, key, True))
        for tenant, key in (("a", ""), ("b", ""), ("a", "Bearer k"))
    ]
    assert len({each.response_key for each in read}) == 3
    assert len({json.loads(each.raw)["cache_salt"] for each in read}) == 2
    assert len({each.asked.session for each in read}) == 2
    assert read_body(body, COMPLETIONS).asked.session == "u"


@pytest.mark.parametrize("wrong", [b"", b"[]", b"{", b"\xff", b"[" * 60_000, b'{"model":' + b"[" * 60_000, b"1" * 5000])
def test_what_is_no_object_is_the_clients_error(wrong: bytes) -> None:
    with pytest.raises(WrongRequestError):
        read_body(wrong, COMPLETIONS)
    with pytest.raises(WrongRequestError):
        edited(wrong, (), {})


def test_fields_are_dropped_and_put() -> None:
    assert json.loads(edited(raw(prompt="a", max_tokens=5, stop=[]), ("max_tokens",), {"stream": False})) == {
        "model": "m",
        "prompt": "a",
        "stop": [],
        "stream": False,
    }


def test_what_an_engine_hands_over_joins_our_own_parameters() -> None:
    params = handed_over(b'{"choices": [], "kv_transfer_params": {"block": 7, "advice": 1}}')
    changed = json.loads(edited(raw(prompt="a"), (), {"kv_transfer_params": {"advice": 2}}, params))
    assert changed["kv_transfer_params"] == {"block": 7, "advice": 2}
    for none in (b"{}", b'{"kv_transfer_params": {}}', b'{"kv_transfer_params": [1]}'):
        assert handed_over(none) == b""
    with pytest.raises(WrongRequestError):
        handed_over(b"[")


NO_TOKENS = [
    b"", b"[1]", b'{"tokens": 5}', b'{"tokens": [1.5]}', b'{"tokens": [-1]}', b'{"tokens": [true]}', b"[" * 60_000,
]  # fmt: skip


@pytest.mark.parametrize("wrong", NO_TOKENS)
def test_an_engines_answer_has_token_ids_or_is_none(wrong: bytes) -> None:
    assert answered_tokens(b'{"tokens": [1, 4294967295], "count": 2}').tolist() == [1, 4294967295]
    with pytest.raises(ValueError, match=r"token|JSON|Expecting|deep"):
        answered_tokens(wrong)


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({}, False),  # a response is stored unless the client says otherwise
        ({"store": True}, False),
        ({"store": False}, True),
        ({"store": False, "conversation": "conv_1"}, False),
        ({"store": False, "previous_response_id": "resp_1"}, False),
    ],
)
def test_an_answer_that_an_engine_remembers_is_not_kept(fields: dict[str, Any], is_kept: bool) -> None:
    body = raw(input="a", temperature=0, **fields)
    read = read_body(body, Order(RequestKind.RESPONSES, {}, "", False, "", True))
    assert (read.response_key is not None) is is_kept


def test_texts_of_other_scripts_stay_as_short_as_clients_write_them() -> None:
    """Escapes made 50 MB of 16."""
    text = "\u00e9\u4e2d" * 100
    said = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "rid": "1"}, ensure_ascii=False)
    read = read_body(said.encode(), Order(RequestKind.CHAT, {}))
    assert read.asked.to_tokenize is not None
    assert text.encode() in read.asked.to_tokenize
    assert read.asked.document_digest == sha256(read.asked.to_tokenize).hexdigest()
    assert text.encode() in read.raw
    assert text.encode() in edited(read.raw, (), {"a": 1})


def test_halves_of_surrogate_pairs_go_on_as_they_came() -> None:
    said = b'{"model": "m", "prompt": "\\ud800", "rid": "1"}'
    read = read_body(said, COMPLETIONS)
    assert read.raw == b'{"model": "m", "prompt": "\\ud800"}'
    assert b"ud800" in (read.asked.to_tokenize or b"")


@pytest.mark.parametrize("depth", [DEPTH_MAX, 960])
def test_values_that_are_nested_too_deep_are_refused_before_they_are_parsed(depth: int) -> None:
    """They could be read and not be written again, wherever they stood."""
    for name in ("kv_transfer_params", "a"):
        said = b'{"model": "m", "prompt": "\\"[[{", "%s": ' % name.encode() + b"[" * depth + b"]" * depth + b"}"
        for read in (lambda said=said: read_body(said, COMPLETIONS), lambda said=said: edited(said, (), {"b": 1})):
            with pytest.raises(WrongRequestError, match="nested 256 deep"):
                read()
    with pytest.raises(ValueError, match="nested 256 deep"):
        answered_tokens(b'{"tokens": ' + b"[" * depth + b"]" * depth + b"}")
    with pytest.raises(WrongRequestError, match="no JSON"):
        read_body('{"model": "m", "prompt": "a"}'.encode("utf-16"), COMPLETIONS)


@given(st.recursive(st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)))
def test_the_depth_of_a_text_is_that_of_its_values(value: Any) -> None:
    def depth(each: Any) -> int:
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert depth_of(json.dumps(value).encode()) == depth(value)


def test_texts_without_an_end_are_looked_through_once() -> None:
    """Each quote was looked for to the end of the body again: megabytes took hours."""
    assert depth_of(b'{"a": ' + b'"a\\' * (1 << 18)) == 1
    assert depth_of(b'["\\') == 1
