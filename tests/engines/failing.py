"""A warm store that is about to fail, and what engines must make of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.engines.engine import Engine
from tests.engines.messages import Json, Outcome, Prompt
from tests.engines.prompts import shared_prefixes
from tests.engines.store import Store, running_store

PROMPTS = shared_prefixes()
ONE = PROMPTS[:1]
ONE_TOKENS = 672
"""The whole chunks of its prompt: 21 of 32."""
QUICK: dict[str, Json] = {
    "load_timeout_s": 4.0,
    "lookup_timeout_s": 10.0,
    "retry_s": 0.5,
    "store_timeout_s": 3.0,
    "store_wait_s": 5.0,
    "drain_s": 5.0,
}
"""Waits of the connector that end soon."""
HANG_S = 15.0
"""A load that hangs is given up after so long; its first layer has come before."""
SLOW_LINK = "[scheduler]\nlink_bytes_per_s = 2e6\n"
"""The load of ONE then takes more than a second, in four layers."""
CRAWLING_LINK = "[scheduler]\nlink_bytes_per_s = 2e4\n"
RECOMPUTED = r"blocks were not loaded and will be recomputed"
NOT_STORED = r"chunks were not stored"
LOOKUP_FAILED = r"the lookup failed, taken as a miss"


@contextlib.contextmanager
def warm_store(folder: Path, config: str = "", port: int = 0) -> Iterator[Store]:
    """A server on a copy of what is `filled` that reads every chunk from disk."""
    with running_store(folder, config=config, options=("--dram-bytes", "0"), port=port) as store:
        yield store


def layerwise(store: Store, transport: str, load_timeout_s: float = 60.0) -> dict[str, Json]:
    """A connector whose loads come a layer at a time, whatever their size. The first layer has come in this time also
    on a machine that does much else.
    """
    waits = QUICK | {"load_timeout_s": load_timeout_s}
    return store.connector(transport=transport, delivery="layer-major", **waits)


def expect_recomputed(outcome: Outcome, wanted: list[list[int]], loaded_tokens: int = 0) -> None:
    """All of ONE that was not loaded was computed, and nothing is held any more."""
    assert outcome.tokens == wanted
    assert outcome.count("load_failures") >= 1
    assert outcome.count("loaded_tokens") == loaded_tokens
    assert outcome.count("lost_tokens") == ONE_TOKENS - loaded_tokens
    assert outcome.lost_blocks == 0


def has_loaded(engine: Engine, wanted: list[list[int]], prompts: Sequence[Prompt], token_count: int) -> bool:
    """Whether the engine, once it has forgotten its own blocks, loads so many tokens; its answer is right anyhow."""
    engine.forget()
    outcome = engine.generate(prompts)
    assert outcome.tokens == wanted
    return outcome.count("loaded_tokens") == token_count
