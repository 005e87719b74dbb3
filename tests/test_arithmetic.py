"""Layout, keys, TTFT, plan and mode: numbers from the paper and properties."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout, slice_bytes
from descriptors.notices import Mode
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.ttft import stall_s, ttft_chunkwise_s, ttft_layerwise_s, zero_stall_rate_bytes_per_s
from descriptors.units import KIB, MIB, bytes_per_s_from_gbps, gbps_from_bytes_per_s
from storage_server.gather.plan import plan_delivery
from storage_server.scheduler.mode import choose_mode

TABLES = json.loads((Path(__file__).parent / "data" / "paper_tables.json").read_text())


def test_llama_31_8b_has_64_kib_slices_at_16_tokens() -> None:
    """Eq. 1 with 8 KV heads of 128 in bf16: the paper's S, and 1 MiB at 256 tokens."""
    assert slice_bytes(16, 8, 128, 2) == 64 * KIB
    assert slice_bytes(256, 8, 128, 2) == MIB


def test_a_layer_is_one_range_of_a_chunk_and_one_block_of_a_payload() -> None:
    layout = ChunkLayout(32, 16, 65536)
    assert layout.chunk_bytes == 2 * MIB
    assert layout.layer_range(3) == (3 * 65536, 65536)
    assert layout.layer_offset(3, 10) == 3 * 10 * 65536
    with pytest.raises(IndexError):
        layout.layer_range(32)


@pytest.mark.parametrize("row", TABLES["table_a7"], ids=lambda row: f"{row['context']}-G{row['chunk_tokens']}")
def test_payload_counts_are_those_of_table_a7(row: dict[str, int]) -> None:
    """Client-visible elements before and after bounded aggregation (paper, Table A7)."""
    layout = ChunkLayout(32, row["chunk_tokens"], 4096 * row["chunk_tokens"])
    plan = plan_delivery(Mode.LAYER_MAJOR, layout, row["chunks"], row["agg_payload_mib"] * MIB)
    assert plan.payload_count == row["elements_after"]
    assert len(list(plan.payloads())) == row["elements_after"]
    assert row["chunks"] * layout.num_layers == row["original_elements"]


@given(
    mode=st.sampled_from(Mode),
    layers=st.integers(1, 6),
    slice_size=st.integers(1, 300),
    chunk_count=st.integers(1, 12),
    aggregation=st.integers(1, 400),
)
def test_payloads_tile_the_target_and_read_every_byte_once(
    mode: Mode, layers: int, slice_size: int, chunk_count: int, aggregation: int
) -> None:
    """Carrying out the plan on an array gives the layer-major (or chunk-major) payload, in order, without overlap."""
    layout = ChunkLayout(layers, 16, slice_size)
    rng = np.random.default_rng(0)
    chunks = rng.integers(0, 256, (chunk_count, layout.chunk_bytes), dtype=np.uint8)
    plan = plan_delivery(mode, layout, chunk_count, aggregation)
    out = np.zeros(layout.payload_bytes(chunk_count), dtype=np.uint8)
    at = 0
    for payload in plan.payloads():
        assert payload.target_offset == at, "payloads go out in order, without gaps"
        assert 0 < payload.nbytes <= aggregation
        for i in range(payload.first_chunk, payload.first_chunk + payload.chunk_count):
            piece = chunks[i, payload.source_offset : payload.source_offset + payload.piece_bytes]
            out[at : at + payload.piece_bytes] = piece
            at += payload.piece_bytes
        assert payload.ends_group == (at % plan.group_bytes == 0)
    assert at == plan.payload_bytes
    by_layer = chunks.reshape(chunk_count, layers, slice_size).transpose(1, 0, 2).ravel()
    assert np.array_equal(out, by_layer if mode is Mode.LAYER_MAJOR else chunks.ravel())


