"""`bench cluster`: the keys of the result, every byte compared, and a kill in the middle of a delivery."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.experiments.cluster import CLUSTER, split_samples
from descriptors.layout import ChunkLayout


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
    }
    assert "three over one" in capsys.readouterr().out


def test_the_split_is_measured_for_every_chunk() -> None:
    assert len(split_samples(100, ChunkLayout(4, 16, 64), 7)) == 7
