"""`bench tiers`: no policy beats the optimum, hits are counted as defined, and missed targets are printed."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.core.show import as_text
from bench.paper.tiers import run as command
from bench.paper.tiers.replay import (
    CHUNK_TOKENS,
    ONLINE,
    CapacityExceeded,
    Contender,
    Optimum,
    Stream,
    Trace,
    parsed,
    policy_of,
    read,
    replay,
)
from bench.paper.tiers.run import TIERS, compared, targets_of
from bench.paper.tiers.show import show
from storage_server.cache.policies.order import Key, Request
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.policies.recency import LeastRecentlyUsed
from tests.unit.storage_server.cache.policies.streams import hit_bytes, request, streams


def tiers(*arguments: str) -> int:
    """The sub-command's exit status."""
    parser = argparse.ArgumentParser()
    TIERS.add(parser.add_subparsers(required=True))
    options = parser.parse_args(["tiers", *arguments])
    status: int = options.command(options)
    return status


def best_by_trying(requests: Sequence[Request], capacity_bytes: int) -> int:
    """The most hits that any choice of residents after each request gets, for chunks of one byte."""
    found: dict[frozenset[Key], int] = {frozenset(): 0}
    for asked in requests:
        after: dict[frozenset[Key], int] = {}
        for kept, hits in found.items():
            gained = next((count for count, key in enumerate(asked.keys) if key not in kept), len(asked.keys))
            for chosen in _subsets(kept | set(asked.keys), capacity_bytes):
                after[chosen] = max(after.get(chosen, 0), hits + gained)
        found = after
    return max(found.values())


def _subsets(keys: Iterable[Key], size_max: int) -> Iterable[frozenset[Key]]:
    ordered = sorted(keys, key=str)
    for size in range(min(size_max, len(ordered)) + 1):
        yield from map(frozenset, combinations(ordered, size))


@given(stream=streams(count_max=6, size_max=1, depth_max=3), capacity_bytes=st.integers(0, 3))
def test_the_optimum_is_what_trying_every_choice_finds(stream: list[Request], capacity_bytes: int) -> None:
    assert hit_bytes(EvictionPolicy(capacity_bytes, Optimum(stream)), stream) == best_by_trying(stream, capacity_bytes)


@pytest.mark.parametrize("contender", ONLINE)
@given(stream=streams(size_max=1), capacity_bytes=st.integers(0, 15))
def test_no_policy_beats_the_optimum(contender: Contender, stream: list[Request], capacity_bytes: int) -> None:
    """For chunks of one size, for which the rule is exact."""
    optimum = hit_bytes(EvictionPolicy(capacity_bytes, Optimum(stream)), stream)
    assert 0 <= hit_bytes(policy_of(contender, capacity_bytes, Stream(stream, 0)), stream) <= optimum


def test_the_optimum_passes_over_a_chunk_that_never_comes_back() -> None:
    requests = [request(text, number) for number, text in enumerate(("a", "b", "c", "a"))]
    assert hit_bytes(EvictionPolicy(1, Optimum(requests)), requests) == 1
    assert hit_bytes(EvictionPolicy(1, LeastRecentlyUsed()), requests) == 0


def test_hits_are_tokens_of_the_leading_run_in_the_second_half() -> None:
    lines = [
        json.dumps({"t": second * 1000, "n": 2 * CHUNK_TOKENS + 10, "r": [7, 2, 20 + second, 1]}) for second in range(4)
    ]
    stream = parsed(lines)
    assert stream.requests[3] == Request(3.0, (7, 8, 23), (CHUNK_TOKENS, CHUNK_TOKENS, 10))
    assert stream.unique_bytes == 2 * CHUNK_TOKENS + 4 * 10
    served = replay(stream, EvictionPolicy(10**9, LeastRecentlyUsed()), lambda _: None)
    assert (served.hit_tokens, served.asked_tokens) == (4 * CHUNK_TOKENS, 2 * (2 * CHUNK_TOKENS + 10))


def test_a_stream_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        parsed([json.dumps({"t": time, "n": 1, "r": [1, 1]}) for time in (5, 4)])


@pytest.mark.parametrize(("trace", "count"), [(Trace.CONVERSATION, 12_031), (Trace.SYNTHETIC, 3_993)])
def test_the_whole_release_is_there(trace: Trace, count: int) -> None:
    """The counts are those of the release's README."""
    assert len(read(trace).requests) == count


def test_a_policy_that_keeps_too_much_is_found() -> None:
    class Greedy(EvictionPolicy):
        @property
        def used_bytes(self) -> int:
            return super().used_bytes + 1

    with pytest.raises(CapacityExceeded):
        replay(Stream([request("a")], 1), Greedy(1, LeastRecentlyUsed()), lambda _: None)


