"""Jobs are reported once."""

from __future__ import annotations

import random

from nixl_client.connectors.vllm_tier.jobs import TierJob, TierJobEnd, TierJobs


def job(number: int, *, is_load: bool = True, chunks: int = 2) -> TierJob:
    keys = tuple(bytes([number % 256, index]) for index in range(chunks))
    return TierJob(number, keys, tuple(range(chunks)), keys, is_load, 0.0)


def test_each_job_is_reported_once_whoever_ends_it() -> None:
    """Ended, dropped at a drain, and ended again, in any order."""
    book, source = TierJobs(), random.Random(4)
    jobs = [job(number) for number in range(200)]
    for each in jobs:
        book.begin(each)
    ends = [TierJobEnd(each, frozenset(each.keys[: source.randrange(3)])) for each in jobs * 3]
    source.shuffle(ends)
    reported: list[int] = []
    for end in ends:
        book.end(end)
        if source.random() < 0.1:
            reported += [each.job.job_id for each in book.take()]
    reported += [each.job.job_id for each in book.take()]
    assert sorted(reported) == list(range(200))
    assert (book.running_count, book.wait_idle(0.0), list(book.take())) == (0, True, [])


def test_a_job_is_good_where_all_of_it_is_done() -> None:
    both = job(1)
    assert TierJobEnd(both, frozenset(both.keys)).is_good
    assert not TierJobEnd(both, frozenset(both.keys[:1])).is_good


def test_chunks_of_stores_that_wait_are_counted() -> None:
    book = TierJobs()
    for number, is_load in ((1, True), (2, False), (3, False)):
        book.begin(job(number, is_load=is_load, chunks=5))
    assert book.waiting_chunks == 10
    assert not book.wait_idle(0.0)
