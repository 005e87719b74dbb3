"""Images: their KV is stored and loaded, and no image has another's, though the tokens in their place are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engines.conftest import Engines
from tests.engines.engine import Engine
from tests.engines.image_model import make_image_model
from tests.engines.messages import Json, Prompt
from tests.engines.store import Store

pytestmark = pytest.mark.timeout(300)
TEXT = tuple(number % 250 + 3 for number in range(0, 900, 7))
PROMPTS = [Prompt(TEXT, image=1), Prompt(TEXT, image=2), Prompt(TEXT), Prompt((*TEXT[:70], *TEXT[:40]), image=1)]
OPTIONS: dict[str, Json] = {"skip_tokenizer_init": False, "max_model_len": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It sees images."""
    folder = tmp_path_factory.mktemp("images")
    make_image_model(folder)
    return folder


def restarted(engines: Engines, store: Store, model: Path, *, is_tier: bool) -> Iterator[Engine]:
    """An engine that fills the store, and one that finds it filled."""
    for _ in range(2):
        made: AbstractContextManager[Engine] = (
            engines.tiered(store.tier(), model, is_asynchronous=True, **OPTIONS)
            if is_tier
            else engines.cached(store.connector(), model, **OPTIONS)
        )
        with made as engine:
            yield engine
            engine.stop()


@pytest.mark.parametrize("is_tier", [True, False])
def test_images_are_cached_and_told_apart(engines: Engines, store: Store, model: Path, is_tier: bool) -> None:
    with engines.plain_of(model, enable_prefix_caching=False, **OPTIONS) as engine:
        wanted = engine.generate_each(PROMPTS).tokens
    assert len(set(map(tuple, wanted))) == len(PROMPTS), "what is seen must decide what is said"
    cold, warm = (engine.generate_each(PROMPTS) for engine in restarted(engines, store, model, is_tier=is_tier))
    assert [cold.tokens, warm.tokens] == [wanted, wanted]
    assert warm.count("loaded_chunks") >= 3 * (len(TEXT) // 32)
    assert (warm.count("load_failures"), warm.lost_blocks) == (0, 0)
