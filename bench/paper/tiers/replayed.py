"""CASCADE's Tables III and V: prompts that share prefixes, served by each store, and by ours with parts left out.

The time to the first token is measured for the storage, and played for the model: finding and getting the leading
blocks, and then so many seconds for each token of the prompt that was not there. Putting is behind the answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.beds.kv_peers.install import MOONCAKE
from bench.beds.kv_peers.running import borrowed_mooncake, running_owner
from bench.beds.ours import Servers, home_table, target_of
from bench.beds.processes import BaselineError
from bench.core.rounds import sampled
from bench.core.show import Json
from bench.paper.kv_stores.adapter import Answer, Prompt, Replay, Replayed, block, require_equal
from bench.paper.kv_stores.running import SAID, WITHOUT, RunningStore, StoreName, start
from bench.paper.tiers.blocks import BLOCK_TOKENS, OWN_TOKENS, sessions_of
from descriptors.descriptor import Delivery
from descriptors.errors import ChunkUnavailable, ErrorCode
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from nixl_client.client import Client, Transport
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import RoundTurns, spread
from objectcache.calibration.servers import BUCKET, LocalServer, running_server
from storage_server.kernel.index.schema import connect_current
from storage_server.kernel.upkeep.dedup_rows import stored_bytes

PREFIX_TOKENS = 2048
RECOMPUTE = "vLLM alone: all tokens computed"
OURS = "ObjectCache, one descriptor over shm"
DRAM_BYTES = 64 * MIB
LAYERS = 4
LEASE_S = 0.2
"""From the lookup to the end of the load. Leases hold half of a cache at most: longer ones would fill it."""
CAPACITY_FRACTION = 0.25
"""Bounded caches have room for this part of the unique bytes."""
CAPACITY_BYTES_MIN = 64 * MIB
"""A cache keeps 8 MiB free ahead of writes."""
INDEX_BYTES = 64 * MIB
"""The bytes that a directory may take beside its chunks."""
REMOTE_DRAM = (
    "Remote DRAM is left out before a home, where there is something to fetch: two servers of which each has every "
    "second request, before a third one on this host; the memory is a Mooncake Store, over TCP on loopback."
)
BEFORE_HOME, WITHOUT_REMOTE = "before a home, whole", "before a home, without remote DRAM"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Prompts and sessions of the workload; the KV of a token, and the seconds that computing it takes the model."""

    prompt_count: int
    session_count: int
    token_bytes: int
    token_s: float
    runs: int
    seed: int
    stores: tuple[StoreName, ...]
    folder: Path | None

    @property
    def block_bytes(self) -> int:
        """How many bytes a block of BLOCK_TOKENS tokens has."""
        return BLOCK_TOKENS * self.token_bytes

    def work(self, round_index: int) -> Replay:
        """A round's prompts; other ones in each round, so that nothing is known from the one before."""
        sessions = sessions_of(self.prompt_count, self.session_count, PREFIX_TOKENS, self.seed + round_index)
        named = [
            Prompt([f"r{round_index}-" + "-".join(map(str, content)) for content in blocks])  # type: ignore[call-overload]
            for blocks in sessions
        ]
        return Replay(named, self.block_bytes)

    @property
    def unique_bytes(self) -> int:
        """Each block once."""
        shared = self.prompt_count * PREFIX_TOKENS // BLOCK_TOKENS
        return (shared + self.prompt_count * self.session_count * OWN_TOKENS // BLOCK_TOKENS) * self.block_bytes


def measure_stores(settings: ReplaySettings) -> Json:
    """Every store without a bound. A store that is not here, or fails, is named. Raises VerificationError for wrong
    bytes of ours.
    """
    absent = dict(WITHOUT)
    with ExitStack() as stack:
        runs: dict[str, Callable[[Replay], Replayed]] = {}
        running: dict[str, RunningStore] = {}
        for chosen in settings.stores:
            try:
                store = start(chosen, settings.block_bytes, 2 * settings.unique_bytes, settings.folder, stack)
            except BaselineError as error:
                absent[SAID[chosen]] = str(error)
                continue
            running[SAID[chosen]], runs[SAID[chosen]] = store, store.replay
        ours = Ours([stack.enter_context(running_server(settings.folder))], settings, stack)
        runs[OURS] = ours.replay
        taken = _rounds(settings, runs, absent)
        stored = {name: store.stored_bytes() for name, store in running.items() if name in taken}
        stored[OURS] = ours.stored_bytes()
    named = settings.unique_bytes
    rows = {name: dict(_row(settings, answers)) for name, answers in taken.items()}
    for name, nbytes in stored.items():
        rows[name]["dedup_ratio"] = named / nbytes if nbytes else None
    rows = {RECOMPUTE: dict(_recomputed(settings)), **rows}
    alone = rows[RECOMPUTE]["tokens_per_s"].median
    for row in rows.values():
        row["throughput_over_alone"] = row["tokens_per_s"].median / alone
    return {"absent": absent, "systems": rows, **_described(settings)}


def measure_ablation(settings: ReplaySettings) -> Json:
    """Ours with a bounded bucket, whole and with one part left out."""
    capacity_bytes = max(int(CAPACITY_FRACTION * settings.unique_bytes), CAPACITY_BYTES_MIN)
    whole = {"eviction": "reuse-value"}
    configurations: dict[str, tuple[dict[str, str], str]] = {
        "whole": (whole, f"dram_bytes = {DRAM_BYTES}\n"),
        "without deduplication": (whole, f'dram_bytes = {DRAM_BYTES}\ndedup = "off"\n'),
        "without aggregation": (whole, f"dram_bytes = {DRAM_BYTES}\n[internals.storage]\npacked_bytes_max = 1\n"),
        "without the DRAM tier": (whole, "dram_bytes = 0\n"),
        "without semantic eviction": ({"eviction": "lru"}, f"dram_bytes = {DRAM_BYTES}\n"),
    }
    with ExitStack() as stack:
        servers: dict[str, Ours] = {}
        for name, (bucket, storage) in configurations.items():
            text = f'[storage]\n{storage}\n[[buckets]]\nname = "{BUCKET}"\ncapacity_bytes = {capacity_bytes}\n'
            text += f'eviction = "{bucket["eviction"]}"\n'
            servers[name] = Ours([Servers(stack, settings.folder, "ablation").serve(text)], settings, stack)
        fronts, absent = _before_home(settings, capacity_bytes, stack)
        servers |= fronts
        runs: dict[str, Callable[[Replay], Replayed]] = {name: each.replay for name, each in servers.items()}
        taken = _rounds(settings, runs, absent)
        rows = {name: dict(_row(settings, answers)) for name, answers in taken.items()}
        for name in rows:
            rows[name]["dedup_ratio"] = servers[name].dedup_ratio()
    return {
        "capacity_bytes": capacity_bytes,
        "configurations": rows,
        "absent": absent,
        "remote_dram": REMOTE_DRAM,
        **_described(settings),
    }


def _before_home(
    settings: ReplaySettings, capacity_bytes: int, stack: ExitStack
) -> tuple[dict[str, Ours], dict[str, str]]:
    """Pairs of servers before a home, with remote DRAM and without; and what is not here, with the reason."""
    beds = Servers(stack, settings.folder, "before-home")

    def pair(further: str = "", python_path: Sequence[Path] = ()) -> Ours:
        text = home_table(target_of(beds.serve()), further)  # all have the same names for the same blocks
        bound_bytes = capacity_bytes + INDEX_BYTES
        return Ours([beds.front(text, DRAM_BYTES, bound_bytes, python_path) for _ in range(2)], settings, stack)

    found = {WITHOUT_REMOTE: pair()}
    try:
        borrowed = [borrowed_mooncake(beds.folder)]
        owner = running_owner(MOONCAKE.folder / "bin", 2 * settings.unique_bytes, beds.folder)
        master, _ = stack.enter_context(owner)
    except BaselineError as error:
        return found, {BEFORE_HOME: str(error)}
    further = f'[upstream.remote_dram]\nendpoint = "mooncake://{master}"\n'
    return {BEFORE_HOME: pair(further, borrowed), **found}, {}


class Ours:
    """ObjectCache as engines use it: one lookup and one descriptor for a prompt, into shared memory. Where there are
    several servers, prompts go to them by turns.
    """

    def __init__(self, servers: Sequence[LocalServer], settings: ReplaySettings, stack: ExitStack) -> None:
        self._servers = servers
        self._layout = ChunkLayout(LAYERS, BLOCK_TOKENS, settings.block_bytes // LAYERS)
        self._nbytes = settings.block_bytes
        self._put: list[str] = []
        blocks_max = (PREFIX_TOKENS + OWN_TOKENS) // BLOCK_TOKENS
        self._ways: list[tuple[Client, np.ndarray]] = []
        for server in servers:
            client = stack.enter_context(server.client(Transport.SHM))
            self._ways.append((client, client.allocate_buffer(blocks_max * settings.block_bytes)))

    def replay(self, work: Replay) -> Replayed:
        """As bench.paper.kv_stores.adapter.replay does it. Raises VerificationError."""
        self._ways[0][0].delete(self._put)
        self._put, answers = [], []
        for place, prompt in enumerate(work.prompts):
            client, buffer = self._ways[place % len(self._ways)]
            keys = list(prompt.block_ids)
            started_s = time.monotonic()
            count = client.lookup(keys, LEASE_S)
            if count and not self._is_loaded(client, buffer, keys[:count]):
                count = 0
            get_s = time.monotonic() - started_s
            self._require(buffer, keys[:count])
            started_s = time.monotonic()
            absent = keys[count:]
            self._put += absent
            client.put_chunks(absent, [np.concatenate(block(key, self._nbytes)) for key in absent])
            answers.append(Answer(count, get_s, time.monotonic() - started_s))
        return Replayed(answers)

    def _is_loaded(self, client: Client, buffer: np.ndarray, keys: Sequence[str]) -> bool:
        """Load the blocks; False where one has left since the lookup, whose tokens an engine would then compute."""
        payload = buffer[: len(keys) * self._nbytes]
        try:
            client.fetch(keys, self._layout, payload, delivery=Delivery.LAYER_MAJOR).wait()
        except ChunkUnavailable as error:
            if error.code is not ErrorCode.NO_SUCH_CHUNK:
                raise
            return False
        return True

    def _require(self, buffer: np.ndarray, keys: Sequence[str]) -> None:
        if not keys:
            return
        layers = buffer[: len(keys) * self._nbytes].reshape(LAYERS, len(keys), -1)
        for index, key in enumerate(keys):
            got = layers[:, index].reshape(-1)
            require_equal(key, (got[: self._nbytes // 2], got[self._nbytes // 2 :]), self._nbytes)

    def stored_bytes(self) -> int:
        """What the files of extents take."""
        return sum(path.stat().st_blocks * 512 for server in self._servers for path in server.data_files())

    def dedup_ratio(self) -> float:
        """From the first server's index."""
        with closing(connect_current(self._servers[0].data / "index.sqlite3")) as db:
            return stored_bytes(db).ratio


def _rounds(
    settings: ReplaySettings, runs: dict[str, Callable[[Replay], Replayed]], absent: dict[str, str]
) -> dict[str, list[Sequence[Answer]]]:
    """The answers of every round but the first; a store that fails loses its rows."""

    def replayed(name: str, round_index: int) -> Sequence[Answer]:
        found = runs[name](settings.work(round_index))
        if found.problem is not None:
            raise BaselineError(found.problem)
        return found.answers

    def failed(name: str, error: BaselineError) -> None:
        if name.startswith("ObjectCache"):
            raise VerificationError(f"{name}: {error}")
        absent[name] = str(error)

    ways = {name: partial(replayed, name) for name in runs}
    return sampled(ways, settings.runs, "prompts", turns=RoundTurns.ROTATING, failed=failed)


def _row(settings: ReplaySettings, rounds: Sequence[Sequence[Answer]]) -> Json:
    """Medians of rounds. A prompt has as many blocks as any other."""
    blocks = (PREFIX_TOKENS + OWN_TOKENS) // BLOCK_TOKENS

    def ttfts(answers: Sequence[Answer]) -> list[float]:
        return [each.get_s + (blocks - each.hit_blocks) * BLOCK_TOKENS * settings.token_s for each in answers]

    return {
        "ttft_s": spread([statistics.median(ttfts(answers)) for answers in rounds]),
        "ttft_mean_s": spread([statistics.fmean(ttfts(answers)) for answers in rounds]),
        "tokens_per_s": spread([len(each) * blocks * BLOCK_TOKENS / sum(ttfts(each)) for each in rounds]),
        "hit_rate": spread([sum(one.hit_blocks for one in each) / (len(each) * blocks) for each in rounds]),
        "get_s_per_hit_block": spread(
            [sum(one.get_s for one in each) / max(1, sum(one.hit_blocks for one in each)) for each in rounds]
        ),
    }


def _recomputed(settings: ReplaySettings) -> Json:
    """Nothing is kept between prompts: KV in GPU memory is gone when the next prompt of its prefix comes."""
    ttft_s = (PREFIX_TOKENS + OWN_TOKENS) * settings.token_s
    return {
        "ttft_s": spread([ttft_s]),
        "ttft_mean_s": spread([ttft_s]),
        "tokens_per_s": spread([1 / settings.token_s]),
        "hit_rate": None,
        "get_s_per_hit_block": None,
        "dedup_ratio": None,
    }


def _described(settings: ReplaySettings) -> Json:
    return {
        "prompt_tokens": PREFIX_TOKENS + OWN_TOKENS,
        "shared_tokens": PREFIX_TOKENS,
        "block_bytes": settings.block_bytes,
        "unique_bytes": settings.unique_bytes,
        "prompt_count": settings.prompt_count,
        "session_count": settings.session_count,
    }
