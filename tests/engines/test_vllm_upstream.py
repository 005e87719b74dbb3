"""vLLM over a server that stands in front of another S3 service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from descriptors.chunk_names import is_chunk_key
from tests.engines.conftest import Engines, Reference
from tests.engines.prompts import shared_prefixes
from tests.engines.store import Store, running_store
from tests.support.requests import OWNER

PROMPTS = shared_prefixes()


@contextmanager
def front(folder: Path, home: Store) -> Iterator[Store]:
    """A server with an empty cache in front of `home`."""
    account = f'[upstream]\naccess_key = "{OWNER[0]}"\nsecret_key = "{OWNER[1]}"\n'
    with running_store(folder, config=account, options=("--upstream", home.endpoint)) as running:
        yield running


@pytest.mark.timeout(300)
def test_tokens_are_the_same_over_an_upstream_service(engines: Engines, reference: Reference, tmp_path: Path) -> None:
    """Chunks are plain objects there. A second server that has none of them fetches them while the engine computes."""
    wanted = reference.tokens(PROMPTS)
    with running_store(tmp_path / "home") as home:
        with front(tmp_path / "first", home) as store, engines.cached(store.connector()) as engine:
            assert engine.generate_each(PROMPTS).tokens == wanted
            engine.stop()
            stored = home.keys()
            assert stored == store.keys() != set()
            assert all(map(is_chunk_key, stored))
        with front(tmp_path / "second", home) as store, engines.cached(store.connector()) as engine:
            for _ in range(2):
                warm = engine.generate_each(PROMPTS)
                assert warm.tokens == wanted
                assert warm.count("loaded_tokens") > 0
                assert (warm.count("stored_chunks"), warm.count("load_failures"), warm.lost_blocks) == (0, 0, 0)
                engine.forget()
            engine.stop()
