"""`bench replacing` replays streams through the product's policy, and counts what each set of codecs costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cli import run
from bench.experiments.replacing import DEFAULT_CODECS, LAYOUT, READ_BYTES_PER_S, SETS, replay, show
from bench.paper.tiers.replay import Stream
from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.ladder import COMPUTED_BYTES_PER_S
from storage_server.cache.policies.order import Request


@pytest.mark.slow
def test_the_command_replays_and_shows_each_set(tmp_path: Path) -> None:
    file, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert run(["replacing", "--smoke", "--traces", "conversation", "--json", str(file), "--plot", str(chart)]) == 0
    result = json.loads(file.read_text())
    assert [row["codecs"] for row in result["rows"]] == list(SETS)
    assert chart.stat().st_size > 1000
    (shown,) = show(result)["replayed"]
    assert not isinstance(shown, str)
    assert len(shown.rows) == 1
    assert shown.rows[0][-1] == f"{result['rows'][-1]['cost_s'] / result['rows'][0]['cost_s']:.3f}"


def test_what_is_missing_is_computed_and_what_is_there_is_loaded() -> None:
    """Two chunks that are asked for twice, in room for both, for one, and for two that are encoded."""
    stream = Stream([Request(float(at), (key,), (512,)) for at, key in enumerate("abab")], 1024)
    chunk_s = LAYOUT.nbytes / COMPUTED_BYTES_PER_S
    whole = replay(stream, 1.0, 1.0, ())
    assert (whole["hit_rate"], whole["computed_s"]) == (0.5, pytest.approx(2 * chunk_s))
    assert whole["cost_s"] == pytest.approx(2 * chunk_s + 2 * LAYOUT.nbytes / READ_BYTES_PER_S)
    assert replay(stream, 0.5, 1.0, ())["hit_rate"] < 0.5
    encoded = replay(stream, 0.6, 1.0, (Codec.KIVI8,))
    assert encoded["hits"] == {"kivi8-1": 2}
    lost = 2 * (1 - DEFAULT_CODECS[Codec.KIVI8].quality)
    assert encoded["lost_quality_s"] == pytest.approx(lost)
    assert encoded["cost_s"] == pytest.approx(encoded["computed_s"] + encoded["loaded_s"] + lost)
    assert encoded["quality"] == pytest.approx(1 - lost / 2)
