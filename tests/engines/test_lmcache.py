"""LMCache itself over the connector, in both its modes: what it stores comes back from the store byte by byte, and
whatever happens to the store is a miss.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.beds.processes import free_port
from tests.engines.environment import engine_python, engine_variables
from tests.engines.lmcache_run import LMCache, lmcache
from tests.engines.store import BUCKET, Store, running_store
from tests.support.tree import repository
from tests.support.waiting import eventually

CHUNK_TOKENS = 16
PATIENCE_S = 60.0
"""More than every deadline below; a hang would last for ever."""
RETRY_S = 0.5
PLUGIN = {
    "bucket": BUCKET,
    "staging_bytes": 1 << 20,
    "load_timeout_s": 2.0,
    "internals": {"lookup_timeout_s": 1.0, "store_timeout_s": 2.0, "retry_s": RETRY_S},
}
_seeds = itertools.count(1)

pytestmark = pytest.mark.timeout(240)


@dataclass
class Bench:
    """A store and LMCache over it."""

    mode: str
    store: Store
    cache: LMCache
    restart: Callable[[], None]
    """Start the store's server again, with what it has stored."""

    @property
    def ranks(self) -> int:
        return 1 if self.mode == "in-process" else 2

    def stored(self, chunk_count: int = 6) -> int:
        """The seed of a prompt that is stored, and no longer in LMCache's memory."""
        seed = next(_seeds)
        self.cache.put(seed, chunk_count * CHUNK_TOKENS)
        self.cache.forget()
        return seed

    def got(self, seed: int, chunk_count: int = 6) -> int:
        """How many chunks come back; nothing of them stays referred to."""
        tokens = self.cache.get(seed, chunk_count * CHUNK_TOKENS)
        self.cache.forget()
        return tokens // CHUNK_TOKENS


