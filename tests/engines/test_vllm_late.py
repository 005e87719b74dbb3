"""A link that loses its rate while a prefix is on its way: the engine does not wait for what it computes sooner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.engine import Engine
from tests.engines.messages import Outcome
from tests.engines.model import LAYERS, TOKEN_BYTES
from tests.engines.prompts import unrelated
from tests.engines.slow_proxy import FailingLink, failing_proxy
from tests.engines.store import connector_options, running_store

pytestmark = [pytest.mark.timeout(600), pytest.mark.engines_full]
TOKENS = 960
PROMPT = unrelated(21, 1, TOKENS)
WARM_UP_STEPS = 4
ROUNDS_MAX = 20
LATE = rf"blocks were not loaded and will be recomputed: late, [1-{LAYERS}] of {LAYERS} to come"
LAYER_BYTES = TOKENS * TOKEN_BYTES // LAYERS


def warmed_up(engine: Engine) -> None:
    """Steps of several sizes have been timed, so the engine knows what computing costs."""
    for count in range(WARM_UP_STEPS):
        engine.generate_each(unrelated(30 + count, 2, 200 + 200 * count))
    engine.forget()


def cut_short(engine: Engine, link: FailingLink, wanted: list[list[int]]) -> Outcome:
    """The first round in which the prefix is loaded at all, and the link fails in the middle of the load."""
    for _ in range(ROUNDS_MAX):
        engine.forget()
        link.lose_rate_after(LAYER_BYTES + LAYER_BYTES // 2)
        outcome = engine.generate(PROMPT)
        has_failed = link.has_lost_rate
        link.recover()
        assert outcome.tokens == wanted
        if has_failed:
            return outcome
    raise AssertionError("the prefix was never loaded")


def test_a_load_whose_link_loses_its_rate_is_cut_short_and_its_tail_is_computed(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """The first layer has come, and the others would take hours. The deadline of a load is far away: nothing but the
    comparison with computing can end the wait.
    """
    tokens = reference.tokens(PROMPT)
    with (
        running_store(tmp_path / "store", config="[scheduler]\nlink_bytes_per_s = 1e10\n") as store,
        failing_proxy(store.endpoint) as (endpoint, link),
    ):
        with engines.cached(store.connector()) as engine:
            assert engine.generate(PROMPT).tokens == tokens
            engine.stop()
        options = connector_options(
            endpoint,
            load="advised",
            transport="http",
            delivery="layer-major",
            min_load_tokens=0,
            load_timeout_s=120.0,
            retry_s=0.1,
        )
        with engines.cached(options) as engine:
            warmed_up(engine)
            outcome = cut_short(engine, link, tokens)
            assert engine.has_said(LATE)
            assert outcome.count("late_loads") >= 1
            assert outcome.count("lost_tokens") > 0
            assert outcome.lost_blocks == 0
            engine.forget()
            again = engine.generate(PROMPT)
            assert (again.tokens, again.lost_blocks) == (tokens, 0)
            engine.stop()
