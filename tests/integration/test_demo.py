"""The demo runs as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.tree import repository

for name in ("boto3", "matplotlib", "torch", "tqdm", "transformers"):
    pytest.importorskip(name)

ROOT = repository()


@pytest.mark.slow
def test_the_demo_finds_the_right_prefix_right_and_wrong_ones_wrong(tmp_path):
    """`make demo` in small: server, boto3 puts, layerwise fetch, model, comparison, picture."""
    figures, picture = tmp_path / "figures.json", tmp_path / "out" / "timeline.png"
    command = [sys.executable, "-m", "demo", "--quick", "--json", str(figures), "--out", str(picture)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(figures.read_text())
    assert found["is_right_accepted"]
    assert found["is_wrong_refused"]
    assert found["layer_major_difference"] <= 1e-3
    assert found["is_layer_major_bit_equal"]
    assert found["foreign_chunk_difference"] > 1e-3
    assert {"recompute", "chunk_major", "layer_major"} <= found["ttft"].keys()
    assert len(found["transfer_s"]) == len(found["compute_s"]) == found["num_layers"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
