"""Payloads of a delivery: the counts of the paper, and that payloads tile the target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from descriptors.units import MIB
from storage_server.planning.plan import plan_delivery
from tests.support.tree import paper_tables

TABLES = paper_tables()


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
    out = np.zeros(layout.delivery_bytes(chunk_count), dtype=np.uint8)
    at = 0
    for payload in plan.payloads():
        assert payload.target_offset == at, "payloads go out in order, without gaps"
        assert 0 < payload.nbytes <= aggregation
        for i in range(payload.first_chunk, payload.first_chunk + payload.chunk_count):
            piece = chunks[i, payload.source_offset : payload.source_offset + payload.piece_bytes]
            out[at : at + payload.piece_bytes] = piece
            at += payload.piece_bytes
        assert payload.ends_group == (at % payload.group.nbytes == 0)
    assert at == plan.delivery_bytes
    by_layer = chunks.reshape(chunk_count, layers, slice_size).transpose(1, 0, 2).ravel()
    assert np.array_equal(out, by_layer if mode is Mode.LAYER_MAJOR else chunks.ravel())
