"""The stores behind CASCADE's StorageAdapter: what is put is got, and a replay believes nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bench.beds.processes import BaselineError
from bench.paper.kv_stores.adapter import Prompt, Replay, StorageAdapter, block, replay, require_equal
from bench.paper.kv_stores.adapters import FilesAdapter
from bench.paper.kv_stores.running import RunningStore, StoreName, start
from objectcache.calibration.content import Bytes, VerificationError

BLOCK_BYTES = 64 * 1024
PROMPTS = [["a", "b", "c"], ["a", "b", "d"], ["a", "x"], ["y", "a"], ["a", "b", "c"]]
HITS = [0, 2, 1, 0, 3]


def work(prompts: list[list[str]] = PROMPTS) -> Replay:
    return Replay([Prompt(ids) for ids in prompts], BLOCK_BYTES)


@pytest.fixture(params=list(StoreName), ids=lambda name: name.value)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningStore]:
    with ExitStack() as stack:
        try:
            yield start(request.param, BLOCK_BYTES, 64 * BLOCK_BYTES, tmp_path, stack)
        except BaselineError as error:
            pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.needs_server
@pytest.mark.timeout(180)
def test_a_store_gives_back_what_was_put(store: RunningStore) -> None:
    """Twice, since a replay begins with an empty store; each byte is compared in the store's process."""
    for _ in range(2):
        replayed = store.replay(work())
        assert replayed.problem is None
        assert [answer.hit_blocks for answer in replayed.answers] == HITS
        assert all(answer.get_s > 0 for answer in replayed.answers)
    stored_bytes = store.stored_bytes()
    unique = {block_id for ids in PROMPTS for block_id in ids}
    assert stored_bytes is None or stored_bytes >= len(unique) * BLOCK_BYTES


class InMemory:
    """A StorageAdapter that can be made to lie."""

    def __init__(self) -> None:
        self.blocks: dict[str, tuple[Bytes, Bytes]] = {}
        self.answers = self.stores = True

    def initialize(self) -> bool:
        return self.answers

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        self.blocks[block_id] = key_data, value_data
        return self.stores

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        return self.blocks.get(block_id)

    def contains(self, block_id: str) -> bool:
        return block_id in self.blocks

    def clear(self) -> None:
        self.blocks.clear()


def test_a_replay_gets_what_leads_and_puts_the_rest(tmp_path: Path) -> None:
    adapters: list[StorageAdapter] = [InMemory(), FilesAdapter(tmp_path)]
    for adapter in adapters:
        assert [answer.hit_blocks for answer in replay(adapter, work()).answers] == HITS
        assert adapter.contains("d")
        assert not adapter.contains("e")
        assert adapter.get("e") is None


def test_wrong_bytes_and_refusals_end_a_replay() -> None:
    liar = InMemory()
    get = liar.get
    liar.get = lambda block_id: get("a")  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match="block b"):
        replay(liar, work())
    for attribute, message in (("answers", "does not answer"), ("stores", "was not stored")):
        refusing = InMemory()
        setattr(refusing, attribute, False)
        with pytest.raises(RuntimeError, match=message):
            replay(refusing, work())


def test_a_block_has_bytes_of_its_own() -> None:
    keys, values = block("a", 100)
    assert len(keys) == len(values) == 50
    assert not np.array_equal(keys, block("b", 100)[0])
    require_equal("a", block("a", 100), 100)
    with pytest.raises(VerificationError):
        require_equal("a", (keys, keys), 100)
