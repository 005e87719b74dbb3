"""Rounds: start, check, load, kill. A data directory lives through several; each has one mode."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from random import Random

from storage_server.planning.durability import Durability
from tests.faults.bounds import upstream_server
from tests.faults.crash import versions
from tests.faults.crash.audit import audit
from tests.faults.crash.check import check
from tests.faults.crash.client import Client
from tests.faults.crash.journal import CrashFailure, Journal
from tests.faults.crash.multipart import Multipart
from tests.faults.crash.reading import Reader
from tests.faults.crash.server import Server
from tests.faults.crash.versions import SMALL_BYTES_MAX
from tests.faults.crash.world import BUCKET, WRITERS, World
from tests.faults.crash.writer import Writer
from tests.support.requests import OWNER
from tests.support.servers import CONFIG
from tests.support.waiting import eventually

ROUNDS_PER_DIRECTORY = 20
READERS = 2
PACKED_BYTES_MAX = (versions.PACKED_BYTES_MAX, SMALL_BYTES_MAX)
"""The default; and a small one, for many files of their own."""
WORKERS = (1, 1, 2)
LOAD_S_MAX = 0.9
START_KILL_CHANCE = 0.25
START_KILL_S_MAX = 0.4
TERMINATE_CHANCE = 0.05
LATE_S_MAX = 0.02
COMPACTION = "compact_interval_s = 0.02\ncompact_live_fraction_max = 0.95\ncompact_bytes_per_s = 1e9\n"
"""All the time, of everything in which something is dead."""
DEDUP = "dedup_bytes_per_s = 1e12\n"
COMPACTED, SHARED = " segments became ", " share the bytes of older ones"
"""What the server logs."""
JOIN_TIMEOUT_S = 60.0
AUDIT_TIMEOUT_S = 60.0
WATCHED = (None, "put", "complete", "abort", "copy", "self-copy", "part", "delete", "multi-delete", "tag")


class Mode(Enum):
    """The home of objects in either durability; a cache in front of another server, which is not killed, where every
    object counts as a chunk and is written back, or written through; and a cache in front of a shared directory.
    """

    STRICT = "strict"
    RELAXED = "relaxed"
    BACK = "back"
    THROUGH = "through"
    FILES = "files"


UPSTREAM = """
[upstream]
endpoint = "{}"
access_key = "{}"
secret_key = "{}"
write = "{}"
"""


SHARED_DIRECTORY = """
[upstream]
endpoint = "file://{}"
"""


@dataclass(slots=True)
class Tally:
    """What a run did."""

    rounds: int = 0
    kills: int = 0
    kills_while_starting: int = 0
    terminations: int = 0
    compactions: int = 0
    deduplications: int = 0
    acknowledged: int = 0
    in_doubt: int = 0
    by_mode: dict[str, int] = field(default_factory=dict)


def run_rounds(
    directory: Path, seed: int, count: int, tally: Tally, per_directory: int = ROUNDS_PER_DIRECTORY
) -> Iterator[Tally]:
    """Yields after each round. Raises CrashFailure with seed and journal, the directory kept."""
    for first in range(0, count, per_directory):
        rng = Random(f"{seed}/{first}")
        mode = list(Mode)[first // per_directory % len(Mode)]
        place = directory / f"{seed}-{first}-{mode.value}"
        world = World(seed=rng.randrange(1 << 30))
        try:
            yield from _one_directory(place, mode, world, rng, min(per_directory, count - first), tally)
        except Exception as error:
            world.journal.save(place / "journal.jsonl")
            raise CrashFailure(
                f"seed {seed}, round {tally.rounds}, {mode.value}: {error}\n"
                f"the journal's end:\n{world.journal.tail()}\nkept: {place}"
            ) from error
        shutil.rmtree(place)


def _one_directory(place: Path, mode: Mode, world: World, rng: Random, count: int, tally: Tally) -> Iterator[Tally]:
    place.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        config = place / "config.toml"
        durability = Durability.RELAXED if mode in (Mode.RELAXED, Mode.THROUGH) else Durability.STRICT
        packed = rng.choice(PACKED_BYTES_MAX)
        text = f'[storage]\ndurability = "{durability.value}"\n'
        text += f"[internals.storage]\npacked_bytes_max = {packed}\n{COMPACTION}{DEDUP}{CONFIG}"
        if mode in (Mode.BACK, Mode.THROUGH):
            upstream = place / "upstream"
            upstream.mkdir()
            text += UPSTREAM.format(stack.enter_context(upstream_server(upstream)), *OWNER, mode.value)
        if mode is Mode.FILES:
            (place / "shared").mkdir()
            text += SHARED_DIRECTORY.format(place / "shared")
        config.write_text(text)
        yield from _rounds(place, config, mode, world, rng, count, tally)


def _rounds(
    place: Path, config: Path, mode: Mode, world: World, rng: Random, count: int, tally: Tally
) -> Iterator[Tally]:
    for index in range(count):
        _start_and_kill(place, config, rng, tally)
        server = Server(place, config, options=("--workers", str(rng.choice(WORKERS))))
        try:
            url = _checked(server, place, world)
            if index == 0:
                _make_bucket(url)
            _load_and_kill(server, url, world, rng, tally)
        finally:
            server.kill()
        tally.rounds += 1
        tally.compactions += server.output().count(COMPACTED)
        tally.deduplications += server.output().count(SHARED)
        tally.acknowledged += world.journal.acknowledged_count
        tally.in_doubt += world.journal.in_doubt_count
        world.journal.acknowledged_count = 0
        tally.by_mode[mode.value] = tally.by_mode.get(mode.value, 0) + 1
        yield tally
    server = Server(place, config)
    try:
        _checked(server, place, world)
        if server.terminate() != 0:
            raise CrashFailure(f"SIGTERM ended the server badly: {server.output()}")
    finally:
        server.kill()


def _checked(server: Server, place: Path, world: World) -> str:
    """Where the restarted server listens; what it shows has been compared."""
    url = server.url()
    wrong: list[str] = []

    def is_right() -> bool:
        wrong[:] = audit(place / "data")
        return not wrong

    if not eventually(is_right, AUDIT_TIMEOUT_S):  # compaction, at work at once, has files no row names for a moment
        raise CrashFailure("\n".join(wrong[:20]))
    if world.journal.entries:
        check(world, url)
    return url


def _make_bucket(url: str) -> None:
    client = Client(url, BUCKET)
    reply = client.call("PUT")
    assert reply.status == 200, f"no bucket: {reply}"
    client.close()


def _start_and_kill(place: Path, config: Path, rng: Random, tally: Tally) -> None:
    """Killed while it starts: recovery must survive being cut short, again and again."""
    while rng.random() < START_KILL_CHANCE:
        server = Server(place, config)
        time.sleep(rng.uniform(0, START_KILL_S_MAX))  # the kill comes at a random moment
        server.kill()
        tally.kills_while_starting += 1


def _load_and_kill(server: Server, url: str, world: World, rng: Random, tally: Tally) -> None:
    world.killed.clear()
    world.stop.clear()
    writers = [Writer(world, url, index, rng.getrandbits(60)) for index in range(WRITERS)]
    for writer in writers:
        Multipart(writer)
    clients: list[threading.Thread] = [*writers, *(Reader(world, url, rng.getrandbits(60)) for _ in range(READERS))]
    for client in clients:
        client.start()
    _wait_for_the_moment(world.journal, rng)
    is_alive = server.is_running
    world.killed.set()
    if rng.random() < TERMINATE_CHANCE:
        status = server.terminate()
        tally.terminations += 1
        if status != 0:
            world.journal.fail("server", f"SIGTERM ended it with {status}: {server.output()}")
    elif rng.random() < 0.5 and is_alive:
        if not server.kill_first_process():
            world.journal.fail("server", "its workers live on without it")
        tally.kills += 1
    else:
        server.kill()
        tally.kills += 1
    world.stop.set()
    world.journal.note("server", "killed")
    for client in clients:
        client.join(JOIN_TIMEOUT_S)
    if not is_alive:
        world.journal.fail("server", f"it ended by itself: {server.output()}")
    world.journal.require()


def _wait_for_the_moment(journal: Journal, rng: Random) -> None:
    """Any time; or just after an operation of some kind was sent, so that short steps are hit, too."""
    time.sleep(rng.uniform(0.02, LOAD_S_MAX))  # the kill comes at a random moment
    if rng.random() < 0.6:
        journal.watch(rng.choice(WATCHED)).wait(LOAD_S_MAX)
        time.sleep(rng.uniform(0, LATE_S_MAX) ** 2 / LATE_S_MAX)  # and at a random step of that operation
