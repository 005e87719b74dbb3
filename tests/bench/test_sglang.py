"""`bench sglang` compares every page, and judges ours by the rounds that it shared with SGLang's own back-end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cli import run
from bench.experiments.sglang import OPERATIONS, Backend, SGLangSettings, plot, show, targets_of


@pytest.mark.bench_smoke
@pytest.mark.environments
@pytest.mark.timeout(300)
def test_smoke_measures_every_back_end_and_checks_its_pages(tmp_path: Path) -> None:
    file, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert run(["sglang", "--smoke", "--json", str(file), "--plot", str(chart)]) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert chart.stat().st_size > 0
    measured = {(row["way"], row["operation"]) for row in result["sglang"]}
    assert measured == {(way.value, operation) for way in Backend for operation in OPERATIONS}
    assert all(row["seconds"]["median"] > 0 for row in result["sglang"])


def test_targets_take_the_better_of_our_ways_in_the_same_rounds() -> None:
    seconds = {
        Backend.OURS: {"exists": [1.0, 2.0], "get": [2.0, 2.0]},
        Backend.OURS_HTTP: {"exists": [4.0, 4.0], "get": [1.0, 1.0]},
        Backend.SEAWEEDFS: {"exists": [12.0, 24.0], "get": [2.0, 2.0]},
    }
    exists, get = (target.json() for target in targets_of(seconds))
    assert (exists["value"]["median"], exists["is_met"]) == (12.0, True)
    assert (get["value"]["median"], get["is_met"]) == (2.0, True)


def test_without_the_other_back_end_nothing_is_judged() -> None:
    targets = targets_of({Backend.OURS: {"exists": [1.0], "get": [1.0]}})
    assert [target.is_met for target in targets] == [None, None]


def test_a_page_has_keys_and_values_of_all_layers() -> None:
    assert SGLangSettings().page_bytes == 512 << 10


def test_times_are_shown_beside_those_of_the_other_back_end(tmp_path: Path) -> None:
    rows = [
        {"way": way, "operation": "get", "seconds": {"median": seconds, "min": seconds, "max": seconds}}
        for way, seconds in (("objectcache", 0.01), ("seaweedfs", 0.04))
    ]
    result = {"sglang": rows, "targets": []}
    head, *lines = show(result)["sglang"][0].markdown().splitlines()  # type: ignore[union-attr]
    assert "seaweedfs over it" in head
    assert "4.0" in "".join(lines)
    plot(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").exists()
