"""The tier's lookups, loads and stores against a real server, over each transport, without vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from nixl_client.connectors.vllm_tier.jobs import TierJob, TierJobEnd
from nixl_client.connectors.vllm_tier.options import TierOptions
from nixl_client.connectors.vllm_tier.rules.naming import TierSpace, object_name
from nixl_client.connectors.vllm_tier.rules.rows import RowForm, UsedPages
from nixl_client.connectors.vllm_tier.rules.verdicts import Question
from nixl_client.connectors.vllm_tier.traffic import TierTraffic
from nixl_client.transports.shared_memory import allocate
from nixl_client.transports.transport import Transport
from tests.support.requests import OWNER, s3_client
from tests.support.servers import LocalStack
from tests.support.waiting import LIMIT_S, eventually

ROW, SLOTS = 8192, 32
FULL, STATE, SPLIT = 0, 1, 2
FORMS: dict[int, RowForm | None] = {
    FULL: RowForm.of([UsedPages(0, 4096, 4096, 2)], ROW),
    STATE: RowForm.of([UsedPages(0, 4096, 700, 1)], ROW),
    SPLIT: RowForm.of([UsedPages(0, 2048, 512, 4)], ROW),
}
SPACE = TierSpace("tiny", {"identity": "x"})
CANARY = 0xAA


def key(group: int, index: int) -> bytes:
    """vLLM's."""
    return bytes([group, index]).rjust(32, b"\1") + group.to_bytes(4, "big")


KEYS = [key(group, index) for index in range(4) for group in FORMS]


