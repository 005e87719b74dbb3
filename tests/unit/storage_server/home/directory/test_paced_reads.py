"""Reads of a shared directory whose rate is bounded."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from storage_server.home.directory import reading
from storage_server.home.directory.reading import Rate, SharedRead
from storage_server.home.fetch.bulk_reads import Into
from storage_server.kernel.data.file_threads import FileThreads


async def test_a_read_that_waits_for_its_part_of_the_rate_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """All reads of a server share the rate, so that one may wait longer than a disk may be silent."""
    paused: list[tuple[float, float]] = []
    rate, threads = Rate(1.0, lambda: 0.0), FileThreads(1, 1)
    rate.wait_s(1000)  # others have taken their part
    into = Into(memoryview(bytearray(10)), 10, 10, lambda nbytes: None)
    read = SharedRead(into, lambda at, view: None, lambda at, nbytes: ("file", nbytes), rate, threads)

    def sleep(pause_s: float) -> None:
        paused.append((pause_s, read._progress.at_s - time.monotonic()))

    monkeypatch.setattr(reading, "time", SimpleNamespace(sleep=sleep))
    await read.body
    threads.close()
    ((pause_s, ahead_s),) = paused
    assert pause_s > 900
    assert ahead_s > pause_s - 60
