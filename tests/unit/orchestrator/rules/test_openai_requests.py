"""The parts of OpenAI's requests that decide."""

from __future__ import annotations

import json
from typing import Any

import pytest

from objectcache.orchestrator.rules.openai_requests import (
    OUTPUT_TOKENS_DEFAULT,
    Asked,
    RequestKind,
    WrongRequestError,
    read_form,
    read_request,
    response_key,
)

CHAT, COMPLETIONS = RequestKind.CHAT, RequestKind.COMPLETIONS
HELLO = [{"role": "user", "content": "hello"}]


def tokens_of(asked: Asked) -> list[int]:
    assert asked.tokens is not None
    return asked.tokens.tolist()


def to_tokenize(asked: Asked) -> Any:
    assert asked.to_tokenize is not None
    return json.loads(asked.to_tokenize)


def test_token_ids_need_no_tokenizer_and_texts_do() -> None:
    ids = read_request(COMPLETIONS, {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "n": 2}, {})
    assert (tokens_of(ids), ids.to_tokenize, ids.output_tokens) == ([1, 2, 3], None, 14)
    assert tokens_of(read_request(COMPLETIONS, {"prompt": [[1, 2]]}, {})) == [1, 2]
    text = read_request(COMPLETIONS, {"model": "m", "prompt": "hello", "stream": True}, {})
    assert (text.tokens, to_tokenize(text)) == (None, {"model": "m", "prompt": "hello"})
    assert text.is_stream
    assert text.output_tokens == OUTPUT_TOKENS_DEFAULT


def test_a_chat_is_tokenized_with_everything_that_its_template_sees() -> None:
    body = {"model": "m", "messages": HELLO, "tools": [{"type": "function"}], "temperature": 0, "logprobs": True}
    asked = read_request(CHAT, body, {})
    assert to_tokenize(asked) == {"model": "m", "messages": HELLO, "tools": [{"type": "function"}]}
    assert asked.is_deterministic


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (
            COMPLETIONS,
            {"prompt": [[[1, 2]]]},
        ),  # deeper than engines take it
        (COMPLETIONS, {"prompt_embeds": "…"}),
        (RequestKind.EMBEDDINGS, {"input": "text"}),
        (RequestKind.RESPONSES, {"input": "text", "previous_response_id": "resp_1"}),
    ],
)
def test_prompts_whose_tokens_cannot_be_known_are_routed_without_them(kind: RequestKind, body: dict[str, Any]) -> None:
    asked = read_request(kind, body, {})
    assert asked.tokens is None
    assert asked.to_tokenize is None


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["a"]}, "messages"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": True}, "n"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1 << 40}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": float("inf")}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "1" * 5000}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "ten"}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "model": 5}, "model"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": 5}, "cache_salt"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "\ud800"}, "cache_salt"),
        (COMPLETIONS, {"prompt": "a", "model": "\udfff"}, "model"),
        (COMPLETIONS, {"prompt": [-1, 5]}, "prompt"),
        (COMPLETIONS, {"prompt": [1 << 32]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
    ],
)
def test_what_no_engine_could_answer_is_refused_by_its_field(
    kind: RequestKind, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(WrongRequestError) as caught:
        read_request(kind, body, {})
    assert caught.value.field == field


def test_sessions_come_from_a_header_a_conversation_or_the_user() -> None:
    def session(body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
        return read_request(COMPLETIONS, {"prompt": "a", **body}, headers or {}).session

    assert session({"user": "u"}, {"x-session-id": "h"}) == "h"
    assert session({"user": "u", "conversation": {"id": "c"}}) == "c"
    assert session({"user": "u", "prompt_cache_key": "k"}) == "k"
    assert session({"user": "u"}) == "u"
    assert session({"user": 5}) == ""
    assert session({"user": "\ud800"}) == ""
    assert len(session({"user": "u" * 1000})) == 256


def test_a_request_for_a_response_is_a_chat_unless_it_goes_on_from_an_earlier_one() -> None:
    said = {"model": "m", "input": "hello", "instructions": "Be terse."}
    wanted = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "hello"}]
    assert to_tokenize(read_request(RequestKind.RESPONSES, said, {})) == {"model": "m", "messages": wanted}
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    asked = read_request(RequestKind.RESPONSES, {"model": "m", "input": parts}, {})
    assert to_tokenize(asked) == {"model": "m", "messages": parts}
    for other in ({"conversation": "c"}, {"input": [{"type": "function_call"}]}, {"input": 5}):
        assert read_request(RequestKind.RESPONSES, {**said, **other}, {}).to_tokenize is None


