"""The options, and the facts of an engine that names depend on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_client.connectors.sglang.engine import engine_identity, engine_name, pool_fields
from nixl_client.connectors.sglang.options import HiCacheOptions

FACTORY = {"backend_name": "objectcache", "module_path": "m", "class_name": "C", "interface_v1": 1}


def given(**options: object) -> dict[str, object]:
    return {**FACTORY, "endpoint": "http://127.0.0.1:9000", **options}


def test_the_keys_that_sglang_reads_are_no_options() -> None:
    options = HiCacheOptions.of(given(bucket="b", internals={"retry_s": 1.0}))
    assert (options.bucket, options.retry_s) == ("b", 1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (given(endpoint=""), "needs endpoint"),
        (given(interface_v1=0), '"interface_v1": 1'),
        (given(buckets="b"), "unknown options: buckets"),
        (given(transport="carrier"), "transport is one of"),
        (given(load_timeout_s=0), "load_timeout_s must be"),
        (given(load_timeout_s="10"), "must be of type float"),
        (given(content_class="A b"), "content_class has"),
        (given(epoch="x" * 65), "epoch has at most"),
        (given(internals={"staging_bytes": 0}), "staging_bytes must be"),
        (given(downlink_bytes_per_s=1.0), "downlink_bytes_per_s must be"),
    ],
)
def test_options_that_cannot_be_are_told_in_words(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HiCacheOptions.of(options)


def serving(folder: Path, **changes: object) -> Any:
    return SimpleNamespace(**{"model_path": str(folder), "dtype": "auto", "kv_cache_dtype": "auto", **changes})


def test_the_identity_follows_weights_configuration_and_arguments_and_not_the_path(tmp_path: Path) -> None:
    for name, weights, config in (
        ("a", b"1" * 64, {}),
        ("b", b"1" * 64, {}),
        ("c", b"2" * 64, {}),
        ("d", b"1" * 64, 1),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text(json.dumps(config))
    identities = {name: engine_identity(serving(tmp_path / name), "served", "") for name in "abcd"}
    assert identities["a"] == identities["b"]
    assert len(set(identities.values())) == 3
    assert engine_identity(serving(tmp_path / "a", kv_cache_dtype="fp8_e4m3"), "served", "") != identities["a"]
    assert engine_identity(serving(tmp_path / "a"), "another name", "") == identities["a"]
    assert engine_identity(serving(tmp_path / "a"), "served", "2") != identities["a"]


def test_an_adapter_that_is_replaced_at_its_path_has_other_pages(tmp_path: Path) -> None:
    """SGLang hashes an adapter that it starts with by name and path: the old one's KV would be taken for the new
    one's.
    """
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"1" * 64)
    path = str(tmp_path / "adapter")
    forms: list[object] = [{"name": path}, [path], [f"name={path}"], [{"lora_name": "name", "lora_path": path}]]
    forms.append([SimpleNamespace(lora_path=path)])
    identities = []
    for weights in (b"1" * 64, b"2" * 64):
        (tmp_path / "adapter" / "model.safetensors").write_bytes(weights)
        found = {engine_identity(serving(tmp_path / "model", lora_paths=given), "served", "") for given in forms}
        assert len(found) == 1
        identities += found
    assert identities[0] != identities[1]


def test_an_adapter_that_cannot_be_looked_at_shares_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1" * 64)
    arguments = serving(tmp_path, lora_paths=["org/absent"])
    assert engine_identity(arguments, "served", "") != engine_identity(arguments, "served", "")
    assert "nothing is shared" in caplog.text


def test_without_weights_to_look_at_the_name_decides_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert engine_identity(None, "one", "") != engine_identity(None, "two", "")
    assert engine_identity(serving(Path("org/absent")), "one", "") != engine_identity(serving(Path("org/b")), "one", "")
    assert "set epoch" in caplog.text


def test_people_know_a_model_by_the_last_part_of_its_path() -> None:
    assert engine_name(serving(Path("/models/Llama-3")), "served") == "Llama-3"
    assert (engine_name(None, "org/served"), engine_name(None, None)) == ("served", "model")


def test_a_pool_of_other_pages_has_other_fields() -> None:
    config: Any = SimpleNamespace(
        tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False
    )
    pool: dict[str, object] = {"layout": "page_first", "dtype": "bf16", "page_size": 64, "start_layer": 0}
    fields = pool_fields(config, "identity", "kv", SimpleNamespace(**pool))
    assert fields["tp"] == [1, 2]
    for change in ({"layout": "page_head"}, {"dtype": "fp8"}, {"page_size": 16}, {"start_layer": 8}):
        assert pool_fields(config, "identity", "kv", SimpleNamespace(**{**pool, **change})) != fields