def test_the_share_of_the_gap_is_between_the_best_other_and_the_optimum() -> None:
    rates = {Contender.LRU: 0.2, Contender.ARC: 0.3, Contender.REUSE_VALUE: 0.35, Contender.OPTIMUM: 0.5}
    cell = compared(rates)
    assert cell["best_other"] is Contender.ARC
    assert cell["over_best_other"] == pytest.approx(0.35 / 0.3)
    assert cell["gap_closed"] == pytest.approx(0.25)
    assert [target.is_met for target in targets_of(cell, "x, 5 %", 5)] == [True, False]
    assert len(targets_of(cell, "x, 10 %", 10)) == 1
    assert compared({Contender.LRU: 0.0, Contender.REUSE_VALUE: 0.0, Contender.OPTIMUM: 0.0})["gap_closed"] is None


@pytest.mark.bench_smoke
@pytest.mark.timeout(300)
def test_smoke(tmp_path: Path) -> None:
    """With every table, for which all the stores are started one after the other: minutes."""
    file = tmp_path / "tiers.json"
    drawn = ["--plot", str(tmp_path / "charts")] if importlib.util.find_spec("matplotlib") else []
    assert tiers("--smoke", "--json", str(file), *drawn) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["verified"]
    if drawn:
        assert {path.name for path in (tmp_path / "charts").iterdir()} == {"tiers.png", "tiers-bandwidth.png"}
    check_tables(result)


@pytest.mark.slow
def test_hit_rates_of_every_policy_are_below_the_optimums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiers.json"
    assert tiers("--smoke", "--parts", "hit_rates", "--json", str(file)) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["verified"]
    assert set(result["hit_rates"]) == {trace.value for trace in Trace}
    for cells in result["hit_rates"].values():
        assert list(cells) == ["5 %"]
        rates = cells["5 %"]["policies"]
        assert list(rates)[-2:] == ["reuse-value", "optimum"]
        assert rates["optimum"] >= max(rates.values()) - 0.01
    assert len(result["targets"]) == 4
    assert "gap to the optimum closed" in capsys.readouterr().out


def check_tables(result: dict[str, Any]) -> None:
    """What must be so at any size and on any machine."""
    assert {name for name in result if name.startswith("table_")} == {f"table_{number}" for number in range(1, 7)}
    for size in result["table_1"]["sizes"].values():
        assert size["bytes_per_s"]["aggregated"].keys() == {"write", "write_synced", "read_cached", "read_cold"}
    shared = result["table_2"]["workloads"]["synthetic, 2048 shared tokens"]
    assert (shared["total_blocks"], shared["unique_blocks"]) == (9 * 10, 3 * 8 + 9 * 2)
    stored = shared["stored"]
    assert stored["sessions"]["dedup_ratio"] == pytest.approx(shared["dedup_ratio"])
    assert stored["prefixes"]["dedup_ratio"] == 1.0
    assert stored["prefixes"]["object_count"] == shared["unique_blocks"]
    systems = result["table_3"]["systems"]
    assert {row["hit_rate"]["median"] for row in systems.values() if row["hit_rate"] is not None} == {2 * 8 / 40}
    assert "PDC" in result["table_3"]["absent"]
    configurations = result["table_5"]["configurations"]
    assert {"whole", "without the DRAM tier", "before a home, without remote DRAM"} <= configurations.keys()
    assert ("before a home, whole" in configurations) != ("before a home, whole" in result["table_5"]["absent"])
    assert {row["hit_rate"]["median"] for row in configurations.values()} == {2 * 8 / 40}
    assert all(tier["bytes_per_s"]["min"] > 0 for tier in result["table_4"]["tiers"].values())
    assert result["table_6"]["blocks"].keys() == {"64 tokens", "256 tokens"}


def test_a_miss_is_printed_as_a_miss(tmp_path: Path) -> None:
    file = tmp_path / "tiers.json"
    arguments = [
        "--parts",
        "hit_rates",
        "--requests",
        "60",
        "--sizes",
        "5",
        "--traces",
        "synthetic",
        "--policies",
        "lru",
    ]
    assert tiers(*arguments, "--json", str(file)) == 0
    result = json.loads(file.read_text())
    assert list(result["hit_rates"]["synthetic"]["5 %"]["policies"]) == ["lru", "reuse-value", "optimum"]
    missed = copy.deepcopy(result)
    missed["targets"][0] |= {"value": 0.9, "is_met": False}
    assert "missed" in as_text(missed, show(missed))


@pytest.mark.parametrize(
    "arguments",
    [("--traces", "nonsense"), ("--policies", "optimum"), ("--sizes", "0"), ("--sizes", "5,5"), ("--requests", "1")],
)
def test_wrong_use_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        tiers(*arguments)
    assert left.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_policy_that_keeps_too_much_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CapacityExceeded("11 bytes of 10")

    monkeypatch.setattr(command, "replay", refuse)
    assert tiers("--smoke") == 1
