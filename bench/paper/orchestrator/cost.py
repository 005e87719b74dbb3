"""The cost of a decision, the time that the orchestrator adds to a stream, and the metadata's times beside etcd's."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp

from bench.beds.canned_engines import MODEL
from bench.beds.orchestrators import START_S, await_engine, orchestrator_process
from bench.beds.processes import BaselineError, Child, await_ready, free_port, running_program
from objectcache.adapters.etcd import Etcd, EtcdError
from objectcache.calibration.samples import spread
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.metadata import Metadata
from objectcache.orchestrator.metadata_blocks import CacheEntry
from objectcache.orchestrator.router import Prompt, Router
from objectcache.orchestrator.rules.chains import block_hashes, root_hash
from objectcache.orchestrator.rules.engine_metrics import EngineReport
from objectcache.orchestrator.rules.kv_events import name_bytes
from objectcache.orchestrator.rules.openai_requests import Asked, RequestKind, token_ids
from objectcache.orchestrator.rules.policies import LeastTtft
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import EngineSettings

BLOCK_TOKENS = 16
WARM_STREAMS = 50
ETCD_ASKED_EVERY_S = 0.02
_CLOCK = os.sysconf("SC_CLK_TCK")


def decisions(engine_count: int, block_count: int, prompt_tokens: int, samples: int) -> dict[str, Any]:
    """Microseconds of a decision, without and with the names of the prompt's blocks, for engines that each hold a part
    of the prompt and many blocks beside it.
    """
    index, engines = PrefixIndex(), {}
    numbers = random.Random(7)
    prompts = [[numbers.randrange(1 << 17) for _ in range(prompt_tokens)] for _ in range(8)]
    chains = [block_hashes(prompt, BLOCK_TOKENS, root_hash()) for prompt in prompts]
    nothing: Any = None
    for at in range(engine_count):
        engine = Engine(EngineSettings(f"http://{at}:1", requests_max=64, token_us=100.0), nothing, index, 1.0, 1.0)
        engine.liveness.succeeded(time.monotonic())
        engine.report = EngineReport(0, 0, 1 << 30, BLOCK_TOKENS)
        engines[engine.name] = engine
        part = chains[at % len(chains)][: numbers.randrange(len(chains[0]))]
        filler = block_count // engine_count - len(part)
        blocks = [*part, *(numbers.randbytes(16) for _ in range(max(0, filler)))]
        index.restore(engine.name, ((name_bytes(number), block) for number, block in enumerate(blocks)))
    router = Router(engines, index, LeastTtft(), None, {}, 1024)
    took_us: list[float] = []
    named_us: list[float] = []
    for at in range(samples + len(prompts)):
        tokens = prompts[at % len(prompts)]
        asked = Asked(RequestKind.COMPLETIONS, "", token_ids(tokens), None, 100, True, f"session {at % 100}", "", False)
        prompt = Prompt(tokens, "", "", {}, {(BLOCK_TOKENS, ""): chains[at % len(prompts)]})
        began_s = time.perf_counter()
        routed = router.decide(asked, str(at), prompt)
        decided_s = time.perf_counter()
        whole = Prompt(tokens, "", "", {}, {})
        whole.chain(BLOCK_TOKENS)
        named_s = time.perf_counter() - decided_s
        router.sent(routed, asked, str(at), prompt)
        routed.engine.books.end(str(at), time.monotonic(), is_complete=False)
        if at >= len(prompts):
            took_us.append((decided_s - began_s) * 1e6)
            named_us.append(named_s * 1e6)
    return {
        "engines": engine_count,
        "indexed_blocks": index.block_count,
        "prompt_tokens": prompt_tokens,
        "decision_us": spread(took_us),
        "naming_us": spread(named_us),
    }


@dataclass(frozen=True, slots=True)
class Streamed:
    """Streams through one address: the wall seconds of all, and the CPU seconds of the orchestrator for each."""

    wall_s: float
    cpu_s: float


def streams(stream_count: int, piece_count: int, at_once: int) -> dict[str, Any]:
    """Streams of a canned engine, straight and through an orchestrator, by turns of two halves: CPU time that the
    orchestrator takes for each stream, and what a stream of many tokens takes longer for each token.
    """
    engine = Child("bench.beds.canned_engines", "--token-us", "0", "--output-s", "0", "--no-events")
    try:
        with orchestrator_process([engine.ready]) as (url, pid):
            await_engine(url)
            through: list[Streamed] = []
            straight: list[Streamed] = []
            for _ in range(2):
                through.append(_streamed(url, pid, stream_count // 2, piece_count, at_once))
                straight.append(_streamed(engine.ready, None, stream_count // 2, piece_count, at_once))
            added_us = [
                (_one_long(url, LONG_PIECES) - _one_long(engine.ready, LONG_PIECES)) / LONG_PIECES * 1e6
                for _ in range(LONG_ROUNDS)
            ]
    finally:
        engine.close()
    cpu_s = sum(each.cpu_s for each in through) / stream_count
    return {
        "streams": stream_count,
        "pieces": piece_count,
        "at_once": at_once,
        "cpu_us_per_stream": cpu_s * 1e6,
        "streams_per_core_s": 1 / cpu_s,
        "streams_per_s": stream_count / sum(each.wall_s for each in through),
        "straight_streams_per_s": stream_count / sum(each.wall_s for each in straight),
        "added_us_per_token": spread(added_us),
    }


LONG_PIECES, LONG_ROUNDS = 2000, 9


def _streamed(url: str, pid: int | None, count: int, pieces: int, at_once: int) -> Streamed:
    async def run() -> float:
        connector = aiohttp.TCPConnector(limit=at_once)
        async with aiohttp.ClientSession(connector=connector) as http:
            await _all(http, url, WARM_STREAMS, pieces, at_once)
            began_s = time.monotonic()
            await _all(http, url, count, pieces, at_once)
            return time.monotonic() - began_s

    before_s = 0.0 if pid is None else cpu_seconds(pid)
    wall_s = asyncio.run(run())
    spent_s = 0.0 if pid is None else cpu_seconds(pid) - before_s
    return Streamed(wall_s, spent_s * count / (count + WARM_STREAMS))


async def _all(http: aiohttp.ClientSession, url: str, count: int, pieces: int, at_once: int) -> None:
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            body = {"model": MODEL, "prompt": [number % 5000, 1, 2, 3], "max_tokens": pieces, "stream": True}
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                said = await answer.read()
            if answer.status != 200 or said.count(b'"text"') != pieces or not said.endswith(b"data: [DONE]\n\n"):
                raise BaselineError(f"a stream came wrong: {answer.status} {said[:200]!r}")

    await asyncio.gather(*(worker() for _ in range(at_once)))


def _one_long(url: str, pieces: int) -> float:
    async def run() -> float:
        async with aiohttp.ClientSession() as http:
            began_s = time.monotonic()
            await _all(http, url, 1, pieces, 1)
            return time.monotonic() - began_s

    return asyncio.run(run())


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK


def metadata_times(counts: tuple[int, ...], folder: Path) -> list[dict[str, Any]]:
    """003's table: entries registered in one batch by a process that is then killed, and read by another one."""
    return [_metadata_times(count, folder / f"metadata-{count}") for count in counts]


