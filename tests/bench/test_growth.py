"""`bench growth` compares what it reads, and says which cost grows faster than the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cli import run
from bench.core.lines import plain
from bench.core.show import as_text
from bench.experiments import growth
from bench.experiments.growth import Costs, GrowthSettings, Part, exponent_of, measure_growth, show, targets_of
from bench.paper.tiers.blocks import BytesBody

SETTINGS = GrowthSettings(objects=(256,), operations=32, runs=1, parts=(Part.OBJECTS,))


@pytest.mark.bench_smoke
def test_smoke_measures_every_part_at_every_count(tmp_path: Path) -> None:
    file, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert run(["growth", "--smoke", "--json", str(file), "--plot", str(chart)]) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert chart.stat().st_size > 0
    assert {row["part"] for row in result["growth"]} == {part.value for part in Part}
    for row in result["growth"]:
        assert len(row["costs"]) == 2
        assert row["exponent"] is not None
        assert all(each["cost_s"]["median"] > 0 for each in row["costs"])
    assert {"put", "get", "start", "put into a full cache"} <= {row["operation"] for row in result["growth"]}


def test_a_wrong_byte_is_the_problem_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongBody(BytesBody):
        def __init__(self, data: bytes) -> None:
            super().__init__(bytes(len(data)))

    monkeypatch.setattr(growth, "BytesBody", WrongBody)
    assert "is not what was put" in measure_growth(SETTINGS, {})["problem"]


def test_exponents_are_of_one_operation_for_each_that_is_there() -> None:
    flat, doubling = {10: 2.0, 1000: 2.0}, {10: 1.0, 100: 10.0, 1000: 100.0}
    assert exponent_of(flat, is_per_one=True) == pytest.approx(1)
    assert exponent_of(doubling, is_per_one=True) == pytest.approx(2)
    assert exponent_of(doubling, is_per_one=False) == pytest.approx(1)
    assert exponent_of({10: 1.0}, is_per_one=True) is None


def test_the_operation_that_grows_fastest_meets_the_target_or_is_named() -> None:
    costs = Costs()
    for count, cost_s in ((10, 1.0), (1000, 1.1)):
        costs.note(Part.MEMORY, "flat", count, cost_s)
    assert targets_of(costs.rows())[0]["is_met"] is True
    for count, cost_s in ((10, 1.0), (1000, 50.0)):
        costs.note(Part.OBJECTS, "searching", count, cost_s)
    [target] = targets_of(costs.rows())
    assert (target["is_met"], target["case"]) == (False, "searching, objects")
    shown = as_text({"problem": None}, show({"growth": plain(costs.rows()), "targets": [target]}))
    assert "searching" in shown
    assert "missed" in shown
