"""`objectcache calibrate quality`: what it writes, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.beds.vllm_servers import make_model
from objectcache.calibration.form_losses import FormLoss, TextSample
from objectcache.cli.calibrate_quality import codecs_table
from objectcache.cli.calibrate_theta import tiers_of
from objectcache.cli.config import load_config
from objectcache.cli.config_compression import CompressionConfig
from objectcache.cli.config_values import ConfigError
from objectcache.cli.main import run
from objectcache.kv_codecs.chains import chain_name
from objectcache.kv_codecs.layer import Codec
from storage_server.planning.forms import TIER_CODECS
from tests.support.tree import repository

RATES = {codec.value: 1e9 for codec in TIER_CODECS} | {"k8v4-1": 3e9, "kivi4-1": 5e9}


@pytest.mark.slow
def test_a_models_codecs_are_written_and_can_be_read_again(tmp_path: Path) -> None:
    """The file keeps what else is in it, and a server takes it."""
    pytest.importorskip("transformers")
    make_model(tmp_path / "model", hidden_size=128, layers=2)
    file = tmp_path / "objectcache.toml"
    file.write_text('[compression]\npolicy = "adaptive" # ours\nalpha_s = 2.5\n')
    texts = repository() / "docs" / "guides" / "compression.md"
    asked = ["calibrate", "quality", str(tmp_path / "model"), str(texts), "--config", str(file)]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert run([*asked, "--smoke", *files]) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert {row["codec"] for row in told["codecs"]} >= {"exact", "k8v4-1", "fp8-1"}
    assert all(row["kl"]["low"] <= row["kl"]["mean"] <= row["kl"]["high"] for row in told["codecs"])
    chains = [row["codec"] for row in told["chains"]]
    assert chains == ["kivi8-1>k8v4-1", "kivi8-1>kivi4-1", "k8v4-1>kivi4-1"], "those of the default codecs"
    assert not (tmp_path / "losses.json").exists(), "--smoke writes nothing"
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert "codecs" not in file.read_text(), "--smoke writes nothing"
    found = codecs_table(load_config(file), {"kivi4-1": 0.75}, RATES)
    assert found == {"kivi4-1": {"quality": 0.75, "decoded_bytes_per_s": 5e9}}
    assert tomllib.loads(file.read_text())["compression"]["alpha_s"] == 2.5


def test_the_qualities_of_a_class_are_written_beside_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "objectcache.toml"
    file.write_text('[compression]\npolicy = "adaptive"\n[compression.codecs.kivi4-1]\nquality = 0.9\n')
    with file.open("a") as more:
        more.write("decoded_bytes_per_s = 1e9\n")
    losses = [
        FormLoss("exact", 1.0, 0.0, 0.0, 3 * (TextSample(0.0, 0.0, 1.0, 0.0, 1.0),)),
        FormLoss("fp8-1", 0.5, 0.1, 0.1, 3 * (TextSample(0.2, 0.1, 0.5, -0.2, 1.0),)),
        FormLoss("kivi4-1", 0.3, 0.1, 0.1, 3 * (TextSample(0.1, 0.1, 0.53, -0.1, 1.0),)),
    ]
    monkeypatch.setattr(
        "objectcache.cli.calibrate_quality.measured", lambda options, named: (losses, "texts", (4, 128))
    )
    asked = ["calibrate", "quality", "x", __file__, "--class", "code", "--config", str(file)]
    assert run(asked) == 0
    settings = load_config(file).compression.settings()
    assert settings is not None
    assert settings.class_qualities == {"code": {Codec.KIVI4: 0.53}}, "a form off the curve is not offered"
    assert settings.codecs[Codec.KIVI4].quality == 0.9


def measured_forms(kl: float) -> list[FormLoss]:
    """Forms on three texts that lose alike, so that the upper end is the mean."""
    chained = [("kivi4-1", kl), ("kivi8-1>kivi4-1", 2 * kl), ("keydiff50-1", 1.0)]
    forms = [("exact", 0.0), *chained]
    return [FormLoss(codec, 0.3, 0.1, 0.1, 3 * (TextSample(kl, 0.0, 1.0, -kl, 1.0),)) for codec, kl in forms]


def calibrated(monkeypatch: pytest.MonkeyPatch, config: Path, model: str, layers: int, kl: float) -> int:
    """The exit status of a calibration that measured these figures."""
    told = measured_forms(kl), "texts", (layers, 128)
    monkeypatch.setattr("objectcache.cli.calibrate_quality.measured", lambda options, named: told)
    monkeypatch.setattr("objectcache.cli.calibrate_quality.decode_rates", lambda rounds: RATES)
    return run(["calibrate", "quality", model, __file__, "--config", str(config)])


def test_losses_of_several_models_are_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is measured again replaces itself; a form that drops tokens has no loss that holds everywhere."""
    config = tmp_path / "objectcache.toml"
    config.write_text("[compression]\nalpha_s = 2.5 # ours\n")
    for model, layers, kl in (("a/m", 4, 0.5), ("/x/c/", 8, 0.125), ("/x/m", 4, 0.25), ("m", 6, 0.75)):
        assert calibrated(monkeypatch, config, model, layers, kl) == 0
    assert "alpha_s = 2.5 # ours" in config.read_text()
    with config.open("a") as more:
        more.write('[compression.models]\nkv = "c"\n')
    assert load_config(config).compression.losses == tmp_path / "losses.json"
    table = load_config(config).storage_settings(tmp_path).losses
    assert [(each.model, each.num_layers, each.width) for each in table.models] == [
        ("c", 8, 128), ("m", 4, 128), ("m", 6, 128),
    ]  # fmt: skip
    assert {chain_name(chain): loss.kl_high for chain, loss in table.models[1].forms.items()} == {
        "kivi4-1": 0.25, "kivi8-1>kivi4-1": 0.5,
    }  # fmt: skip
    assert (table.models[1].text_count, table.models[1].forms[(Codec.KIVI4,)].recall_loss_high) == (3, 0.25)
    assert table.bucket_models == {"kv": "c"}


