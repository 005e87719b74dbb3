"""The strategy table of 003, derived from its model."""

from __future__ import annotations

import pytest

from objectcache.orchestrator.rules.latency_model import (
    LARGE,
    MISS,
    LatencyCosts,
    ModelRequest,
    admitted,
    latency_ms,
    strategy_table,
)

PAPER = {
    "no cache": (1405, 1405, 0.0, 0.0),
    "prefix reuse": (985, 1405, 0.5, 0.0),
    "exact cache": (205, 205, 1.0, 0.0),
    "memory-aware": (843, 1405, 0.25, 0.25),
    "memory-aware, eviction": (1895, 4205, 0.25, 0.0),
}


def test_the_five_rows() -> None:
    """003 cuts 843.75 to 843, and counts the refused request as 0 ms; over those that were admitted it is 1,125."""
    rows = {row.name: row for row in strategy_table()}
    assert {
        name: (int(row.average_ms), int(row.p95_ms), row.hit_rate, row.rejection_rate) for name, row in rows.items()
    } == PAPER
    assert rows["memory-aware"].admitted_average_ms == pytest.approx(1125)


def test_the_block_pools_refuse_what_does_not_fit_beside_running_requests() -> None:
    assert admitted([MISS, MISS, MISS, LARGE], end=False) == [MISS, MISS, MISS, None]
    assert admitted([MISS, MISS, MISS, LARGE], end=True) == [MISS, MISS, MISS, LARGE]
    assert admitted([LARGE, LARGE, MISS], end=False) == [LARGE, None, MISS]


def test_the_text_of_003_has_other_hits_than_its_table() -> None:
    """980 ms on average and hits of 555 ms: a prefix of 850 tokens, and not of 840."""
    hit_ms = latency_ms(ModelRequest(prefix_hit_tokens=850), LatencyCosts())
    assert hit_ms == 555
    assert (hit_ms + latency_ms(ModelRequest(), LatencyCosts())) / 2 == 980
