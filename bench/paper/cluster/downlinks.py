"""How soon a prefix is whole in a client's memory whose downlink is slower than the servers that write to it: the
placement, the split and the shares are the product's own, and time is played.

Two ways to share the downlink: `asked`, as delivery.scheduler.downlink_shares of the storage server decides, and
`equal`, the same part for each server, whether it has bytes or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from descriptors.cluster import Member, View
from descriptors.placement import Placement
from descriptors.units import MIB
from gateway.cluster.split import holdings
from storage_server.delivery.scheduler.downlink_shares import RENEW_S, DownlinkShares

DOWNLINK_BYTES_PER_S = 3.125e9
"""25 Gbps."""
SERVER_BYTES_PER_S = 12.5e9
CHUNK_BYTES = 8 * MIB
CHUNK_COUNTS = (16, 128, 1024)
SERVER_COUNTS = (3, 8, 64)
PREFIXES = 20


def simulated_downlinks(seed: int) -> list[dict[str, Any]]:
    """For each number of servers, of chunks and of requests: the mean time until all has come over the least that the
    downlink allows, asked and equal, and the most that servers together may send over what it carries.
    """
    random = np.random.default_rng(seed)
    rows = []
    for servers in SERVER_COUNTS:
        placement = Placement(View("bench", 1, tuple(Member(f"s{at}", f"http://s{at}:1") for at in range(servers))))
        for chunks in CHUNK_COUNTS:
            for requests in (1, 2):
                played = []
                for _ in range(PREFIXES):
                    parts = []
                    for _ in range(requests):
                        keys = [random.bytes(32).hex() for _ in range(chunks)]
                        found = holdings(placement, "kv", keys)
                        parts.append({each.member.name: each.chunk_count * CHUNK_BYTES for each in found})
                    played.append(_played(parts, servers))
                asked, equal, peak = (float(np.mean(each)) for each in zip(*played, strict=True))
                row = {"servers": servers, "chunks": chunks, "requests": requests}
                rows.append(row | {"asked": asked, "equal": equal, "peak": peak})
    return rows


def _played(parts: Sequence[Mapping[str, int]], servers: int) -> tuple[float, float, float]:
    """The time of the asked and of the equal way over the least, and the peak of the asked way over the downlink. The
    second request comes when half of the first could have come.
    """
    whole = [sum(sizes.values()) for sizes in parts]
    arrivals_s = [0.0, *(whole[0] / DOWNLINK_BYTES_PER_S / 2 for _ in parts[1:])]
    least_s = sum(whole) / DOWNLINK_BYTES_PER_S
    part = min(DOWNLINK_BYTES_PER_S / servers, SERVER_BYTES_PER_S)
    totals: dict[str, int] = {}
    for sizes in parts:
        for name, size in sizes.items():
            totals[name] = totals.get(name, 0) + size
    equal_s = max(totals.values()) / part
    ended_s, peak = _asked(parts, whole, arrivals_s)
    return ended_s / least_s, equal_s / least_s, peak / DOWNLINK_BYTES_PER_S


def _asked(
    parts: Sequence[Mapping[str, int]], whole: Sequence[int], arrivals_s: Sequence[float]
) -> tuple[float, float]:
    """When all has come, and the most bytes/s that servers together might send. A server asks when a request comes and
    every RENEW_S from then on, and sends its requests one after the other at its share.
    """
    shares = DownlinkShares()
    left: dict[str, dict[int, float]] = {}
    rates: dict[str, float] = {}
    asks_s: dict[str, float] = {}
    waiting = deque(enumerate(arrivals_s))
    now_s, peak = 0.0, 0.0
    while left or waiting:
        ends_s = [now_s + sum(own.values()) / rates[name] for name, own in left.items() if rates.get(name)]
        then_s = min([*ends_s, *asks_s.values(), *(at_s for _, at_s in list(waiting)[:1])])
        for name, own in list(left.items()):
            sent = rates.get(name, 0.0) * (then_s - now_s)
            for index in list(own):
                moved = min(sent, own[index])
                own[index] -= moved
                sent -= moved
                if own[index] < 1.0:
                    del own[index]
            if not own:
                del left[name], rates[name], asks_s[name]
                shares.share("agent", DOWNLINK_BYTES_PER_S, name, 0, 0, then_s)
        now_s = then_s
        while waiting and waiting[0][1] <= now_s:
            index, _ = waiting.popleft()
            for name, size in parts[index].items():
                left.setdefault(name, {})[index] = float(size)
                asks_s[name] = now_s
        for name in [name for name, at_s in asks_s.items() if at_s <= now_s]:
            own = left[name]
            of_whole = sum(nbytes * whole[index] / parts[index][name] for index, nbytes in own.items())
            own_bytes = max(1, round(sum(own.values())))
            share = shares.share("agent", DOWNLINK_BYTES_PER_S, name, own_bytes, round(of_whole), now_s)
            rates[name], asks_s[name] = min(share, SERVER_BYTES_PER_S), now_s + RENEW_S
        peak = max(peak, sum(rates.values()))
    return now_s, peak
