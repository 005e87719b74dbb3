"""The descriptor: invariants, and two codecs that are one value."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.descriptor import (
    CHUNK_COUNT_MAX,
    DESCRIPTOR_BYTES_MAX,
    EXTENDED_VERSION,
    Delivery,
    Descriptor,
    OnMissing,
    Portion,
    RdmaTarget,
)
from descriptors.descriptor_codec import decode_descriptor, decode_peer_descriptor, encode_binary, encode_json
from descriptors.errors import CallerError, ErrorCode

HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
TEXT = st.characters(codec="utf-8", exclude_characters="\0")
KEYS = st.one_of(
    st.lists(HEX, min_size=1, max_size=5, unique=True),
    st.builds(
        lambda prefix, digests: [prefix + digest for digest in digests],
        st.text(TEXT, max_size=40),
        st.lists(HEX, min_size=1, max_size=5, unique=True),
    ),
    st.lists(st.text(TEXT, min_size=1, max_size=40), min_size=1, max_size=5, unique=True),
)
IDS = st.text("abcXYZ019._-", min_size=16, max_size=64)
NAMES = st.text("abcXYZ019._-", min_size=1, max_size=64)


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    keys = tuple(draw(KEYS))
    layers = draw(st.integers(1, 64))
    slice_bytes = draw(st.integers(1, 1 << 20))
    target = None
    if draw(st.booleans()):
        length = len(keys) * layers * slice_bytes + draw(st.integers(0, 1 << 30))
        target = RdmaTarget(draw(NAMES), draw(NAMES), draw(st.integers(0, 1 << 40)), length)
    compute = draw(st.sampled_from([0, 1, layers]))
    places: tuple[int, ...] = ()
    delivery = draw(st.sampled_from(Delivery))
    if target is not None and delivery is Delivery.CHUNK_MAJOR and draw(st.booleans()):
        gaps = draw(st.lists(st.integers(0, 1 << 40), min_size=len(keys), max_size=len(keys)))
        ascending = [sum(gaps[: i + 1]) + i * layers * slice_bytes for i in range(len(keys))]
        places = tuple(draw(st.permutations(ascending)))
        target = replace(target, length=ascending[-1] + layers * slice_bytes)
    return Descriptor(
        version=EXTENDED_VERSION if places else 1,
        places=places,
        chunk_keys=keys,
        num_layers=layers,
        chunk_tokens=draw(st.integers(1, 4096)),
        per_layer_chunk_bytes=slice_bytes,
        delivery=delivery,
        on_missing=draw(st.sampled_from(OnMissing)),
        rdma_target=target,
        request_id=draw(IDS) if target is not None or draw(st.booleans()) else None,
        layer_compute_us=tuple(draw(st.lists(st.integers(0, 10**9), min_size=compute, max_size=compute))),
    )


GOLDEN = Descriptor(
    chunk_keys=("00" * 31 + "01", "00" * 31 + "02"),
    num_layers=32,
    chunk_tokens=16,
    per_layer_chunk_bytes=65536,
    delivery=Delivery.LAYER_MAJOR,
    on_missing=OnMissing.PREFIX,
    rdma_target=RdmaTarget("agent-1", "kv", 4096, 1 << 23),
    request_id="request-00000001",
    layer_compute_us=(5790,),
)
GOLDEN_HEX = (
    "4f434401000103100200000020000000100000000000010001000000"  # head
    "726571756573742d3030303030303031"  # request_id
    "9e160000"  # layer_compute_us
    "076167656e742d31026b7600100000000000000000800000000000" + ("00" * 31 + "01") + ("00" * 31 + "02")  # target
)


def test_binary_form_is_the_one_documented() -> None:
    """The golden bytes of docs/reference/protocol.md: other implementations are tested against them."""
    assert encode_binary(GOLDEN).hex() == GOLDEN_HEX
    assert decode_descriptor(bytes.fromhex(GOLDEN_HEX)) == GOLDEN


def test_what_all_keys_begin_with_is_written_once() -> None:
    keys = tuple(f"kv/m/l/r/{key}" for key in GOLDEN.chunk_keys)
    written = bytearray(bytes.fromhex(GOLDEN_HEX))
    written[6] |= 16
    written[-64:-64] = b"\x09\0kv/m/l/r/"
    assert encode_binary(replace(GOLDEN, chunk_keys=keys)) == written
    assert decode_descriptor(bytes(written)).chunk_keys == keys


@pytest.mark.parametrize(
    ("flags", "prefix"),
    [(17, b"\x01\0a"), (19, b"\0\0"), (19, b"\x02\0\xc3\xa4"), (19, b"\x01\0\0"), (19, b"\x01\x01" + b"a" * 257)],
    ids=["no digests", "empty", "beyond ASCII", "NUL", "long"],
)
def test_a_prefix_that_keys_cannot_have_is_refused(flags: int, prefix: bytes) -> None:
    """Each key is made of it: a long one would make much of a small request."""
    written = bytearray(bytes.fromhex(GOLDEN_HEX))
    written[6] = flags
    written[-64:-64] = prefix
    with pytest.raises(CallerError) as refused:
        decode_descriptor(bytes(written))
    assert refused.value.code is ErrorCode.INVALID_DESCRIPTOR


@pytest.mark.slow
@given(descriptors())
def test_both_codecs_give_back_the_same_value(descriptor: Descriptor) -> None:
    """JSON and binary are spellings of one value."""
    assert decode_descriptor(encode_json(descriptor)) == descriptor
    assert decode_descriptor(encode_binary(descriptor)) == descriptor


@pytest.mark.slow
@given(descriptors())
def test_every_truncation_and_every_extra_byte_is_refused(descriptor: Descriptor) -> None:
    """A descriptor is consumed exactly; a cut connection must not become a shorter prefix."""
    data = encode_binary(descriptor)
    for cut in {*range(min(len(data), 80)), len(data) - 1}:
        with pytest.raises(CallerError):
            decode_descriptor(data[:cut])
    with pytest.raises(CallerError, match="after the descriptor"):
        decode_descriptor(data + b"\0")


@given(st.binary(max_size=400))
def test_garbage_is_refused_as_the_callers_error(data: bytes) -> None:
    """Never an exception of another kind, whatever arrives."""
    for body in (data, b"OCD" + data, b"OCD\x01" + data):
        with pytest.raises(CallerError):
            decode_descriptor(body)


def good() -> dict[str, Any]:
    return {
        "version": 1,
        "chunk_keys": ["a", "b"],
        "num_layers": 2,
        "chunk_tokens": 16,
        "per_layer_chunk_bytes": 64,
        "request_id": "0123456789abcdef",
        "rdma_target": {"agent_id": "a", "region_id": "r", "offset": 0, "length": 256},
    }


PLACED = {"version": 2, "delivery": "chunk-major", "places": [0, 128]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version"),
        ({"chunk_keys": []}, "chunk_keys"),
        ({"chunk_keys": ["a", "a"]}, "chunk_keys[1]"),
        ({"chunk_keys": ["a", ""]}, "chunk_keys[1]"),
        ({"chunk_keys": ["a" * 1025, "b"]}, "chunk_keys[0]"),
        ({"chunk_keys": "a"}, "chunk_keys"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 1025}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_layers": 2.0}, "num_layers"),
        ({"chunk_tokens": 4097}, "chunk_tokens"),
        ({"per_layer_chunk_bytes": 0}, "per_layer_chunk_bytes"),
        ({"per_layer_chunk_bytes": (1 << 30) + 1}, "per_layer_chunk_bytes"),
        ({"delivery": "sideways"}, "delivery"),
        ({"on_missing": "shrug"}, "on_missing"),
        ({"request_id": "short"}, "request_id"),
        ({"request_id": "spaces are not ok"}, "request_id"),
        ({"request_id": None}, "request_id"),
        ({"layer_compute_us": [1, 2, 3]}, "layer_compute_us"),
        ({"layer_compute_us": []}, "layer_compute_us"),
        ({"layer_compute_us": -1}, "layer_compute_us"),
        ({"manifest": []}, "manifest"),
        ({"surprise": 1}, "surprise"),
        ({"rdma_target": {"agent_id": "a", "region_id": "r", "offset": 0, "length": 255}}, "rdma_target.length"),
        ({"rdma_target": {"agent_id": "a b", "region_id": "r", "offset": 0, "length": 256}}, "rdma_target.agent_id"),
        ({"rdma_target": {"agent_id": "a", "region_id": "r", "offset": -1, "length": 256}}, "rdma_target.offset"),
        ({"rdma_target": {"agent_id": "a", "region_id": "r", "length": 256}}, "rdma_target.offset"),
        ({"places": []}, "places"),
        ({"places": [0, 128]}, "version"),
        ({**PLACED, "places": [0]}, "places"),
        ({**PLACED, "places": [0, "128"]}, "places.1"),
        ({**PLACED, "places": [-1, 128]}, "places[0]"),
        ({**PLACED, "places": [0, 1 << 64]}, "places[1]"),
        ({**PLACED, "places": [0, 127]}, "places[1]"),
        ({**PLACED, "places": [127, 0]}, "places[0]"),
        ({**PLACED, "places": [0, 0]}, "places[1]"),
        ({**PLACED, "places": [0, 129]}, "rdma_target.length"),
        ({**PLACED, "delivery": "auto"}, "places"),
        ({**PLACED, "rdma_target": None}, "places"),
        ({**PLACED, "accept": ["kivi4-1"], "element": "float16"}, "places"),
    ],
)
def test_each_rule_names_the_field_it_refuses(change: dict[str, Any], named: str) -> None:
    """A caller must learn which field to mend."""
    decode_descriptor(json.dumps(good()).encode())
    with pytest.raises(CallerError) as refused:
        decode_descriptor(json.dumps({**good(), **change}).encode())
    assert refused.value.code is ErrorCode.INVALID_DESCRIPTOR
    assert refused.value.field == named


def test_payload_and_size_limits_hold() -> None:
    """N*L*S is at most 2^46 bytes, a body at most DESCRIPTOR_BYTES_MAX."""
    base = Descriptor(("a",), 1024, 16, 1 << 30)
    with pytest.raises(CallerError, match=r"N\*L\*S"):
        replace(base, chunk_keys=tuple(f"{i}" for i in range(65)))
    with pytest.raises(CallerError) as refused:
        decode_descriptor(b" " * (DESCRIPTOR_BYTES_MAX + 1))
    assert refused.value.code is ErrorCode.ENTITY_TOO_LARGE


def test_the_largest_descriptor_fits_the_body_limit() -> None:
    """65,536 digest keys in either form."""
    largest = Descriptor(tuple(f"{i:064x}" for i in range(CHUNK_COUNT_MAX)), 32, 16, 65536)
    assert len(encode_json(largest)) < DESCRIPTOR_BYTES_MAX
    assert decode_descriptor(encode_binary(largest)) == largest
    with pytest.raises(CallerError, match="chunk_keys"):
        replace(largest, chunk_keys=(*largest.chunk_keys, "one more"))


PORTION = Portion(1, 3, 9, (0, 4, 8), first_layer=2, attempt=1)
OF_A_PORTION = Descriptor(("a", "b", "c"), 4, 16, 64, request_id="r" * 16, version=EXTENDED_VERSION, portion=PORTION)


@given(descriptors(), st.integers(0, 5), st.data())
def test_a_part_travels_in_the_binary_form_between_servers_alone(
    whole: Descriptor, gap: int, data: st.DataObject
) -> None:
    positions = tuple(index * (gap + 1) for index in range(whole.chunk_count))
    chunk_count = positions[-1] + 1 + data.draw(st.integers(0, 3))
    needed = max(whole.layout.delivery_bytes(chunk_count), whole.target_bytes)
    target = None if whole.rdma_target is None else replace(whole.rdma_target, length=needed)
    portion = Portion(0, 2, chunk_count, positions, data.draw(st.integers(0, whole.num_layers - 1)))
    descriptor = replace(
        whole, version=EXTENDED_VERSION, portion=portion, on_missing=OnMissing.FAIL, rdma_target=target
    )
    assert decode_peer_descriptor(encode_binary(descriptor)) == descriptor
    assert decode_peer_descriptor(encode_binary(whole)) == whole
    with pytest.raises(CallerError, match="version"):
        decode_descriptor(encode_binary(descriptor))
    for cut in range(0, len(encode_binary(descriptor)), 7):
        with pytest.raises(CallerError):
            decode_peer_descriptor(encode_binary(descriptor)[:cut])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"index": 3}, "portion.index"),
        ({"count": 0}, "portion.count"),
        ({"count": 1_025, "index": 0}, "portion.count"),
        ({"chunk_count": 8}, "portion.positions"),
        ({"chunk_count": CHUNK_COUNT_MAX + 1}, "portion.chunk_count"),
        ({"positions": ()}, "portion.positions"),
        ({"positions": (0, 0, 1)}, "portion.positions"),
        ({"positions": (-1, 0, 1)}, "portion.positions"),
        ({"positions": (0, 1)}, "portion.positions"),
        ({"first_layer": 4}, "portion.first_layer"),
        ({"first_layer": -1}, "portion.first_layer"),
        ({"attempt": 256}, "portion.attempt"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_by_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CallerError) as refused:
        replace(OF_A_PORTION, portion=replace(PORTION, **change))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_DESCRIPTOR, named)


def test_the_target_of_a_portion_holds_the_whole() -> None:
    with pytest.raises(CallerError, match="version"):
        replace(OF_A_PORTION, version=1)
    target = RdmaTarget("agent", "kv", 0, OF_A_PORTION.delivery_bytes)
    with pytest.raises(CallerError, match=r"rdma_target.length"):
        replace(OF_A_PORTION, rdma_target=target)
    assert (OF_A_PORTION.whole_chunk_count, replace(OF_A_PORTION, version=1, portion=None).whole_chunk_count) == (9, 3)
