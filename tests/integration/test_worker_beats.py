"""The owner of `serve --workers` notices a worker that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from objectcache.cli import workers
from objectcache.cli.workers import Workers
from tests.support.waiting import LIMIT_S, until

BEATS = """
import asyncio, os, sys
sys.path[:0] = {path!r}
from objectcache.cli import workers
workers.BEAT_S = 0.02
async def run():
    print("ready", flush=True)
    if {beats}:
        workers.beat(asyncio.get_running_loop(), 1)
    with open({file!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    await asyncio.Event().wait()
asyncio.run(run())
"""


def command(file: Path, *, beats: bool) -> list[str]:
    return [sys.executable, "-c", BEATS.format(path=[str(path) for path in sys.path], beats=beats, file=str(file))]


def started_pids(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.slow
async def test_a_worker_whose_event_loop_stands_still_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel goes on to give it connections, which nobody answers."""
    monkeypatch.setattr(workers, "SILENT_S", 0.2)
    monkeypatch.setattr(workers, "RESTART_DELAY_S", 0.0)
    file = tmp_path / "pids"
    silent = Workers(command(file, beats=False), 1)
    await silent.start()
    try:
        await until(lambda: len(started_pids(file)) >= 2)
    finally:
        await silent.stop()
    assert f"worker {started_pids(file)[0]} has not moved" in caplog.text


@pytest.mark.slow
async def test_a_worker_that_moves_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENT_S", 20.0)
    monkeypatch.setattr(workers, "SILENT_TIMES_MAX", 1)
    heard, read = asyncio.Event(), asyncio.StreamReader.read

    async def noted(reader: asyncio.StreamReader, n: int = -1) -> bytes:
        data = await read(reader, n)
        if data:
            heard.set()
        return data

    monkeypatch.setattr(asyncio.StreamReader, "read", noted)
    file = tmp_path / "pids"
    moving = Workers(command(file, beats=True), 1)
    await moving.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await heard.wait()
                heard.clear()
        assert len(started_pids(file)) == 1
    finally:
        await moving.stop()


async def test_a_worker_does_not_wait_for_an_owner_that_reads_nothing() -> None:
    """The owner may be stopped, too."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        os.set_blocking(writing, True)
        workers.beat(asyncio.get_running_loop(), writing)
    finally:
        os.close(reading)
        os.close(writing)
