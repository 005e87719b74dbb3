"""Tokens by a model's own files, and the cache of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import aiohttp
import numpy as np
import pytest

from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.readers import Readers
from objectcache.orchestrator.rules.openai_requests import RequestKind, read_request
from objectcache.orchestrator.tokenizer import LocalTokenizer, NoTokensError, TokenizerFiles
from objectcache.orchestrator.tokens import AT_ONCE_BYTES_MAX, ENTRY_BYTES, TokenCache, Tokens

tokenizers = pytest.importorskip("tokenizers")
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<end>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that knows a few words."""
    words = {"[UNK]": 0, "hello": 1, "world": 2, "user": 3, "end": 4, "<": 5, ">": 6, "><": 7}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": {"content": "hello"}})
    )
    return tmp_path


def test_texts_and_chats_become_tokens(folder: Path) -> None:
    tokenizer = LocalTokenizer(TokenizerFiles.read(folder))
    assert tokenizer.tokens({"prompt": "hello world"}) == [1, 2]
    whole = tokenizer.tokens({"messages": [{"role": "user", "content": "hello"}]})
    parts = tokenizer.tokens({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]})
    assert whole == parts
    assert whole[:3] == [5, 3, 6]


def test_a_template_that_refuses_or_is_missing_gives_no_tokens(folder: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for template in ("{{ raise_exception('no') }}", "{{ ().__class__.__bases__[0].__subclasses__() }}", "{{ 1 // 0 }}"):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(NoTokensError):
            LocalTokenizer(TokenizerFiles.read(folder)).tokens({"messages": messages})
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(NoTokensError, match="no chat template"):
        LocalTokenizer(TokenizerFiles.read(folder)).tokens({"messages": messages})
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        LocalTokenizer(TokenizerFiles.read(folder))


def test_the_cache_is_bounded_and_keeps_what_was_used_last() -> None:
    cache = TokenCache(10 * 460)
    for number in range(20):
        cache.keep(b"%d" % number, np.full(40, number, np.uint32))  # 160 bytes and a key
        cache.find(b"0")
    found = cache.find(b"0")
    assert found is not None
    assert found.tolist() == [0] * 40
    assert cache.find(b"1") is None
    cache.keep(b"large", np.full(1000, 1, np.uint32))
    assert cache.find(b"large") is None
    assert cache.hit_count == 21


def test_entries_without_tokens_fill_the_cache_too() -> None:
    """Half a million empty prompts took ten times as much as the cache may have."""
    cache = TokenCache(4000)
    for number in range(100):
        cache.keep(b"%d" % number, np.zeros(0, np.uint32))
    assert sum(cache.find(b"%d" % number) is not None for number in range(100)) <= 4000 // ENTRY_BYTES


async def test_no_engine_is_asked_for_the_tokens_of_a_prompt_that_is_too_large() -> None:
    """One alone was sent whatever its size."""

    class Nobody:
        url = name = "http://engine"

    asked = read_request(RequestKind.COMPLETIONS, {"model": "m", "prompt": "a" * AT_ONCE_BYTES_MAX}, {})
    made = Tokens(cast(aiohttp.ClientSession, None), TokenCache(1000), Readers())
    with pytest.raises(NoTokensError, match="which no engine is asked for"):
        await made.of(asked, [cast(Engine, Nobody())], {}, "", "")
