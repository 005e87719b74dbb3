"""The kernels for GPUs decode to the bytes of the host, and find damage. Triton interprets them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from objectcache.kv_codecs import slots
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import HEAD, encode, expected_head
from objectcache.kv_codecs.layer import KIVI, Codec, LayerShape
from tests.unit.kv_codecs.test_device_slots import layers

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/integration/test_cuda.py runs them on the GPU", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(os.environ, "TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is missing, which torch brings for CUDA")
    device_kernels = pytest.importorskip("objectcache.kv_codecs.device_kernels")
SHAPES = (LayerShape(16, 80, Element.FLOAT16), LayerShape(7, 33, Element.FLOAT32), LayerShape(16, 64, Element.FLOAT32))
"""Without bfloat16, which the interpreter cuts instead of rounding it."""
DTYPES = {Element.FLOAT16: torch.float16, Element.FLOAT32: torch.float32}
UNTOUCHED = 0xEE


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is switched on for these tests alone: what others start must not inherit it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def decoded(packed: np.ndarray, codec: Codec, shape: LayerShape) -> tuple[np.ndarray, list[bool]]:
    """The layers, and which rows are found damaged."""
    out = torch.full((len(packed), shape.nbytes), UNTOUCHED, dtype=torch.uint8)
    head = expected_head(codec, shape, packed.shape[1] - HEAD.size)
    data = torch.from_numpy(packed.copy())
    with np.errstate(over="ignore"):
        bad = device_kernels.decode_into(out.view(DTYPES[shape.element]), data, codec, shape, head)
    return out.numpy(), (bad != 0).tolist()


def packed_layers(codec: Codec, shape: LayerShape, count: int, scale: float = 3.0) -> np.ndarray:
    encoded = [encode(layer, shape, codec) for layer in layers(count, shape, scale)]
    return np.stack([np.frombuffer(each, dtype=np.uint8) for each in encoded])


@pytest.mark.parametrize("scale", [3.0, 1e6])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", [*KIVI, Codec.FP8])
def test_the_bytes_of_the_host(codec: Codec, shape: LayerShape, scale: float) -> None:
    packed = packed_layers(codec, shape, 3, scale)
    places = np.zeros((3, shape.nbytes), dtype=np.uint8)
    places[:, : packed.shape[1]] = packed
    slots.decode_places(places.reshape(-1), [(codec.value, 3, packed.shape[1])], shape)
    found, are_bad = decoded(packed, codec, shape)
    assert are_bad == [False] * 3
    assert np.array_equal(found, places)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", [Codec.KIVI4, Codec.K4V2, Codec.FP8])
def test_any_damaged_byte_is_found_and_nothing_is_written(codec: Codec, shape: LayerShape) -> None:
    packed = packed_layers(codec, shape, 3)
    last = packed.shape[1] - 1
    for at in [*range(HEAD.size + 2), last, *np.random.default_rng(3).integers(0, last, 6)]:
        damaged = packed.copy()
        damaged[1, at] ^= 0x10
        found, are_bad = decoded(damaged, codec, shape)
        assert are_bad == [False, True, False], at
        assert (found == UNTOUCHED).all()


def test_kernels_are_tried_out() -> None:
    device_kernels.try_out("cpu")


def test_kernels_that_decode_to_other_bytes_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "decode", lambda packed, shape, out: out.fill(1))
    with pytest.raises(RuntimeError, match="other bytes"):
        device_kernels.try_out("cpu")


def test_rows_longer_than_all_lanes() -> None:
    shape = LayerShape(64, 128, Element.FLOAT16)
    packed = packed_layers(Codec.KIVI8, shape, 2)
    assert packed.shape[1] > 4 * device_kernels.LANES
    assert decoded(packed, Codec.KIVI8, shape)[1] == [False, False]
    packed[1, HEAD.size + 5] ^= 1
    assert decoded(packed, Codec.KIVI8, shape)[1] == [False, True]
