"""`objectcache calibrate quality`: what it writes, and what it refuses."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from bench.beds.vllm_servers import make_model
from objectcache.cli.calibrate_quality import codecs_table, cut
from objectcache.cli.calibrate_theta import tiers_of
from objectcache.cli.config import load_config
from objectcache.cli.main import run
from objectcache.kv_codecs.layer import Codec
from tests.support.tree import repository

RATES = {"kivi8-1": 4e9, "k8v4-1": 3e9, "kivi4-1": 5e9, "kivi3-1": 1.5e9, "kivi2-1": 3e9}


@pytest.mark.slow
def test_a_models_codecs_are_written_and_can_be_read_again(tmp_path: Path) -> None:
    """The file keeps what else is in it, and a server takes it."""
    make_model(tmp_path / "model", hidden_size=128, layers=2)
    file = tmp_path / "objectcache.toml"
    file.write_text('[compression]\npolicy = "adaptive" # ours\nalpha_s = 2.5\n')
    texts = repository() / "docs" / "guides" / "compression.md"
    asked = ["calibrate", "quality", str(tmp_path / "model"), str(texts), "--config", str(file)]
    assert run([*asked, "--smoke", "--json", str(tmp_path / "out.json")]) == 0
    assert "codecs" not in file.read_text(), "--smoke writes nothing"
    found = codecs_table(load_config(file), {"kivi4-1": 0.75}, RATES)
    assert found == {"kivi4-1": {"quality": 0.75, "decoded_bytes_per_s": 5e9}}
    assert tomllib.loads(file.read_text())["compression"]["alpha_s"] == 2.5


def test_the_qualities_of_a_class_are_written_beside_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "objectcache.toml"
    file.write_text('[compression]\npolicy = "adaptive"\n[compression.codecs.kivi4-1]\nquality = 0.9\n')
    with file.open("a") as more:
        more.write("decoded_bytes_per_s = 1e9\n")
    row = {"codec": "kivi4-1", "bytes": 0.3, "worst_error": 0.1, "mean_error": 0.1, "agreement": 0.55, "kl": 0.0}
    row |= {"perplexity": 1.0, "perplexity_over_exact": 1.0, "quality": 0.53}
    monkeypatch.setattr("objectcache.cli.calibrate_quality.measured", lambda options: [row])
    asked = ["calibrate", "quality", "x", __file__, "--class", "code", "--config", str(file)]
    assert run(asked) == 0
    settings = load_config(file).compression.settings()
    assert settings is not None
    assert settings.class_qualities == {"code": {Codec.KIVI4: 0.53}}
    assert settings.codecs[Codec.KIVI4].quality == 0.9


def test_without_a_measurement_the_qualities_of_before_stay() -> None:
    """`calibrate theta` measures speeds only."""
    found = codecs_table(load_config(None), {}, RATES)
    assert set(found) == {"kivi8-1", "k8v4-1", "kivi4-1"}
    assert found["k8v4-1"]["decoded_bytes_per_s"] == 3e9


def test_the_rates_of_tiers_are_those_of_the_fastest_transport() -> None:
    def costs(state: str, rate: float) -> dict[str, object]:
        return {"state": state, "layer_major": {"bytes_per_s": rate}}

    assert tiers_of([costs("dram", 2e9), costs("dram", 8e9), costs("cold", 1e9)]) == {
        "memory_bytes_per_s": 8e9, "home_bytes_per_s": 1e9,
    }  # fmt: skip
    assert tiers_of([costs("page_cache", 1e9)]) == {}


def test_texts_are_spread_and_too_short_ones_refused() -> None:
    assert [list(each) for each in cut(list(range(10)), 2, 3)] == [[0, 1], [4, 5], [8, 9]]
    with pytest.raises(ValueError, match="are needed"):
        cut([1], 2, 3)


@pytest.mark.parametrize(
    "options",
    [
        ["x", "/not/there"],
        ["x", __file__, "--class", "No Class"],
    ],
)
def test_texts_that_cannot_be_are_refused(options: list[str]) -> None:
    assert run(["calibrate", "quality", *options]) == 2
