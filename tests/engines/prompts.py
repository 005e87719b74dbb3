"""Prompts by seed."""

from __future__ import annotations

import random

from tests.engines.messages import Prompt
from tests.engines.model import VOCABULARY

LONGEST = 640
"""Tokens of the longest prefix of `shared_prefixes`."""


def shared_prefixes() -> list[Prompt]:
    """Prompts that share prefixes of different lengths, some whole chunks, some not; two are nothing but prefixes."""
    source = random.Random(11)
    base = _tokens(source, LONGEST)
    cuts = (640, 640, 500, 256, 255, 257, 96, 32)
    return [Prompt((*base[:cut], *_tokens(source, 40))) for cut in cuts] + [Prompt(base[:cut]) for cut in (640, 33, 31)]


def unrelated(seed: int, count: int, token_count: int) -> list[Prompt]:
    """Prompts that share nothing."""
    source = random.Random(seed)
    return [Prompt(_tokens(source, token_count)) for _ in range(count)]


def prefix_tree(seed: int, count: int, salts: tuple[str, ...] = ("",)) -> list[Prompt]:
    """Prompts along the branches of a tree of prefixes: a branch is drawn, sometimes grown, and asked something."""
    source = random.Random(seed)
    branches: list[tuple[int, ...]] = [()]
    prompts = []
    for _ in range(count):
        branch = source.choice(branches)
        if len(branch) < LONGEST and source.random() < 0.6:
            branch = (*branch, *_tokens(source, source.randrange(10, 200)))[:LONGEST]
            branches.append(branch)
        prompts.append(Prompt((*branch, *_tokens(source, source.randrange(1, 60))), source.choice(salts)))
    return prompts


def batches(seed: int, prompts: list[Prompt], size_max: int) -> list[list[Prompt]]:
    """The prompts in groups of 1 to `size_max`."""
    source = random.Random(seed)
    left, groups = list(prompts), []
    while left:
        size = source.randint(1, size_max)
        groups.append(left[:size])
        left = left[size:]
    return groups


def _tokens(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(VOCABULARY) for _ in range(count))