def _metadata_times(count: int, place: Path) -> dict[str, Any]:
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=_register, args=(count, place, there))
    process.start()
    there.close()
    try:
        write_s = here.recv()
    except EOFError:
        raise BaselineError("the process that registers entries has ended") from None
    finally:
        process.kill()
        process.join()
        here.close()
    began_s = time.perf_counter()
    again = Metadata(place)
    opened_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    for at in range(0, count, max(1, count // 100)):
        again.blocks.find(f"node-{at % 16}", at.to_bytes(16, "big"))
    lookup_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    read = sum(1 for _ in again.blocks.all())
    recovered_s = time.perf_counter() - began_s
    again.close()
    if read != count:
        raise BaselineError(f"{read} of {count} entries came back")
    return {
        "entries": count, "write_ms": write_s * 1e3, "open_ms": opened_s * 1e3, "lookup_100_ms": lookup_s * 1e3,
        "recovery_ms": (opened_s + recovered_s) * 1e3,
    }  # fmt: skip


def _register(count: int, place: Path, pipe: Connection) -> None:
    """Register entries, say how long it took, and wait to be killed."""
    entries = [
        CacheEntry(f"node-{at % 16}", at.to_bytes(16, "little"), at.to_bytes(16, "big"), "llama-70b", float(at))
        for at in range(count)
    ]
    metadata = Metadata(place)
    began_s = time.perf_counter()
    metadata.blocks.note(entries)
    pipe.send(time.perf_counter() - began_s)
    with suppress(EOFError):  # where the other process has ended
        pipe.recv()


def etcd_times(counts: tuple[int, ...], folder: Path) -> list[dict[str, Any]] | None:
    """The same entries in an etcd of its own; None where it is not installed. It is killed before they are read."""
    if shutil.which("etcd") is None:
        return None
    found = []
    for count in counts:
        place, client, peer = folder / f"etcd-{count}", free_port(), free_port()
        with _etcd(place, client, peer):
            began_s = time.perf_counter()
            asyncio.run(_put_all(f"http://127.0.0.1:{client}", count))
            write_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        with _etcd(place, client, peer):
            opened_s = time.perf_counter() - began_s
            read = asyncio.run(_read_all(f"http://127.0.0.1:{client}"))
            recovered_s = time.perf_counter() - began_s
        if read != count:
            raise BaselineError(f"{read} of {count} entries came back from etcd")
        found.append(
            {"entries": count, "write_ms": write_s * 1e3, "open_ms": opened_s * 1e3, "recovery_ms": recovered_s * 1e3}
        )
    return found


@contextmanager
def _etcd(folder: Path, client: int, peer: int) -> Iterator[None]:
    """An etcd that answers; it is killed at the end."""
    url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = [
        "etcd", "--name", "n1", "--data-dir", str(folder), "--listen-client-urls", url, "--advertise-client-urls", url,
        "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url, "--initial-cluster",
        f"n1={peer_url}",
    ]  # fmt: skip

    def answers() -> bool:
        try:
            asyncio.run(_read_all(url))
        except EtcdError:
            return False
        return True

    with running_program(command, folder.with_suffix(".log"), number=signal.SIGKILL) as process:
        await_ready(process, answers, "etcd", START_S, ETCD_ASKED_EVERY_S)
        yield


async def _put_all(url: str, count: int) -> None:
    etcd = Etcd([url])
    await etcd.start()
    try:
        turns = asyncio.Semaphore(64)

        async def put(at: int) -> None:
            async with turns:
                await etcd.put(f"/entries/node-{at % 16}/{at:032x}", at.to_bytes(16, "little"))

        await asyncio.gather(*(put(at) for at in range(count)))
    finally:
        await etcd.close()


async def _read_all(url: str) -> int:
    etcd = Etcd([url])
    await etcd.start()
    try:
        return len((await etcd.range("/entries/")).entries)
    finally:
        await etcd.close()