class Tier:
    """A primary tier and its traffic."""

    def __init__(self, options: TierOptions) -> None:
        self.region = allocate(ROW * SLOTS)
        self.rows = self.region.reshape(SLOTS, ROW)
        self.traffic = TierTraffic(options, SPACE, FORMS, self.region, ROW)
        self._count = 0

    def job(self, keys: Sequence[bytes], slots: Sequence[int], *, is_load: bool) -> TierJob:
        """A new job."""
        self._count += 1
        return TierJob(self._count, tuple(keys), tuple(slots), tuple(keys), is_load, time.monotonic())

    def done(self, job: TierJob) -> TierJobEnd:
        """How it ended, which nobody else asks for."""
        ended: list[TierJobEnd] = []
        assert eventually(lambda: bool(ended.extend(self.traffic.book.take()) or ended))
        (end,) = ended
        assert end.job is job
        return end

    def store(self, keys: Sequence[bytes], slots: Sequence[int]) -> TierJobEnd:
        """Store slots."""
        job = self.job(keys, slots, is_load=False)
        self.traffic.store(job)
        return self.done(job)

    def load(self, keys: Sequence[bytes], slots: Sequence[int]) -> TierJobEnd:
        """Load into slots."""
        job = self.job(keys, slots, is_load=True)
        self.traffic.load(job)
        return self.done(job)

    def found(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask."""
        self.traffic.ask(Question(1, tuple(keys)))
        return list(self.traffic.answers.get(timeout=LIMIT_S)[1])


@pytest.fixture
def options(local: LocalStack, transport: str, monkeypatch: pytest.MonkeyPatch) -> TierOptions:
    """The options of a tier over this transport; two objects fit into a staging buffer."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    return TierOptions(local.url, "chunks", Transport(transport), staging_bytes=4096, store_wait_s=600.0, retry_s=0.0)


@pytest.fixture
def tier(options: TierOptions) -> Iterator[Tier]:
    made = Tier(options)
    yield made
    made.traffic.close()


def fill(rows: np.ndarray) -> None:
    """Bytes that differ everywhere."""
    rows[:] = np.random.default_rng(7).integers(0, 256, rows.shape, dtype=np.uint8)


def is_used(group: int) -> np.ndarray:
    """The bytes of a row that the group uses."""
    form = FORMS[group]
    assert form is not None
    used = np.zeros(ROW, dtype=bool)
    for start, end in form.spans.tolist():
        used[start:end] = True
    return used


def test_used_bytes_alone_are_stored_and_loaded_to_scattered_slots(local: LocalStack, tier: Tier) -> None:
    """Whatever lies in the rest of a row, before and after."""
    fill(tier.rows)
    slots = [int(slot) for slot in np.random.default_rng(3).permutation(SLOTS)[: 2 * len(KEYS)]]
    sources, targets = slots[: len(KEYS)], slots[len(KEYS) :]
    content = tier.rows[sources].copy()
    assert tier.found(KEYS) == [False] * len(KEYS)
    assert tier.store(KEYS, sources).is_good
    assert tier.found([*KEYS, key(FULL, 99)]) == [True] * len(KEYS) + [False]
    tier.rows[:] = CANARY
    end = tier.load(KEYS, targets)
    assert (end.is_good, end.nbytes) == (True, 4 * (8192 + 700 + 2048))
    for chunk, row, each in zip(content, tier.rows[targets], KEYS, strict=True):
        used = is_used(each[-1])
        assert np.array_equal(row[used], chunk[used])
        assert (row[~used] == CANARY).all()
    assert (np.delete(tier.rows, targets, axis=0) == CANARY).all()
    s3 = s3_client(local.url)
    for chunk, each in zip(content, KEYS, strict=True):
        body = s3.get_object(Bucket="chunks", Key=object_name(SPACE.prefix, each))["Body"].read()
        assert body == chunk[is_used(each[-1])].tobytes()


def test_what_is_stored_is_not_written_again(tier: Tier) -> None:
    fill(tier.rows)
    tier.store(KEYS[:6], range(6))
    end = tier.store(KEYS, range(len(KEYS)))
    counts = tier.traffic.counters.totals
    assert (end.is_good, counts["stored_chunks"], counts["stored_already_chunks"]) == (True, len(KEYS), 6)


def test_chunks_that_are_lost_cost_themselves_alone(local: LocalStack, tier: Tier) -> None:
    fill(tier.rows)
    content = tier.rows[: len(KEYS)].copy()
    tier.store(KEYS, range(len(KEYS)))
    lost = {KEYS[0], KEYS[4], KEYS[8], KEYS[9]}
    for each in lost:
        s3_client(local.url).delete_object(Bucket="chunks", Key=object_name(SPACE.prefix, each))
    tier.rows[:] = CANARY
    end = tier.load(KEYS, range(12, 12 + len(KEYS)))
    assert (end.is_good, end.done) == (False, frozenset(KEYS) - lost)
    for index, each in enumerate(KEYS):
        used = is_used(each[-1])
        expected = np.full(ROW, CANARY) if each in lost else np.where(used, content[index], CANARY)
        assert np.array_equal(tier.rows[12 + index], expected)


def test_jobs_end_where_there_is_no_server(options: TierOptions) -> None:
    """Loads and lookups are misses, stores have not happened, and a second shutdown changes nothing."""
    away = Tier(TierOptions("http://127.0.0.1:9", "chunks", options.transport))
    assert away.found(KEYS) == [False] * len(KEYS)
    assert away.load(KEYS, range(len(KEYS))).done == frozenset()
    assert away.store(KEYS, range(len(KEYS))).done == frozenset()
    for _ in range(2):
        away.traffic.close()


def test_stores_beyond_the_queue_are_dropped_and_loads_are_not(options: TierOptions) -> None:
    tier = Tier(TierOptions(options.endpoint, options.bucket, options.transport, store_queue_chunks=5))
    end = tier.store(KEYS[:6], range(6))
    assert (end.done, tier.traffic.counters.totals["dropped_chunks"]) == (frozenset(), 6)
    assert tier.store(KEYS[:5], range(5)).is_good
    assert tier.load(KEYS[:5], range(20, 25)).is_good
    tier.traffic.close()
