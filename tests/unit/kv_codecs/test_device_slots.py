"""Torch decodes to the same bytes as the host does, and finds damage."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from objectcache.adapters import native
from objectcache.kv_codecs import slots
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.encoding import HEAD, encode
from objectcache.kv_codecs.layer import KIVI, Codec, LayerShape
from objectcache.kv_codecs.slots import Run, WrongChunkError

torch = pytest.importorskip("torch")
device_slots = pytest.importorskip("objectcache.kv_codecs.device_slots")
SHAPES = (
    LayerShape(64, 256, Element.BFLOAT16),
    LayerShape(16, 80, Element.FLOAT16),
    LayerShape(7, 33, Element.FLOAT32),
    LayerShape(32, 32, Element.BFLOAT16),
)
CODECS = (*KIVI, Codec.FP8)


def layers(count: int, shape: LayerShape, scale: float = 3.0) -> np.ndarray:  # type: ignore[type-arg]
    found = np.empty((count, shape.nbytes), dtype=np.uint8)
    for at, row in enumerate(found):
        values = np.random.default_rng(at).standard_normal(2 * shape.half_elements, dtype=np.float32)
        from_floats(values * np.float32(scale), shape.element, row)
    return found


def slotted(exact: np.ndarray, runs: list[Run], shape: LayerShape) -> np.ndarray:  # type: ignore[type-arg]
    """Each layer at the beginning of its place; what is behind it is garbage."""
    places = np.random.default_rng(9).integers(0, 256, exact.shape, dtype=np.uint8)
    ends = np.cumsum([0, *(count for _, count, _ in runs)]).tolist()
    for (name, _, nbytes), (start, end) in zip(runs, pairwise(ends), strict=True):
        for at in range(start, end):
            places[at, :nbytes] = np.frombuffer(encode(exact[at], shape, Codec(name)), dtype=np.uint8)[-nbytes:]
            if name == Codec.EXACT.value:
                places[at] = exact[at]
    return places


def nbytes_of(codec: Codec, shape: LayerShape) -> int:
    return len(encode(layers(1, shape)[0], shape, codec))


@pytest.mark.parametrize("scale", [3.0, 1e6, 0.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", CODECS)
def test_a_layer_of_chunks_in_several_forms(codec: Codec, shape: LayerShape, scale: float) -> None:
    nbytes = nbytes_of(codec, shape)
    assert nbytes <= shape.nbytes, "an encoded layer has to fit into its place"
    runs = [(codec.value, 2, nbytes), ("exact", 1, shape.nbytes), (codec.value, 3, nbytes)]
    places = slotted(layers(6, shape, scale), runs, shape)
    on_device = torch.from_numpy(places.reshape(-1).copy())
    on_host = places.reshape(-1).copy()
    device_slots.decode_places(on_device, runs, shape)
    slots.decode_places(on_host, runs, shape)
    assert np.array_equal(on_device.numpy(), on_host)


@pytest.mark.parametrize("codec", CODECS)
def test_whole_chunks(codec: Codec) -> None:
    shape, num_layers = SHAPES[0], 3
    exact = layers(4 * num_layers, shape).reshape(4, -1)
    nbytes = nbytes_of(codec, shape)
    runs = [(codec.value, 3, nbytes), ("exact", 1, shape.nbytes)]
    places = exact.copy()
    for chunk in places[:3]:
        parts = [encode(layer, shape, codec) for layer in chunk.reshape(num_layers, -1).copy()]
        chunk[: num_layers * nbytes] = np.frombuffer(b"".join(parts), dtype=np.uint8)
    on_device = torch.from_numpy(places.reshape(-1).copy())
    on_host = places.reshape(-1).copy()
    device_slots.decode_chunks(on_device, runs, shape, num_layers)
    slots.decode_chunks(on_host, runs, shape, num_layers)
    assert np.array_equal(on_device.numpy(), on_host)
    damaged = places.copy()
    damaged[2, nbytes + 40] ^= 1
    with pytest.raises(WrongChunkError) as told:
        device_slots.decode_chunks(torch.from_numpy(damaged.reshape(-1)), runs, shape, num_layers)
    assert told.value.index == 2


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("codec", CODECS)
def test_one_bit_that_is_wrong_anywhere_is_found_and_nothing_is_written(codec: Codec, shape: LayerShape) -> None:
    nbytes = nbytes_of(codec, shape)
    runs = [("exact", 1, shape.nbytes), (codec.value, 2, nbytes)]
    places = slotted(layers(3, shape), runs, shape)
    bits = np.random.default_rng(3).integers(0, 8 * nbytes, 12)
    for bit in (0, 8 * nbytes - 1, 8 * 20, 8 * 24, *bits.tolist()):
        damaged = places.copy()
        damaged[2, bit // 8] ^= 1 << bit % 8
        tensor = torch.from_numpy(damaged.reshape(-1).copy())
        with pytest.raises(WrongChunkError) as told:
            device_slots.decode_places(tensor, runs, shape)
        assert told.value.index == 2
        assert np.array_equal(tensor.numpy(), damaged.reshape(-1))


def test_what_devices_do_not_decode_is_an_error() -> None:
    shape = SHAPES[0]
    with pytest.raises(ValueError, match="lossless-1 is not decoded"):
        device_slots.decode_rows(torch.zeros(1, 100, dtype=torch.uint8), Codec.LOSSLESS, shape)
    with pytest.raises(ValueError, match="rows of 100 bytes"):
        device_slots.decode_rows(torch.zeros(1, 100, dtype=torch.uint8), Codec.KIVI4, shape)


DROPPED = LayerShape(160, 24, Element.BFLOAT16)


@pytest.mark.parametrize("codec", [Codec.STREAMING50, Codec.KEYDIFF50, Codec.KEYDIFF25])
def test_a_device_leaves_out_the_same_tokens(codec: Codec) -> None:
    nbytes = nbytes_of(codec, DROPPED)
    runs = [(codec.value, 2, nbytes), ("exact", 1, DROPPED.nbytes), ("kivi4-1", 1, nbytes_of(Codec.KIVI4, DROPPED))]
    places = slotted(layers(4, DROPPED), runs, DROPPED)
    on_device, on_host = torch.from_numpy(places.reshape(-1).copy()), places.reshape(-1).copy()
    wanted = slots.decode_places(on_host, runs, DROPPED)
    found = device_slots.decode_places(on_device, runs, DROPPED)
    assert np.array_equal(on_device.numpy(), on_host)
    assert np.array_equal(found, wanted)


def test_a_device_refuses_places_that_cannot_be() -> None:
    data = bytearray(encode(layers(1, DROPPED)[0], DROPPED, Codec.KEYDIFF50))
    data[HEAD.size : HEAD.size + 4] = (500).to_bytes(4, "little")
    checksum = native.crc32c(bytes(data[HEAD.size :]), native.crc32c(bytes(data[: HEAD.size - 4])))
    data[HEAD.size - 4 : HEAD.size] = checksum.to_bytes(4, "little")
    place = np.zeros(DROPPED.nbytes, dtype=np.uint8)
    place[: len(data)] = np.frombuffer(bytes(data), dtype=np.uint8)
    with pytest.raises(WrongChunkError):
        device_slots.decode_places(torch.from_numpy(place), [("keydiff50-1", 1, len(data))], DROPPED)


def test_a_device_says_for_each_layer_of_a_chunk_which_tokens_are_there() -> None:
    parts = [encode(layer, DROPPED, Codec.KEYDIFF50) for layer in layers(3, DROPPED)]
    place = np.zeros(3 * DROPPED.nbytes, dtype=np.uint8)
    packed = np.frombuffer(b"".join(parts), dtype=np.uint8)
    place[: len(packed)] = packed
    runs = [("keydiff50-1", 1, len(parts[0]))]
    on_device, on_host = torch.from_numpy(place.copy()), place.copy()
    wanted = slots.decode_chunks(on_host, runs, DROPPED, 3)
    found = device_slots.decode_chunks(on_device, runs, DROPPED, 3)
    assert np.array_equal(on_device.numpy(), on_host)
    assert np.array_equal(found, wanted)


def test_torch_decodes_where_kernels_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton may be missing, or unable to compile: there may be no C compiler."""

    def fail(device: str) -> None:
        raise FileNotFoundError("no C compiler")

    assert device_slots.kernels_for("cpu") is None
    monkeypatch.setitem(sys.modules, "objectcache.kv_codecs.device_kernels", None)
    monkeypatch.delattr("objectcache.kv_codecs.device_kernels", raising=False)
    assert device_slots.kernels_for("cuda:7") is None
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "objectcache.kv_codecs.device_kernels", SimpleNamespace(try_out=fail))
    assert device_slots.kernels_for("cuda:8") is None
    assert "no C compiler" in caplog.text
    assert device_slots.kernels_for("cuda:8") is None
    assert len(caplog.records) == 1, "it is tried out once"