def test_theta_decides_only_when_the_caller_does_not() -> None:
    """Eq. 2: chunk-major below Theta, layer-major from Theta on."""
    assert choose_mode(Delivery.AUTO, 99, 100) is Mode.CHUNK_MAJOR
    assert choose_mode(Delivery.AUTO, 100, 100) is Mode.LAYER_MAJOR
    assert choose_mode(Delivery.LAYER_MAJOR, 1, 100) is Mode.LAYER_MAJOR
    assert choose_mode(Delivery.CHUNK_MAJOR, 1000, 100) is Mode.CHUNK_MAJOR


def test_eq3_hides_transfer_under_compute() -> None:
    """X_0 + sum max(X_{l+1}, C_l) + C_{L-1}."""
    assert ttft_layerwise_s([1, 1, 1], [2, 2, 2]) == 1 + 2 + 2 + 2
    assert ttft_layerwise_s([3, 3, 3], [2, 2, 2]) == 3 + 3 + 3 + 2
    assert ttft_chunkwise_s([3, 3, 3], [2, 2, 2]) == 15
    with pytest.raises(ValueError, match="one entry per layer"):
        ttft_layerwise_s([1], [])


@pytest.mark.parametrize("row", TABLES["table_a8"], ids=lambda row: f"{row['context']}-{row['hit_rate']}")
def test_zero_stall_rates_are_those_of_table_a8(row: dict[str, float]) -> None:
    """B_req = D/t (paper, section 5.3): 4,096 bytes a token and layer, GB/s as 2^30 bytes rounded to 0.01."""
    layer_bytes = row["cached_tokens"] * 4096
    compute_s = row["compute_ms_total"] / 32 / 1000
    rate = zero_stall_rate_bytes_per_s(layer_bytes, compute_s)
    printed = row["required_gbytes_per_s"]
    assert min(abs(rate / 1e9 - printed), abs(rate / 2**30 - printed)) <= 0.011
    assert stall_s(layer_bytes, rate, compute_s) == pytest.approx(0, abs=1e-12)


def test_gbps_are_decimal_bits() -> None:
    assert bytes_per_s_from_gbps(100) == 12.5e9
    assert gbps_from_bytes_per_s(12.5e9) == 100


NAMESPACE = Namespace(model="llama-3.1-8b", dtype="bfloat16", block_tokens=16)


def test_prefix_keys_are_the_documented_ones() -> None:
    """Golden vectors of docs/protocol.md."""
    assert NAMESPACE.text() == (
        "model=llama-3.1-8b\ndtype=bfloat16\nlayout=KV_L2TD\nblock_tokens=16\n"
        "tp_rank=0\ntp_size=1\npp_rank=0\npp_size=1\nlora=\nsalt=\n"
    )
    keys = chunk_keys(NAMESPACE.text(), list(range(40)), 16)
    assert keys == [
        "4ad69dad7bb2ca5ae5127493cc173a1160451cc4a0e71f0f453cd13dbc651099",
        "08bbe4fcb7f145acd0ac8d8716e3fe9ec4dd58baeb4729d88c73a05e6e541386",
    ]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(1, 9))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens: list[int], chunk_tokens: int) -> None:
    """What makes sharing work; a partial last chunk has no key."""
    keys = chunk_keys("n", tokens, chunk_tokens)
    assert len(keys) == len(tokens) // chunk_tokens
    for cut in range(0, len(tokens), 7):
        assert chunk_keys("n", tokens[:cut], chunk_tokens) == keys[: cut // chunk_tokens]


def test_namespaces_that_differ_share_no_text() -> None:
    """A value that looks like the next field must not collide with it."""
    assert Namespace("m\nlora=x", "d", 16).text() != Namespace("m", "d", 16, lora="x").text()
    assert Namespace("m%0A", "d", 16).text() != Namespace("m\n", "d", 16).text()


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], [[1]]])
def test_tokens_must_be_unsigned_32_bit(tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        chunk_keys("n", tokens, 1)  # type: ignore[arg-type]
