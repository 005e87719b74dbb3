"""Blocks of an adapter are named by its contents, however the request grows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from nixl_client.connectors.vllm_tier.rules.adapters import AdapterHashes, may_have_adapters

BLOCK = 4


@dataclass
class PlayedLora:
    lora_name: str
    lora_path: str


@dataclass
class PlayedRequest:
    """A request as vLLM has it; `all_token_ids` grow."""

    lora_request: PlayedLora
    all_token_ids: list[int]
    block_hashes: list[bytes] = field(default_factory=list)

    def say(self, tokens: Sequence[int]) -> None:
        """Take on tokens, and hash the blocks that they fill."""
        self.all_token_ids += tokens
        self.block_hashes += hasher(self)


def hasher(request: Any) -> list[bytes]:
    """As vLLM's: each block with the one before it, and with the adapter's name and path."""
    lora, tokens = request.lora_request, request.all_token_ids
    hashes, made = list(request.block_hashes), []
    for start in range(len(hashes) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        parent = hashes[-1] if hashes else b""
        text = f"{parent!r} {tokens[start : start + BLOCK]} {lora.lora_name!r} {lora.lora_path!r}"
        hashes.append(hashlib.sha256(text.encode()).digest())
        made.append(hashes[-1])
    return made


def asked(name: str, path: str, tokens: Sequence[int]) -> PlayedRequest:
    request = PlayedRequest(PlayedLora(name, path), [])
    request.say(tokens)
    return request


def test_requests_of_the_same_contents_have_the_same_names_and_others_have_others() -> None:
    tokens = list(range(19))
    one, other = asked("a", "/x/a", tokens), asked("b", "/y/b", tokens)
    assert not set(one.block_hashes) & set(other.block_hashes)
    names = [[AdapterHashes(each, hasher, "sum-1")(block) for block in each.block_hashes] for each in (one, other)]
    assert names[0] == names[1]
    assert len(set(names[0])) == 4
    replaced = AdapterHashes(one, hasher, "sum-2")
    assert not {replaced(block) for block in one.block_hashes} & set(names[0])


def test_blocks_that_come_later_go_on_from_those_before() -> None:
    whole = asked("a", "/x/a", range(40))
    wanted = [AdapterHashes(whole, hasher, "sum")(block) for block in whole.block_hashes]
    request = asked("a", "/x/a", range(6))
    names = AdapterHashes(request, hasher, "sum")
    found = []
    for number in range(6, 41):
        found += [names(block) for block in request.block_hashes[len(found) :]]
        request.say([number] * (number < 40))
    assert found == wanted
    assert None not in found


def test_a_block_of_another_request_has_no_name() -> None:
    one, other = asked("a", "/x/a", range(8)), asked("a", "/x/a", range(1, 9))
    names = AdapterHashes(one, hasher, "sum")
    assert names(other.block_hashes[0]) is None
    assert names(one.block_hashes[1]) is not None


def test_a_request_whose_tokens_change_has_no_more_names() -> None:
    """A turn of a session may take tokens back: names must not go on from tokens that are not there any more."""
    request = asked("a", "/x/a", range(8))
    names = AdapterHashes(request, hasher, "sum")
    assert names(request.block_hashes[1]) is not None
    request.all_token_ids, request.block_hashes = [], []
    request.say(range(50, 70))
    assert [names(block) for block in request.block_hashes] == [None] * 5


def test_once_the_adapter_has_changed_no_block_has_a_name() -> None:
    """The worker may compute with the other adapter from then on, also where the files change back."""
    request, answers = asked("a", "/x/a", range(8)), [True, False, True]
    names = AdapterHashes(request, hasher, "sum", lambda: answers.pop(0))
    found = []
    for _ in range(3):
        names.check()
        found.append([names(block) is not None for block in request.block_hashes])
    assert found == [[True, True], [False, False], [False, False]]


@pytest.mark.parametrize(
    ("told", "said", "wanted"),
    [
        (None, [], True),
        (None, [False, False], False),
        (None, [False, True], True),
        (False, [], False),
        (True, [], True),
        (False, [True], True),
        (True, [False], True),
    ],
)
def test_where_nobody_says_that_there_are_no_adapters_there_may_be(
    told: bool | None, said: list[bool], wanted: bool
) -> None:
    assert may_have_adapters(told, said) == wanted
