"""The token's text and the plan of a put: golden values and properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.descriptor import ADDRESS_MAX
from descriptors.errors import CallerError, ErrorCode
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from descriptors.rdma_token import TOKEN_CHARACTERS_MAX, ObjectPath, RdmaToken, encode_token, parse_token
from storage_server.planning.put_plan import chunk_spans, one_run

NAMES = st.text("abcXYZ019._-", min_size=1, max_size=64)
IDS = st.text("abcXYZ019._-", min_size=16, max_size=64)


@given(
    agent=NAMES,
    region=NAMES,
    span=st.tuples(st.integers(0, ADDRESS_MAX), st.integers(0, ADDRESS_MAX)).filter(lambda s: sum(s) <= ADDRESS_MAX),
    request_id=IDS,
    path=st.sampled_from(ObjectPath),
)
def test_a_token_is_read_as_it_was_written(
    agent: str, region: str, span: tuple[int, int], request_id: str, path: ObjectPath
) -> None:
    """And fits its limit, whatever it holds."""
    token = RdmaToken(agent, region, *span, request_id, path)
    text = encode_token(token)
    assert parse_token(text) == token
    assert len(text) <= TOKEN_CHARACTERS_MAX


def test_the_golden_token_of_the_docs() -> None:
    token = RdmaToken("agent-1", "kv", 4096, 65536, "request-00000001")
    assert encode_token(token) == (
        "objectcache-1.eyJhZ2VudF9pZCI6ImFnZW50LTEiLCJyZWdpb25faWQiOiJrdiIsIm9mZnNldCI6NDA5NiwibGVuZ3RoIjo2NTUzNiwi"
        "cmVxdWVzdF9pZCI6InJlcXVlc3QtMDAwMDAwMDEiLCJwYXRoIjoiZGlyZWN0In0"
    )


def test_a_value_that_breaks_a_rule_cannot_be_made() -> None:
    """So whoever holds a token need not look again."""
    good = ("agent-1", "kv", 0, 0, "request-00000001")
    RdmaToken(*good)
    for index, value in ((0, ""), (1, "a b"), (2, -1), (2, True), (3, 1 << 64), (4, "short")):
        fields = [*good]
        fields[index] = value  # type: ignore[call-overload]
        with pytest.raises(CallerError) as refused:
            RdmaToken(*fields)  # type: ignore[arg-type]
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT


@given(
    mode=st.sampled_from(Mode),
    layers=st.integers(1, 6),
    slice_size=st.integers(1, 50),
    chunk_count=st.integers(1, 8),
    step=st.integers(1, 200),
)
def test_the_spans_of_every_chunk_take_its_bytes_out_of_the_buffer(
    mode: Mode, layers: int, slice_size: int, chunk_count: int, step: int
) -> None:
    """In both orders, cut anywhere: each chunk comes back in KV_L2TD order, and no span is empty."""
    layout = ChunkLayout(layers, 16, slice_size)
    chunks = np.arange(chunk_count * layout.chunk_bytes).reshape(chunk_count, layers, slice_size)
    buffer = (chunks if mode is Mode.CHUNK_MAJOR else chunks.transpose(1, 0, 2)).reshape(-1)
    for index in range(chunk_count):
        spans_of = chunk_spans(mode, layout, chunk_count, index)
        spans = [
            span
            for start in range(0, layout.chunk_bytes, step)
            for span in spans_of(start, min(step, layout.chunk_bytes - start))
        ]
        taken = np.concatenate([buffer[span.offset : span.offset + span.nbytes] for span in spans])
        assert np.array_equal(taken, chunks[index].reshape(-1))
        assert all(span.nbytes > 0 for span in spans)


def test_one_object_is_one_span() -> None:
    (span,) = one_run(10, 90)
    assert (span.offset, span.nbytes) == (10, 90)
