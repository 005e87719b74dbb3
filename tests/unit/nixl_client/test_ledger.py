"""The ledger: whatever order notices take, layers are ready when their bytes are, and not before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import ChunkUnavailable, ServerError
from descriptors.layout import ChunkLayout
from descriptors.notices import (
    Admitted,
    Done,
    Failed,
    LayerReady,
    Mode,
    Notice,
    NoticeError,
    decode_notice,
    encode_notice,
)
from nixl_client.fetch.delivery_state import DeliveryState, ProtocolViolationError

ID = "request-00000001"
LAYOUT = ChunkLayout(num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=10)
K = 6


def notices_of(parts: int) -> list[Notice]:
    """What `parts` servers say of a request of K chunks; the last one writes what does not divide."""
    share = [K // parts] * parts
    share[-1] += K - sum(share)
    said: list[Notice] = []
    for part, chunks in enumerate(share):
        said.append(Admitted(ID, Mode.LAYER_MAJOR, K, 0, 0, part, parts))
        for layer in range(LAYOUT.num_layers):
            said.append(LayerReady(ID, layer, layer * K * 10, chunks * 10, part, parts))
        said.append(Done(ID, chunks * LAYOUT.chunk_bytes, part, parts))
    return said


@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_any_order_with_duplicates_completes_every_layer(parts: int, rng: random.Random) -> None:
    """Notices overtake each other on the wire."""
    said = notices_of(parts) * 2
    rng.shuffle(said)
    ledger = DeliveryState(ID, LAYOUT, K)
    for notice in said:
        ledger.apply(notice)
    assert ledger.is_complete
    assert ledger.ready_count == 4


@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_layer_is_ready_exactly_when_every_part_has_reported_it(parts: int, rng: random.Random) -> None:
    """A notice proves its own write, not another server's."""
    said = [notice for notice in notices_of(parts) if not isinstance(notice, Done)]
    rng.shuffle(said)
    ledger = DeliveryState(ID, LAYOUT, K)
    heard: set[tuple[int, int]] = set()
    admitted = False
    for notice in said:
        ledger.apply(notice)
        if isinstance(notice, LayerReady):
            heard.add((notice.layer_index, notice.part))
        else:
            admitted = True
        for layer in range(4):
            assert ledger.is_ready(layer) == (admitted and all((layer, part) in heard for part in range(parts)))


@given(st.sets(st.integers(0, 3)))
def test_missing_layer_notices_are_made_good_by_done(lost: set[int]) -> None:
    """`done` is sent only after every write of its part."""
    ledger = DeliveryState(ID, LAYOUT, K)
    for notice in notices_of(1):
        if not (isinstance(notice, LayerReady) and notice.layer_index in lost):
            ledger.apply(notice)
    assert ledger.is_complete


def test_missing_everything_is_made_good_by_the_answer() -> None:
    """The answer to the request comes after every `done`."""
    ledger = DeliveryState(ID, LAYOUT, K)
    ledger.answer(Mode.LAYER_MAJOR, K)
    assert ledger.is_ready(3)


def test_layers_ready_before_a_failure_stay_good_and_no_more_come() -> None:
    ledger = DeliveryState(ID, LAYOUT, K)
    said = notices_of(1)
    for notice in [*said[:3], Failed(ID, 2, 5)]:
        ledger.apply(notice)
    assert [ledger.is_ready(layer) for layer in range(4)] == [True, True, False, False]
    assert isinstance(ledger.failure, ChunkUnavailable)
    assert (ledger.failure.index, ledger.failure.layer) == (5, 2)
    ledger.apply(said[-1])
    assert not ledger.is_complete


@pytest.mark.parametrize(
    "lie",
    [
        LayerReady(ID, 4, 0, 60),
        LayerReady(ID, 0, 0, 59),
        LayerReady(ID, 1, 0, 60, part=0, parts=2),
        LayerReady("another-request-1", 0, 0, 60),
        Admitted(ID, Mode.CHUNK_MAJOR, K),
        Admitted(ID, Mode.LAYER_MAJOR, K - 1),
        Done(ID, 1),
    ],
    ids=repr,
)
def test_contradictions_are_violations(lie: Notice) -> None:
    """Bytes of a server that contradicts itself must not be used."""
    ledger = DeliveryState(ID, LAYOUT, K)
    ledger.apply(Admitted(ID, Mode.LAYER_MAJOR, K))
    with pytest.raises(ProtocolViolationError):
        ledger.apply(lie)


def test_more_chunks_than_asked_for_is_a_violation() -> None:
    """The buffer holds N chunks."""
    with pytest.raises(ProtocolViolationError):
        DeliveryState(ID, LAYOUT, K).apply(Admitted(ID, Mode.LAYER_MAJOR, K + 1))


def test_fewer_chunks_than_were_asked_for_are_a_violation_where_all_must_come() -> None:
    """With on_missing=fail a server either sends all or says which one is missing."""
    with pytest.raises(ProtocolViolationError, match="5 chunks of 6"):
        DeliveryState(ID, LAYOUT, K, chunk_count_min=K).apply(Admitted(ID, Mode.LAYER_MAJOR, K - 1))
    DeliveryState(ID, LAYOUT, K, chunk_count_min=K).apply(Admitted(ID, Mode.LAYER_MAJOR, K))


@pytest.mark.parametrize("notice", [*notices_of(2), Failed(ID, 3, 4)], ids=repr)
def test_notices_survive_their_codec_and_truncations_do_not(notice: Notice) -> None:
    data = encode_notice(notice)
    assert decode_notice(data) == notice
    for cut in range(len(data)):
        with pytest.raises(NoticeError):
            decode_notice(data[:cut])
    with pytest.raises(NoticeError):
        decode_notice(data + b"\0")


@given(st.binary(max_size=60))
def test_garbage_is_no_notice(data: bytes) -> None:
    """Any agent that has our metadata can send us bytes."""
    with pytest.raises(NoticeError):
        decode_notice(b"OCN\x01" + data)


def test_an_answer_that_makes_no_sense_is_a_failure_of_the_server() -> None:
    """Connectors take failures of servers for misses; anything else would end their threads."""
    assert isinstance(ProtocolViolationError("played"), ServerError)
    assert not ProtocolViolationError("played").retryable
