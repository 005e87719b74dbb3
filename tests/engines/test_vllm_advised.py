"""What is stored is loaded where that is sooner than computing it; the engine measures what computing costs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.engine import Engine, Outcome
from tests.engines.prompts import shared_prefixes
from tests.engines.store import running_store

pytestmark = pytest.mark.timeout(300)
PROMPTS = shared_prefixes()
WARM_UP_STEPS = 3
ROUNDS_MAX = 20


def warmed_up(engine: Engine) -> None:
    """Prompts and decodes of several sizes have been timed; the engine's own blocks are forgotten."""
    for _ in range(WARM_UP_STEPS):
        engine.generate_each(PROMPTS)
        engine.forget()


def decision(is_loaded: bool) -> str:
    """The counter that says it."""
    return "loaded_tokens" if is_loaded else "advised_against_tokens"


def settled(engine: Engine, counter: str | None) -> Outcome:
    """The first round in which the counter counts, or the last: a load that failed silences the lookups for a while."""
    for _ in range(ROUNDS_MAX):
        outcome = engine.generate_each(PROMPTS)
        if counter is None or outcome.count(counter) > 0:
            break
        engine.forget()
    return outcome


@pytest.mark.parametrize(
    ("link_bytes_per_s", "is_loaded"),
    [
        pytest.param(None, None, marks=pytest.mark.engines_full),
        pytest.param(1e10, True, marks=pytest.mark.engines_full),
        pytest.param(1e5, False, marks=pytest.mark.engines_full),
    ],
    ids=["unpaced", "fast", "slow"],
)
def test_what_is_sooner_computed_than_loaded_is_computed(
    engines: Engines, reference: Reference, tmp_path: Path, link_bytes_per_s: float | None, is_loaded: bool | None
) -> None:
    """The tokens are the same either way, and nothing that is stored is written again."""
    wanted = reference.tokens(PROMPTS)
    config = "" if link_bytes_per_s is None else f"[scheduler]\nlink_bytes_per_s = {link_bytes_per_s}\n"
    with running_store(tmp_path / "writer") as store:
        with engines.cached(store.connector()) as engine:
            assert engine.generate_each(PROMPTS).tokens == wanted
            engine.stop()
        store.server.terminate()
        with running_store(tmp_path / "paced", data=store.data, config=config) as paced:
            # what the link is too slow for is not to be waited for while costs are unknown
            advised = paced.connector(load="advised", min_load_tokens=0, load_timeout_s=1.0, retry_s=0.1)
            with engines.cached(advised) as engine:
                warmed_up(engine)
                outcome = settled(engine, None if is_loaded is None else decision(is_loaded))
                assert outcome.tokens == wanted
                if is_loaded is not None:  # on an unpaced way it depends on the machine
                    assert (outcome.count("loaded_tokens") > 0) is is_loaded
                    assert is_loaded or outcome.count("advised_against_tokens") > 0
                assert outcome.count("stated_loads") >= outcome.count("loads")  # a load that comes late is stated, too
                assert outcome.count("stored_chunks") == 0
                engine.stop()
