"""Engines that prefill and engines that decode: through the store, and beside a connector from engine to engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.beds.processes import free_port
from tests.engines.conftest import Engines, Reference
from tests.engines.messages import Json
from tests.engines.model import make_model
from tests.engines.multi_engine import Launch, live_engines, object_cache, several
from tests.engines.prompts import shared_prefixes, unrelated
from tests.engines.store import Store

pytestmark = pytest.mark.timeout(300)
NIXL: dict[str, Json] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.mark.engines_full
def test_a_decode_engine_loads_all_that_a_prefill_engine_has_computed(
    engines: Engines, reference: Reference, store: Store
) -> None:
    """All whole chunks but the one with the last token, of which at least one token must be computed."""
    prompts = shared_prefixes()
    wanted = reference.tokens(prompts)
    roles = [object_cache(store.connector(), role) for role in ("kv_producer", "kv_consumer")]
    with (
        engines.cached(store.connector(), kv_transfer_config=roles[0]) as prefill,
        engines.cached(store.connector(), kv_transfer_config=roles[1]) as decode,
    ):
        for prompt, tokens in zip(prompts, wanted, strict=True):
            first = prefill.generate([prompt], 1)
            assert first.tokens == [tokens[:1]]
            assert (first.count("loaded_tokens"), first.lost_blocks) == (0, 0)
            decoded = decode.generate([prompt])
            assert decoded.tokens == [tokens]
            assert decoded.count("loaded_tokens") == (len(prompt.tokens) - 1) // 32 * 32
            assert (decoded.count("stored_chunks"), decoded.lost_blocks) == (0, 0)
            decode.forget()
        prefill.stop()
        decode.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the reference."""
    folder = tmp_path_factory.mktemp("peers") / "model"
    make_model(folder)
    return folder


def peer(model: Path, transfer: dict[str, Json]) -> Launch:
    """An engine that others can reach through NIXL over TCP."""
    variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,self"}
    return Launch(model, {"kv_transfer_config": transfer}, variables)


@pytest.mark.engines_full
def test_beside_a_peer_to_peer_connector_the_one_named_first_loads_and_both_are_given_what_is_computed(
    model: Path, reference: Reference, store: Store
) -> None:
    """MultiConnector over NIXL from engine to engine: KV comes from the peer, without one from the store."""
    prompts = unrelated(5, 3, 330)
    wanted = reference.tokens(prompts)
    ours = object_cache(store.connector())
    reading = object_cache(store.connector(store=False))
    with live_engines(
        peer(model, several(NIXL, ours)), peer(model, several(NIXL, reading)), peer(model, several(reading, NIXL))
    ) as (prefill, decode, stored_first):
        for prompt, tokens in zip(prompts[:2], wanted, strict=False):
            first = prefill.generate([prompt], 1, transfer={"do_remote_decode": True, "do_remote_prefill": False})
            assert first.tokens == [tokens[:1]]
            assert decode.generate([prompt], transfer=first.transfer[0]).tokens == [tokens]
        assert (decode.count("lookups"), decode.count("store_hit_tokens")) == (2, 0)
        assert prefill.count("stored_chunks", chunks=20) == 20

        first = prefill.generate(prompts[2:], 1, transfer={"do_remote_decode": True, "do_remote_prefill": False})
        assert prefill.count("stored_chunks", chunks=30) == 30
        assert stored_first.generate(prompts[2:], transfer=first.transfer[0]).tokens == wanted[2:]
        assert stored_first.count("loaded_tokens") == 320

        assert decode.ask("forget")
        assert decode.generate(prompts).tokens == wanted
        assert decode.count("loaded_tokens") == 3 * 320
        assert [engine.held_blocks() for engine in (prefill, decode, stored_first)] == [0, 0, 0]


@pytest.mark.engines_full
def test_what_another_connector_could_not_load_is_not_stored_before_it_has_been_computed(
    engines: Engines, reference: Reference, store: Store
) -> None:
    """The step that was to load a prompt ends with nothing in its blocks; stored, they would be hit for ever."""
    prompts = unrelated(6, 3, 330)
    wanted = reference.tokens(prompts)
    faulty: dict[str, Json] = {
        "kv_connector": "FaultyConnector",
        "kv_connector_module_path": "tests.engines.multi_faulty",
        "kv_role": "kv_both",
    }
    with engines.plain(kv_transfer_config=several(faulty, object_cache(store.connector()))) as engine:
        assert engine.generate(prompts).tokens == wanted
        engine.stop()
    assert len(store.keys()) == 33
    with engines.cached(store.connector(store=False)) as engine:
        warm = engine.generate(prompts)
        assert warm.tokens == wanted
        assert warm.count("loaded_tokens") == 3 * 320
