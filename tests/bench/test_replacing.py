"""`bench replacing` replays streams through the product's policy, and counts what each set of codecs costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cli import run
from bench.paper.compression.replacing import (
    DEFAULT_CODECS,
    EXACT_BYTES,
    HOME_BYTES_PER_S,
    READ_BYTES_PER_S,
    REPLAYS,
    SETS,
    replay_bucket,
    replay_memory,
    show,
)
from bench.paper.tiers.replay import Stream
from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.ladder import COMPUTED_BYTES_PER_S
from storage_server.cache.policies.order import Request


@pytest.mark.slow
def test_the_command_replays_and_shows_each_set(tmp_path: Path) -> None:
    file, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert run(["replacing", "--smoke", "--traces", "conversation", "--json", str(file), "--plot", str(chart)]) == 0
    result = json.loads(file.read_text())
    assert [(row["place"], row["codecs"]) for row in result["rows"]] == [
        (place, name) for place in REPLAYS for name in SETS
    ]
    assert chart.stat().st_size > 1000
    (shown,) = show(result)["replayed"]
    assert not isinstance(shown, str)
    assert len(shown.rows) == len(REPLAYS)
    assert shown.rows[0][-1] == f"{result['rows'][len(SETS) - 1]['cost_s'] / result['rows'][0]['cost_s']:.3f}"


def test_what_is_missing_is_computed_and_what_is_there_is_loaded() -> None:
    """Two chunks that are asked for twice, in room for both, for one, and for two that are encoded."""
    stream = Stream([Request(float(at), (key,), (512,)) for at, key in enumerate("abab")], 1024)
    chunk_s = EXACT_BYTES / COMPUTED_BYTES_PER_S
    whole = replay_bucket(stream, 2 * EXACT_BYTES, 1.0, ())
    assert (whole["hit_rate"], whole["missed_s"]) == (0.5, pytest.approx(2 * chunk_s))
    assert whole["cost_s"] == pytest.approx(2 * chunk_s + 2 * EXACT_BYTES / READ_BYTES_PER_S)
    assert replay_bucket(stream, EXACT_BYTES, 1.0, ())["hit_rate"] < 0.5
    encoded = replay_bucket(stream, int(1.2 * EXACT_BYTES), 1.0, (Codec.KIVI8,))
    assert encoded["hits"] == {"kivi8-1": 2}
    lost = 2 * (1 - DEFAULT_CODECS[Codec.KIVI8].quality)
    assert encoded["lost_quality_s"] == pytest.approx(lost)
    assert encoded["cost_s"] == pytest.approx(encoded["missed_s"] + encoded["read_s"] + lost)
    assert encoded["quality"] == pytest.approx(1 - lost / 2)


def test_what_memory_has_not_comes_from_home() -> None:
    """Two chunks that are asked for three times each: in room for both, and encoded in room for both."""
    stream = Stream([Request(float(at), (key,), (512,)) for at, key in enumerate("ababab")], 1024)
    whole = replay_memory(stream, 2 * EXACT_BYTES, 1.0, ())
    assert whole["hits"] == {"exact": 4}
    assert whole["missed_s"] == pytest.approx(2 * EXACT_BYTES / HOME_BYTES_PER_S)
    assert whole["cost_s"] == pytest.approx(whole["missed_s"] + 4 * EXACT_BYTES / 8e9)
    encoded = replay_memory(stream, int(1.2 * EXACT_BYTES), 0.1, (Codec.KIVI4,))
    assert encoded["hits"].get("kivi4-1", 0) >= 2
    assert encoded["cost_s"] == pytest.approx(encoded["missed_s"] + encoded["read_s"] + encoded["lost_quality_s"])
