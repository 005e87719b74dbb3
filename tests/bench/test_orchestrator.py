"""`bench orchestrator` at its smallest: every part but the real engines, which `make test-engines` tries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cli import run
from bench.paper.orchestrator.simulated import one_regret, over_others


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "orchestrator.json"
    assert run(["orchestrator", "--smoke", "--json", str(file), "--plot", str(tmp_path / "chart.png")]) == 0
    found = json.loads(file.read_text())
    assert found["problem"] is None
    assert {row["arrivals"] for row in found["simulated"]} == {"poisson", "bursts of up to 16"}
    for row in found["simulated"]:
        assert len(row["policies"]) == 6
        counts = {each["count"] for each in row["policies"].values()}
        assert len(counts) == 1
    assert found["cost"]["decision"]["indexed_blocks"] > 10_000
    assert found["cost"]["streams"]["streams_per_core_s"] > 0
    assert [row["entries"] for row in found["cost"]["metadata"]] == [100]
    assert round(found["model"]["strategies"][1]["average_ms"]) == 985
    assert [each["node"] for each in found["model"]["allocations"]] == ["node-a", "node-b", "node-a", None]
    assert found["model"]["at_once"] == {"offered": 10, "active_max": 3, "admitted": 3, "refused": 7}
    said = capsys.readouterr().out
    assert "best other over ours" in said


def test_no_assignment_is_better_than_the_best_one() -> None:
    assert all(one_regret(seed) >= -1e-9 for seed in range(3))


def test_ratios_are_those_of_the_best_other_policy() -> None:
    names = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_mean_s")
    rows = {
        policy: dict.fromkeys(names, value) for policy, value in (("ttft", 1.0), ("paper", 3.0), ("kv_events", 2.0))
    }
    assert over_others(rows)["ttft_p90_over"] == {"best_other": "kv_events", "ratio": 2.0}
