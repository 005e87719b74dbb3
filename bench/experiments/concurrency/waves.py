"""Waves of fetches that start together, and what their times say. Pure.

A wave is one round of so many fetches at once: of each `requests` when it was asked for, had its first layer and had
ended, in seconds since the wave began; the copy rate of the round; and the most memory that the server's processes had
of their own meanwhile, None where it could not be seen.

Jain's index of n rates x: (sum x)^2 / (n * sum x^2): 1 where all are served alike, 1/n where one is served alone
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.core.show import Json
from calibration.samples import spread


def level_of(transport: str, count: int, payload_bytes: int, waves: Sequence[Json]) -> dict[str, Any]:
    """All rounds of so many fetches at once over one transport, each of `payload_bytes`. The throughput is that of all
    together; Jain's index, over the fetches' own rates, and the ratio of completion times are the median rounds'.
    """
    ended_s = [[request["ended_s"] for request in wave["requests"]] for wave in waves]
    return {
        "transport": transport,
        "count": count,
        "payload_bytes": payload_bytes,
        "throughput_bytes_per_s": spread(_rates_bytes_per_s(payload_bytes, waves)),
        "jain": statistics.median(jain_index([payload_bytes / each_s for each_s in wave]) for wave in ended_s),
        "slowest_over_fastest": statistics.median(max(wave) / min(wave) for wave in ended_s),
        "ended_s": spread([each_s for wave in ended_s for each_s in wave]),
        "first_layer_s": spread([request["first_layer_s"] for wave in waves for request in wave["requests"]]),
        "memory_bytes_max": max((each["memory_bytes"] for each in waves if each["memory_bytes"]), default=None),
        "waves": waves,
    }


def jain_index(rates: Sequence[float]) -> float:
    """From 1/n to 1. Raises ValueError without a rate."""
    if not rates:
        raise ValueError("no rates")
    return sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))


def ratios(levels: Sequence[Json]) -> dict[str, float]:
    """Medians over the rounds that both have, since wrong bytes may end a round early: to the single fetch, and to
    memcpy.
    """
    rates = {
        (each["transport"], each["count"]): _rates_bytes_per_s(each["payload_bytes"], each["waves"]) for each in levels
    }
    found = {}
    for level in levels:
        transport, count = level["transport"], level["count"]
        mine, single = rates[transport, count], rates.get((transport, 1))
        copies = [wave["memcpy_bytes_per_s"] for wave in level["waves"]]
        found[f"{transport}_{count}_over_memcpy"] = _median_ratio(mine, copies)
        if single is not None and count != 1:
            found[f"{transport}_{count}_over_1"] = _median_ratio(mine, single)
    return found


def server_of(levels: Sequence[Json], processes: int, fixed_bytes: int | None, configured_bytes: int) -> dict[str, Any]:
    """The server's memory against its bound: `fixed_bytes`, which it had before its first request, and what is
    configured on top of that. None where it could not be seen.
    """
    peak_bytes = max((each["memory_bytes_max"] for each in levels if each["memory_bytes_max"]), default=None)
    bound_bytes = None if fixed_bytes is None else fixed_bytes + configured_bytes
    return {
        "processes": processes,
        "fixed_bytes": fixed_bytes,
        "bound_bytes": bound_bytes,
        "peak_bytes": peak_bytes,
        "is_within_bound": None if peak_bytes is None or bound_bytes is None else peak_bytes <= bound_bytes,
    }


def _rates_bytes_per_s(payload_bytes: int, waves: Sequence[Json]) -> list[float]:
    """Of all fetches of a wave together."""
    ended_s = [[request["ended_s"] for request in wave["requests"]] for wave in waves]
    return [len(wave) * payload_bytes / max(wave) for wave in ended_s]


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=False))