@pytest.fixture(scope="module", params=["in-process", "multiprocess"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One of LMCache's modes."""
    folder, port = tmp_path_factory.mktemp("lmcache"), free_port()
    with contextlib.ExitStack() as ends:

        def start() -> Store:
            return ends.enter_context(running_store(folder / "store", port=port))

        def restart() -> None:
            made.store = start()

        store = start()
        plugin = {**PLUGIN, "endpoint": store.endpoint}
        cache = ends.enter_context(lmcache(request.param, folder / "log", plugin=plugin))
        made = Bench(request.param, store, cache, restart)
        yield made
        cache.close()


def test_what_is_stored_comes_back_by_one_request(bench: Bench) -> None:
    """One descriptor request, whatever the number of chunks and ranks."""
    seed = bench.stored()
    before = bench.cache.counters()
    assert bench.got(seed) == 6
    after = bench.cache.counters()
    moved = {name: after[name] - before.get(name, 0) for name in ("fetches", "loaded_chunks", "matched_chunks")}
    assert moved == {"fetches": 1, "loaded_chunks": 6 * bench.ranks, "matched_chunks": 6 * bench.ranks}


def test_a_longer_prompt_reuses_the_shorter_one(bench: Bench) -> None:
    """Only what is missing is written."""
    seed = bench.stored(4)
    assert bench.cache.find(seed, 6 * CHUNK_TOKENS) == 4 * CHUNK_TOKENS
    before = bench.cache.counters()
    bench.cache.put(seed, 6 * CHUNK_TOKENS)
    bench.cache.forget()
    assert bench.cache.counters()["stored_chunks"] - before["stored_chunks"] == 2 * bench.ranks
    assert bench.got(seed) == 6


def test_a_chunk_deleted_between_lookup_and_load_is_a_miss(bench: Bench) -> None:
    seed = bench.stored()
    bench.cache.lose_before_load(bench.cache.names(seed, 6 * CHUNK_TOKENS)[3])
    assert bench.got(seed) == 3


def test_a_damaged_chunk_is_a_miss_and_is_written_again(bench: Bench) -> None:
    seed = bench.stored()
    bench.store.damage(bench.cache.names(seed, 6 * CHUNK_TOKENS)[2], 1000)
    assert bench.got(seed) == 2
    bench.cache.put(seed, 6 * CHUNK_TOKENS)
    bench.cache.forget()
    assert bench.got(seed) == 6


def test_a_chunk_of_another_size_is_a_miss_and_is_written_again(bench: Bench) -> None:
    """Half the size is the size of a chunk of half the tokens: still nothing to be used."""
    seed = bench.stored()
    name = bench.cache.names(seed, 6 * CHUNK_TOKENS)[5]
    bench.store.put(name, bench.store.get(name)[: 2 * 3 * 8 * 64 * 2])
    assert bench.got(seed) == 5
    bench.cache.put(seed, 6 * CHUNK_TOKENS)
    bench.cache.forget()
    assert bench.got(seed) == 6


def test_a_store_that_hangs_is_a_miss_within_its_deadlines(bench: Bench) -> None:
    """And one that answers again is used again."""
    seed = bench.stored()
    bench.store.stop()
    try:
        began_s = time.monotonic()
        assert bench.got(seed) == 0
        assert time.monotonic() - began_s < PATIENCE_S
        other = next(_seeds)
        bench.cache.put(other, 2 * CHUNK_TOKENS)
        bench.cache.forget()
    finally:
        bench.store.go_on()
    time.sleep(RETRY_S)  # so long a store that failed is left alone
    assert bench.got(seed) == 6
    assert bench.got(other, 2) == 0


def test_a_part_of_a_chunk_is_kept_where_lmcache_has_such(bench: Bench) -> None:
    """In process a prompt's last chunk may be shorter; the server's mode has whole ones only."""
    seed = next(_seeds)
    bench.cache.put(seed, 2 * CHUNK_TOKENS + 5)
    bench.cache.forget()
    whole = 2 * CHUNK_TOKENS
    assert bench.cache.get(seed, whole + 5) == (whole + 5 if bench.mode == "in-process" else whole)
    bench.cache.forget()


def test_a_killed_store_is_a_miss_and_a_new_one_is_used(bench: Bench) -> None:
    """LMCache runs on without it."""
    seed = bench.stored()
    bench.store.server.kill()
    began_s = time.monotonic()
    assert bench.got(seed) == 0
    assert time.monotonic() - began_s < PATIENCE_S
    bench.restart()
    time.sleep(RETRY_S)  # so long a store that failed is left alone
    assert bench.got(seed) == 6


LINK_BYTES_PER_S = 1e6
"""A chunk of one rank takes 12 ms, a chunk of both 25 ms."""


@pytest.mark.parametrize(
    ("token_us", "worth"),
    [({"in-process": 300, "multiprocess": 1100}, 0), ({"in-process": 5000, "multiprocess": 5000}, 6)],
    ids=["computed sooner", "loaded sooner"],
)
@pytest.mark.parametrize("mode", ["in-process", "multiprocess"])
def test_only_what_is_worth_loading_counts_as_stored(
    tmp_path: Path, mode: str, token_us: dict[str, int], worth: int
) -> None:
    """In the server's mode both ranks are weighed together: by itself each would be worth loading at 1,100 us."""
    config = f"[scheduler]\nlink_bytes_per_s = {LINK_BYTES_PER_S}\n"
    with running_store(tmp_path / "store", config=config) as store:
        costs = {"prefill": {"token_us": token_us[mode]}, "chunk_tokens": CHUNK_TOKENS}
        plugin = {**PLUGIN, "endpoint": store.endpoint, "load_timeout_s": 30.0, **costs}
        with lmcache(mode, tmp_path / "log", plugin=plugin, config={"blocking_timeout_secs": 60}) as cache:
            seed = next(_seeds)
            cache.put(seed, 6 * CHUNK_TOKENS)
            cache.forget()
            assert cache.get(seed, 6 * CHUNK_TOKENS) == worth * CHUNK_TOKENS
            counters = cache.counters()
            ranks = 1 if mode == "in-process" else 2
            assert counters["matched_chunks"] == 6 * ranks
            assert counters["advised_against_chunks"] == (6 - worth) * ranks
            cache.close()


def test_costs_without_the_tokens_of_a_chunk_are_an_error_of_the_l2_adapter(tmp_path: Path) -> None:
    """LMCache does not tell it, and nothing would be advised without a word."""
    plugin = {**PLUGIN, "endpoint": "http://127.0.0.1:9", "prefill": {"token_us": 100.0}}
    with pytest.raises(AssertionError, match="chunk_tokens"), lmcache("multiprocess", tmp_path / "log", plugin=plugin):
        pass


ADAPTIVE = """
[compression]
policy = "adaptive"
alpha_s = 0
memory_bytes_per_s = 1e8
home_bytes_per_s = 5e7
"""
"""Quality counts for nothing here, so that everything is encoded that somebody takes so."""


@pytest.mark.parametrize("mode", ["in-process", "multiprocess"])
def test_chunks_come_encoded_where_the_options_say_so(tmp_path: Path, mode: str) -> None:
    """LMCache gets KV that differs from its own by no more than the bound, and by something."""
    bound = 0.12
    with running_store(tmp_path / "store", config=ADAPTIVE) as store:
        plugin = {**PLUGIN, "endpoint": store.endpoint, "lossy": bound, "content_class": "test"}
        with lmcache(mode, tmp_path / "log", plugin=plugin, chunk_tokens=32, max_error=bound) as cache:
            seed = next(_seeds)
            cache.put(seed, 6 * 32)

            def is_encoded() -> bool:
                cache.forget()
                assert cache.get(seed, 6 * 32) == 6 * 32
                return cache.counters().get("lossy_chunks", 0) > 0

            assert eventually(is_encoded)
            counters = cache.counters()
            assert 0 < counters["lossy_error"] < bound * counters["loaded_chunks"]
            cache.close()


@pytest.mark.slow
def test_lmcaches_own_bench_stores_finds_and_loads_all(tmp_path: Path) -> None:
    """Its objects have no groups of layers, its lookups no layout, and each key has a rank of its own."""
    with running_store(tmp_path / "store") as store:
        adapter = {
            "type": "plugin",
            "module_path": "nixl_client.connectors.lmcache",
            "class_name": "ObjectCacheL2Adapter",
            "adapter_params": {"endpoint": store.endpoint, "bucket": BUCKET},
        }
        command = [
            str(engine_python().with_name("lmcache")), "bench", "l2", "--l2-adapter", json.dumps(adapter),
            "--num-keys", "8", "--in-flight", "2", "--data-size-kb", "64", "--rounds", "2", "--no-skip-verify",
            "--lookup-max-hit-rate", "0.5",
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=repository(), env=engine_variables(), capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    told = {line.partition(":")[0]: line.partition(":")[2].strip() for line in done.stdout.splitlines() if ":" in line}
    assert float(told["Actual hit rate"]) == 0.5
    counts = re.findall(r"Total success: +(\d+)", done.stdout)
    assert counts[0] == counts[2] == "32"