@pytest.mark.parametrize(("text_count", "kv_shape"), [(1, (4, 128)), (3, None)])
def test_one_text_or_layers_of_different_widths_have_no_losses(
    text_count: int, kv_shape: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text has no interval, so there is no upper end; a chunk has layers of one width. Qualities stay."""
    config = tmp_path / "objectcache.toml"
    losses = [replace(each, samples=each.samples[:text_count]) for each in measured_forms(0.5)]
    monkeypatch.setattr("objectcache.cli.calibrate_quality.measured", lambda options, named: (losses, "one", kv_shape))
    monkeypatch.setattr("objectcache.cli.calibrate_quality.decode_rates", lambda rounds: RATES)
    assert run(["calibrate", "quality", "a", __file__, "--config", str(config)]) == 0
    assert list(tmp_path.iterdir()) == [config]
    assert load_config(config).compression.losses is None
    assert "kivi4-1" in load_config(config).compression.codecs


@pytest.mark.parametrize("damage", ["cut", "a field", "no file"])
def test_a_damaged_losses_file_stops_the_start_and_the_calibration(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses that are told too low are worse than none; the calibration says so before the minutes of measuring."""
    config, file = tmp_path / "objectcache.toml", tmp_path / "losses.json"
    assert calibrated(monkeypatch, config, "a/b", 4, 0.5) == 0
    whole = file.read_bytes()
    file.write_bytes(whole[:-10] if damage == "cut" else whole.replace(b'"kl_high": 0.5', b'"kl_high": 0.05'))
    if damage == "no file":
        file.unlink()
    reason = {"cut": "is not JSON", "a field": r"models.0.forms.kivi4-1: kl is from 0 on", "no file": "No such file"}
    with pytest.raises(ConfigError, match=reason[damage]):
        load_config(config).storage_settings(tmp_path)
    if damage != "no file":
        monkeypatch.setattr("objectcache.cli.calibrate_quality.measured", None)
        assert run(["calibrate", "quality", "a/b", __file__, "--config", str(config)]) == 2


def test_models_of_buckets_need_losses() -> None:
    with pytest.raises(ConfigError, match="models: losses names no file"):
        CompressionConfig(models={"kv": "worst"}).loss_table()


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


@pytest.mark.parametrize(
    "options",
    [
        ["x", "/not/there"],
        ["x", __file__, "--class", "No Class"],
    ],
)
def test_texts_that_cannot_be_are_refused(options: list[str]) -> None:
    assert run(["calibrate", "quality", *options]) == 2


@pytest.fixture(scope="module")
def ids() -> Any:
    torch = pytest.importorskip("torch")
    return torch.randint(0, 200, (1, 96), generator=torch.Generator().manual_seed(1))


def made(kind: str, **settings: Any) -> Any:
    """A tiny model of a kind, with the same random weights each time."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 200, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 16,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **(sizes | settings))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.train(False)
    return model


WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"), [("llama", {}), ("gemma3_text", WINDOWS), ("mistral", {"sliding_window": 32})]
)
def test_answers_behind_a_cache_are_those_of_the_whole_text(kind: str, settings: dict[str, Any], ids: Any) -> None:
    """Windows are shorter than the context, and the cache has every token of it."""
    from objectcache.calibration.quality import logits_behind, prefix_states

    model = made(kind, **settings)
    states = prefix_states(model, ids[:, :64])
    found = logits_behind(model, states, [ids[:, 64:], ids[:, 64:80]], 64)
    whole = model(ids, use_cache=False).logits[:, 64:].detach()
    assert [each.shape[1] for each in found] == [32, 16]
    for each in found:
        assert abs(each - whole[:, : each.shape[1]]).max() < 0.02, "but for the rounding of KV to bfloat16"


STATES = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
LATENT = {
    "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mamba", {"state_size": 8}, "states"),
        ("qwen3_next", STATES, "no cache of keys and values"),
        ("deepseek_v3", LATENT, "MLA"),
    ],
)
def test_models_without_keys_and_values_of_every_token_are_refused(
    kind: str, settings: dict[str, Any], reason: str, ids: Any
) -> None:
    from objectcache.calibration.quality import prefix_states
    from objectcache.calibration.real_model import UnusableModelError

    with pytest.raises(UnusableModelError, match=reason):
        prefix_states(made(kind, **settings), ids)


@pytest.mark.slow
def test_a_model_whose_keys_are_no_numbers_is_refused(ids: Any) -> None:
    from objectcache.calibration.quality import prefix_states
    from objectcache.calibration.real_model import UnusableModelError

    model = made("llama")
    model.model.layers[1].self_attn.k_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(UnusableModelError, match="layer 1 has values that are no numbers"):
        prefix_states(model, ids)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "emptied", "other shapes", "no configuration", "no model"])
def test_a_damaged_folder_is_refused_with_the_reason(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above all weights that are missing: transformers makes random ones in their place."""
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    if damage != "no model":
        make_model(folder, hidden_size=128, layers=2)
    if damage == "cut":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "emptied":
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.self_attn.k_proj.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    elif damage == "other shapes":
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"intermediate_size": 256', '"intermediate_size": 512'))
    elif damage == "no configuration":
        (folder / "config.json").write_text("{")
    assert run(["calibrate", "quality", str(folder), __file__, "--smoke"]) == 1
    told = capsys.readouterr().err
    assert "cannot be loaded" in told or "its folder lacks" in told
    assert damage != "emptied" or "lacks 1 weights" in told
