"""How fast a tier in memory is filled beside the work of others. Pure."""

from __future__ import annotations

CORES_SHARE = 1 / 8
PAUSE_S_MAX = 0.25


def pause_s(used_s: float, core_count: int) -> float:
    """How long a thread that has used a processor for `used_s` rests, so that it takes `CORES_SHARE` of all of them at
    most: an engine on this host computes with the bytes that were just delivered, and these are in no hurry to be here.
    """
    return min(used_s * max(0.0, 1 / (CORES_SHARE * core_count) - 1), PAUSE_S_MAX)
