"""A cluster of 4 to 256 storage servers, simulated: the placement, the split and the eviction policy are the product's
own, and time is played. CASCADE (000) left this figure open (Figure 3).

Every server has a DRAM tier and a disk tier, and answers portions one after the other: a fixed time, and the bytes at
the rate of the tier that they come from, or of the home. Chunks that nobody has stored are computed. Load grows with
the servers: each four of them get one more copy of the recorded stream, with chunks of its own.

The pool of the same size without placement sends each request whole to a random server.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from bench.paper.tiers.replay import Trace, read
from descriptors.cluster import Member, View
from descriptors.placement import Placement
from gateway.cluster.split import Holding, holdings
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.order import Request

CHUNK_BYTES = 64 << 20
"""512 tokens of Llama 3.1 8B."""
DRAM_CHUNKS, DISK_CHUNKS = 128, 1024
DRAM_BYTES_PER_S, DISK_BYTES_PER_S, HOME_BYTES_PER_S = 12.5e9, 3e9, 0.6e9
PORTION_S = 0.0005
SLOW_FRACTION, SLOW_FACTOR = 0.005, 10.0
"""So many portions take so many times as long, by chance."""
TOKEN_S = 60e-6
SERVERS_A_COPY = 4
HEDGE_BYTES_MAX = 0.03
HEDGE_SAMPLES = 200
ARRIVALS_PER_SERVER_S = 0.25


class Placed(Enum):
    """Which servers bring a prefix."""

    KEEPERS = "each chunk by its keeper"
    RANDOM = "the whole prefix by a random server"


@dataclass(slots=True)
class _Server:
    dram: Any
    disk: Any
    free_s: float = 0.0
    busy_s: float = 0.0
    served_bytes: int = 0


@dataclass(slots=True)
class _Totals:
    tokens: Counter[str] = field(default_factory=Counter)
    chunks: Counter[str] = field(default_factory=Counter)
    ttfts_s: list[float] = field(default_factory=list)
    stragglers: list[float] = field(default_factory=list)
    hedges: int = 0
    end_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Asked:
    at_s: float
    keys: tuple[str, ...]
    tokens: tuple[int, ...]


def figure_3(server_counts: Sequence[int], requests_a_copy: int, seed: int) -> list[dict[str, Any]]:
    """A row for each count of servers and each way."""
    rows = []
    for count in server_counts:
        for placed, is_hedged in ((Placed.KEEPERS, False), (Placed.KEEPERS, True), (Placed.RANDOM, False)):
            rows.append({
                "servers": count, "placed": placed.value, "hedged": is_hedged,
                **simulated(count, requests_a_copy, seed, placed, is_hedged=is_hedged),
            })  # fmt: skip
    first = {(row["placed"], row["hedged"]): row for row in reversed(rows)}
    for row in rows:
        least = first[row["placed"], row["hedged"]]
        linear = least["bytes_per_s"] * row["servers"] / least["servers"]
        row["of_linear"] = row["bytes_per_s"] / linear
    return rows


def simulated(server_count: int, requests_a_copy: int, seed: int, placed: Placed, *, is_hedged: bool) -> dict[str, Any]:
    """One run: hit rates by tier, TTFT, throughput while servers are busy, imbalance and stragglers."""
    random = np.random.default_rng(seed)
    members = tuple(Member(f"server-{at}", f"http://server-{at}:9100") for at in range(server_count))
    placement = Placement(View("simulated", 1, members))
    indices = {member.name: at for at, member in enumerate(members)}
    servers = [
        _Server(
            policy_of(Eviction.REUSE_VALUE, DRAM_CHUNKS * CHUNK_BYTES),
            policy_of(Eviction.REUSE_VALUE, DISK_CHUNKS * CHUNK_BYTES),
        )
        for _ in members
    ]
    stored: set[str] = set()
    totals = _Totals()
    recent_s: deque[float] = deque(maxlen=HEDGE_SAMPLES)
    hedged_bytes = loaded_bytes = 0
    for asked in arrivals(server_count, requests_a_copy, random):
        matched = next((at for at, key in enumerate(asked.keys) if key not in stored), len(asked.keys))
        loaded = asked.keys[:matched]
        if not loaded:
            found: list[Holding] = []
        elif placed is Placed.KEEPERS:
            found = holdings(placement, "kv", loaded)
        else:
            found = [Holding(members[int(random.integers(server_count))], np.arange(matched))]
        ends_s, took_s = [], []
        for holding in found:
            keys = [loaded[at] for at in holding.positions.tolist()]
            end_s, own_s = _serve(servers[indices[holding.member.name]], keys, asked.at_s, totals, random)
            nbytes = len(keys) * CHUNK_BYTES
            loaded_bytes += nbytes
            if is_hedged and len(recent_s) == HEDGE_SAMPLES:
                patience_s = len(keys) * float(np.quantile(recent_s, 0.99))
                late_s = asked.at_s + patience_s
                if end_s > late_s and hedged_bytes + nbytes <= HEDGE_BYTES_MAX * loaded_bytes:
                    other = placement.keepers("kv", keys[:1], {holding.member.name})[0]
                    second_s, _ = _serve(servers[int(other)], keys, late_s, totals, random, counts=False)
                    end_s = min(end_s, second_s)
                    hedged_bytes += nbytes
                    totals.hedges += 1
            recent_s.append(own_s / len(keys))
            ends_s.append(end_s - asked.at_s)
            took_s.append(own_s)
        load_s = max(ends_s, default=0.0)
        computed = sum(asked.tokens[matched:])
        totals.tokens["loaded"] += sum(asked.tokens[:matched])
        totals.tokens["computed"] += computed
        totals.ttfts_s.append(load_s + max(1, computed) * TOKEN_S)
        if len(took_s) > 1:
            totals.stragglers.append(max(took_s) / (sum(took_s) / len(took_s)))
        totals.end_s = max(totals.end_s, asked.at_s + load_s)
        _store(servers, indices, placement, placed, asked, matched, random)
        stored.update(asked.keys)
    return _figures(totals, servers, hedged_bytes, loaded_bytes)


def arrivals(server_count: int, requests_a_copy: int, random: np.random.Generator) -> Iterator[_Asked]:
    """The copies of the stream, each a Poisson process, in the order of their requests."""
    recorded = read(Trace.CONVERSATION, requests_a_copy).requests
    copies = max(1, server_count // SERVERS_A_COPY)
    rate = ARRIVALS_PER_SERVER_S * server_count / copies
    waiting: list[tuple[float, int, int]] = [(float(random.exponential(1 / rate)), copy, 0) for copy in range(copies)]
    heapq.heapify(waiting)
    while waiting:
        at_s, copy, number = heapq.heappop(waiting)
        each = recorded[number]
        yield _Asked(at_s, tuple(f"{copy}/{key}" for key in each.keys), tuple(each.sizes_bytes))
        if number + 1 < len(recorded):
            heapq.heappush(waiting, (at_s + float(random.exponential(1 / rate)), copy, number + 1))


def _serve(
    server: _Server,
    keys: Sequence[str],
    at_s: float,
    totals: _Totals,
    random: np.random.Generator,
    *,
    counts: bool = True,
) -> tuple[float, float]:
    """When the portion has come, and the seconds that it took by itself."""
    dram = sum(server.dram.hit_count([key]) for key in keys)
    disk = sum(not server.dram.hit_count([key]) and bool(server.disk.hit_count([key])) for key in keys)
    home = len(keys) - dram - disk
    own_s = PORTION_S + CHUNK_BYTES * (dram / DRAM_BYTES_PER_S + disk / DISK_BYTES_PER_S + home / HOME_BYTES_PER_S)
    if random.random() < SLOW_FRACTION:
        own_s *= SLOW_FACTOR
    server.free_s = max(server.free_s, at_s) + own_s
    server.busy_s += own_s
    server.served_bytes += len(keys) * CHUNK_BYTES
    if counts:
        totals.chunks.update({"dram": dram, "disk": disk, "home": home})
    _note(server, keys, server.free_s)
    return server.free_s, own_s


def _note(server: _Server, keys: Sequence[str], at_s: float) -> None:
    """Both tiers see what was read or stored."""
    request = Request(max(at_s, 0.0), tuple(keys), (CHUNK_BYTES,) * len(keys))
    server.dram.request(request)
    server.disk.request(request)


def _store(
    servers: Sequence[_Server],
    indices: dict[str, int],
    placement: Placement,
    placed: Placed,
    asked: _Asked,
    matched: int,
    random: np.random.Generator,
) -> None:
    """Chunks that were computed are put: at their keepers, or at a random server."""
    new = asked.keys[matched:]
    if not new:
        return
    if placed is Placed.RANDOM:
        server = servers[int(random.integers(len(servers)))]
        _note(server, new, max(server.free_s, asked.at_s))
        return
    for holding in holdings(placement, "kv", new):
        server = servers[indices[holding.member.name]]
        _note(server, [new[at] for at in holding.positions.tolist()], max(server.free_s, asked.at_s))


def _figures(totals: _Totals, servers: Sequence[_Server], hedged_bytes: int, loaded_bytes: int) -> dict[str, Any]:
    chunks, tokens = sum(totals.chunks.values()), sum(totals.tokens.values())
    served = [server.served_bytes for server in servers]
    p50, p90, p99 = (float(each) for each in np.percentile(totals.ttfts_s, (50, 90, 99)))
    return {
        "requests": len(totals.ttfts_s),
        "loaded_tokens": totals.tokens["loaded"] / max(1, tokens),
        **{f"from_{tier}": totals.chunks[tier] / max(1, chunks) for tier in ("dram", "disk", "home")},
        "ttft_p50_s": p50,
        "ttft_p90_s": p90,
        "ttft_p99_s": p99,
        "bytes_per_s": sum(served) / max(server.busy_s for server in servers),
        "imbalance": max(served) / (sum(served) / len(served)) if sum(served) else 1.0,
        "straggler": float(np.mean(totals.stragglers)) if totals.stragglers else 1.0,
        "hedges": totals.hedges,
        "hedged_bytes": hedged_bytes / max(1, loaded_bytes),
    }
