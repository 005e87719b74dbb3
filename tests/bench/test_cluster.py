"""`bench cluster`: the keys of the result, every byte compared, and a kill in the middle of a delivery."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.paper.cluster.downlinks import simulated_downlinks
from bench.paper.cluster.figure_3 import Placed, figure_3
from bench.paper.cluster.run import CLUSTER, split_samples
from bench.paper.cluster.table_7 import Mover
from descriptors.layout import ChunkLayout


@pytest.mark.bench_smoke
@pytest.mark.needs_server
@pytest.mark.timeout(300)
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    parser = argparse.ArgumentParser()
    CLUSTER.add(parser.add_subparsers(required=True))
    options = parser.parse_args(["cluster", "--smoke", "--transports", "shm", "--json", str(file)])
    assert options.command(options) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["verified"]
    assert result["three_over_one"].keys() == result["recovery_s"].keys() == {"shm"}
    assert result["split_ms"]["median"] > 0
    assert {target["what"] for target in result["targets"]} == {
        "three servers over one, layer-major from DRAM",
        "cost of the split, ms",
        "rate of three servers over the client's downlink",
    }
    assert [row["servers"] for row in result["figure_3"]] == [4, 4, 4, 8, 8, 8]
    (row,) = result["table_7"]["rows"]
    assert row["block_mib"] == 1
    assert row["bytes_per_s"].keys() | result["table_7"]["missing"].keys() == {mover.value for mover in Mover}
    assert row["bytes_per_s"].keys() >= {"MPI", "UCX", "TCP", "shared memory", "Gloo"}
    assert "three over one" in capsys.readouterr().out


@pytest.mark.slow
def test_simulated_keepers_add_their_memory_up_and_hedges_stay_within_their_bound() -> None:
    rows = {(row["servers"], row["placed"], row["hedged"]): row for row in figure_3((4, 16), 60, 7)}
    for count in (4, 16):
        keepers, hedged, random = (
            rows[count, Placed.KEEPERS.value, False],
            rows[count, Placed.KEEPERS.value, True],
            rows[count, Placed.RANDOM.value, False],
        )
        assert keepers["requests"] == hedged["requests"] == random["requests"] == 60 * count // 4
        assert keepers["from_home"] < random["from_home"]
        assert keepers["loaded_tokens"] == random["loaded_tokens"]  # the home has the same chunks
        assert keepers["hedges"] == 0
        assert 0 <= hedged["hedged_bytes"] <= 0.03
        for row in (keepers, hedged, random):
            assert row["from_dram"] + row["from_disk"] + row["from_home"] == pytest.approx(1.0)
    assert rows[4, Placed.KEEPERS.value, False]["of_linear"] == 1.0


@pytest.mark.slow
def test_simulated_servers_that_ask_for_shares_bring_one_prefix_as_soon_as_the_downlink_allows() -> None:
    for row in simulated_downlinks(7):
        assert 1.0 - 1e-9 <= row["asked"] <= row["equal"] + 1e-9
        assert row["peak"] <= 1.55
        if row["requests"] == 1:
            assert row["asked"] < 1.001


def test_the_split_is_measured_for_every_chunk() -> None:
    assert len(split_samples(100, ChunkLayout(4, 16, 64), 7)) == 7
