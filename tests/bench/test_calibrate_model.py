"""`calibrate model`: a layer is measured, and the file has a profile that the scheduler takes compute times from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from objectcache.calibration.compute.measure import ComputePlan, smoke_plan
from objectcache.cli import calibrate_model
from objectcache.cli.calibrate_model import goes_by
from objectcache.cli.config import load_config
from objectcache.cli.config_tables import ComputeProfileConfig
from objectcache.cli.main import run

OWN = """[[compute_profiles]]
name = "theirs" # first
num_layers = 28
token_layer_bytes = 2048
request_us = 1.0
token_us = 1.0
token_pair_us = 0.0
hit_rate = 0.9
"""
PROFILE: dict[str, str | int | float] = {
    "name": "mistral-7b",
    "num_layers": 32,
    "token_layer_bytes": 4096,
    "request_us": 1.0,
    "token_us": 1.0,
    "token_pair_us": 0.0,
    "hit_rate": 0.5,
}


def tiny_plan(device: object, dtype: object, runs: int, seed: int) -> ComputePlan:
    """In place of the full one."""
    from objectcache.calibration.compute.layer import Device, Dtype

    return replace(smoke_plan(Device(device), Dtype(dtype), seed), runs=runs)


def test_a_profile_is_added_and_then_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others stay; the scheduler takes it as it is written."""
    monkeypatch.setattr(calibrate_model, "compute_plan", tiny_plan)
    path = tmp_path / "objectcache.toml"
    path.write_text(OWN)
    for _ in range(2):
        assert run(["calibrate", "model", "llama-3.1-8b", "--runs", "1", "--config", str(path)]) == 0
        assert path.read_text().startswith(OWN)
        profiles = load_config(path).scheduler_settings().profiles
        assert [each.name for each in profiles] == ["theirs", "llama-3.1-8b"]
        assert (profiles[1].num_layers, profiles[1].token_layer_bytes) == (32, 4096)
        assert profiles[1].hit_rate == 0.5
        assert profiles[1].layer_compute_s(1024) > 0


@pytest.mark.bench_smoke
def test_smoke_shows_the_fit_and_writes_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Raw samples in the JSON."""
    path, file, chart = (tmp_path / name for name in ("objectcache.toml", "out.json", "out.png"))
    arguments = ["--config", str(path), "--json", str(file), "--plot", str(chart)]
    assert run(["calibrate", "model", "deepseek-r1-7b", "--smoke", *arguments]) == 0
    result = json.loads(file.read_text())
    assert not path.exists()
    assert chart.stat().st_size > 0
    assert (result["what"], result["profile"]["name"], result["profile"]["hit_rate"]) == (
        "model",
        "deepseek-r1-7b",
        0.5,
    )
    assert len(result["layer"]) == len(result["errors"]) == 6
    assert '[[compute_profiles]]\nname = "deepseek-r1-7b"' in capsys.readouterr().out


def test_it_is_said_which_of_two_models_of_one_shape_counts() -> None:
    """Descriptors name layers and bytes, not a model: the first in the file it is."""
    same = ComputeProfileConfig.model_validate({**PROFILE, "name": "llama-3.1-8b"})
    other = ComputeProfileConfig.model_validate({**PROFILE, "name": "other", "num_layers": 28})
    own = ComputeProfileConfig.model_validate(PROFILE)
    assert goes_by([other], PROFILE) == "mistral-7b"
    assert goes_by([other, same], PROFILE) == "llama-3.1-8b"
    assert goes_by([own, same], PROFILE) == "mistral-7b"


def test_a_file_that_cannot_be_edited_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits minutes to hear that."""

    def measure(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(calibrate_model, "measure_compute", measure)
    path = tmp_path / "objectcache.toml"
    values = ", ".join(f"{key} = {value!r}" for key, value in PROFILE.items())
    path.write_text(f"compute_profiles = [{{{values}}}]\n")
    assert run(["calibrate", "model", "mistral-7b", "--config", str(path)]) == 2
    assert "edited safely" in capsys.readouterr().err


def test_a_model_whose_shape_is_not_known_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["calibrate", "model", "gpt-5"])
    assert "choose from 'llama-3.1-8b'" in capsys.readouterr().err
