"""vLLM over a cluster of three storage servers, one of which is killed under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.messages import Moment
from tests.engines.prompts import shared_prefixes
from tests.engines.store import connector_options, running_store
from tests.support.clusters import cluster

PROMPTS = shared_prefixes()


@pytest.mark.timeout(300)
@pytest.mark.engines_full
@pytest.mark.parametrize("transport", ["http", "shm"])
def test_tokens_stay_right_when_a_member_is_killed_in_a_load_and_comes_back(
    transport: str, engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """Its portion of every layer comes from the others, which have it from the home."""
    wanted = reference.tokens(PROMPTS)
    with running_store(tmp_path / "home") as home, cluster(tmp_path / "cluster", home.endpoint) as servers:
        options = connector_options(servers.gateways[0].url, transport=transport)
        with engines.cached(options) as engine:
            assert engine.generate_each(PROMPTS).tokens == wanted
            assert home.keys() != set()
            engine.forget()
            warm = engine.generate_each(PROMPTS)
            assert warm.tokens == wanted
            assert warm.count("loaded_tokens") > 0
            engine.forget()
            victim = servers.members["b"]
            killed = engine.generate(PROMPTS[:1], at=Moment.LAYER, do=victim.kill)
            assert killed.tokens == wanted[:1]
            assert killed.has_happened
            engine.forget()
            after = engine.generate_each(PROMPTS)
            assert after.tokens == wanted
            victim.start()
            engine.forget()
            again = engine.generate_each(PROMPTS)
            assert again.tokens == wanted
            assert again.lost_blocks == 0
            engine.stop()