def test_the_model_of_a_form_is_found() -> None:
    assert read_form([("file", b"RIFF"), ("model", b"whisper"), ("model", b"other")], ()).model == "whisper"
    assert read_form([("file", b"RIFF")], ()).model == ""


def test_a_form_has_no_field_that_only_we_may_give() -> None:
    with pytest.raises(WrongRequestError, match="vllm_xargs"):
        read_form([("model", b"m"), ("vllm_xargs", b"{}")], {"vllm_xargs"})


@pytest.mark.parametrize(
    ("kind", "fields", "tokens"),
    [
        (COMPLETIONS, {"max_tokens": 2000, "max_completion_tokens": 0, "max_output_tokens": 0}, 2000),
        (RequestKind.CHAT, {"max_tokens": 2000, "max_completion_tokens": 0}, 2000),
        (RequestKind.CHAT, {"max_completion_tokens": 300, "max_output_tokens": 0}, 300),
        (RequestKind.RESPONSES, {"max_output_tokens": 300, "max_tokens": 0, "max_completion_tokens": 0}, 300),
    ],
)
def test_a_field_that_the_path_does_not_have_makes_no_request_look_small(
    kind: RequestKind, fields: dict[str, int], tokens: int
) -> None:
    """It took another tenant's share, which goes by the tokens that a request may make."""
    prompts: dict[RequestKind, dict[str, object]] = {
        COMPLETIONS: {"prompt": "a"},
        RequestKind.CHAT: {"messages": [{"role": "user", "content": "a"}]},
        RequestKind.RESPONSES: {"input": "a"},
    }
    assert read_request(kind, {"model": "m", **prompts[kind], **fields}, {}).output_tokens == tokens


def test_answers_are_shared_by_nobody_else_and_for_nothing_else() -> None:
    body = {"model": "m", "prompt": "a", "temperature": 0}
    keys = {
        response_key("t", COMPLETIONS, body),
        response_key("u", COMPLETIONS, body),
        response_key("t", CHAT, body),
        response_key("t", COMPLETIONS, {**body, "max_tokens": 5}),
    }
    assert len(keys) == 4
    assert response_key("t", COMPLETIONS, dict(reversed(body.items()))) in keys
    for changed in ({"n": 2}, {"temperature": 0.1}):
        assert not read_request(COMPLETIONS, {**body, **changed}, {}).is_deterministic
    assert not read_request(COMPLETIONS, {"prompt": "a"}, {}).is_deterministic


def test_a_list_of_prompts_counts_about_as_many_tokens_as_it_has() -> None:
    assert read_request(COMPLETIONS, {"prompt": [[1] * 100, [2] * 50]}, {}).prompt_tokens == 150
    assert read_request(COMPLETIONS, {"prompt": ["abcd" * 10, "abcd"]}, {}).prompt_tokens == 11
    assert read_request(COMPLETIONS, {"prompt": [1, 2]}, {}).prompt_tokens == 0


def test_each_prompt_of_a_list_gets_as_many_answers_as_are_asked_for() -> None:
    """An engine must hold the largest one, and computes the others before or after."""
    asked = read_request(COMPLETIONS, {"prompt": [[1] * 100, [2] * 50], "n": 3, "max_tokens": 10}, {})
    assert (asked.output_tokens, asked.sequence_tokens) == (60, 110)
    asked = read_request(COMPLETIONS, {"prompt": [1] * 100, "n": 3, "max_tokens": 10}, {})
    assert (asked.output_tokens, asked.sequence_tokens) == (30, 10)
    best = read_request(
        COMPLETIONS, {"prompt": [1] * 100, "n": 2, "best_of": 5, "max_tokens": 10, "temperature": 0}, {}
    )
    assert (best.output_tokens, best.sequence_tokens, best.is_deterministic) == (50, 10, False)
    many = read_request(COMPLETIONS, {"prompt": ["a text"] * 10_000, "max_tokens": 1}, {})
    assert (many.output_tokens, many.prompt_tokens, many.sequence_tokens) == (10_000, 10_000, 2)


@pytest.mark.parametrize("written", [100, 100.0, "100"])
def test_numbers_are_read_as_engines_read_them(written: object) -> None:
    assert read_request(COMPLETIONS, {"prompt": "a", "max_tokens": written}, {}).output_tokens == 100
