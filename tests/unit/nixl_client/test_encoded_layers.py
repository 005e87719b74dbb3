"""Encoded layers in a client: which forms it takes, when a layer counts as there, and what is decoded where."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.descriptor import EXTENDED_VERSION, Accept, Descriptor
from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode
from descriptors.layer_forms import EXACT, FormRun, LayerForms, LossBasis
from descriptors.notices import Admitted, Done, Forms, LayerReady, Mode, Notice
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.fetch.decoding import PlacedLayers, checked_forms, is_too_new, layer_shape
from nixl_client.fetch.delivery_state import DeliveryState, ProtocolViolationError
from nixl_client.lossy import Lossy, accept_of
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.encoding import decode, encode, encoded_bytes_max
from objectcache.kv_codecs.layer import Codec, LayerShape

ID = "request-00000001"
SHAPE = LayerShape(16, 64, Element.BFLOAT16)
S, E = SHAPE.nbytes, encoded_bytes_max(Codec.KIVI4, SHAPE)
L, K = 3, 4
DESCRIPTOR = Descriptor(
    tuple("abcd"), L, 16, S, request_id=ID, version=EXTENDED_VERSION,
    accept=Accept(("kivi4-1", "unheard-of-9"), "bfloat16", max_error=0.2),
)  # fmt: skip
FORMS = LayerForms((FormRun("kivi4-1", 3, E), FormRun(EXACT, 1, S)), 0.1, 0.05)


def state() -> DeliveryState:
    return DeliveryState(
        ID, DESCRIPTOR.layout, K, lambda forms, count: checked_forms(forms, count, descriptor=DESCRIPTOR)
    )


def notices() -> list[Notice]:
    nbytes = 3 * E + S
    layers = [LayerReady(ID, layer, layer * K * S, nbytes) for layer in range(L)]
    return [Forms(ID, FORMS), Admitted(ID, Mode.LAYER_MAJOR, K), *layers, Done(ID, L * nbytes)]


@given(st.randoms(use_true_random=False))
def test_layers_are_ready_once_their_forms_are_known_in_any_order(rng: random.Random) -> None:
    """A shorter layer before its forms is neither ready nor wrong."""
    said = notices() * 2
    rng.shuffle(said)
    ledger = state()
    seen: set[type] = set()
    for notice in said:
        ledger.apply(notice)
        seen.add(type(notice))
        if not {Forms, Admitted} <= seen:
            assert ledger.ready_count == 0
    assert ledger.is_complete
    assert ledger.forms == FORMS


def test_without_the_notice_the_answer_tells_the_forms() -> None:
    ledger = state()
    for notice in notices()[1:]:
        ledger.apply(notice)
    assert ledger.ready_count == 0
    ledger.set_forms(FORMS)
    assert ledger.is_complete


def test_layers_of_full_length_are_exact_without_any_forms() -> None:
    ledger = state()
    ledger.apply(Admitted(ID, Mode.LAYER_MAJOR, K))
    ledger.apply(LayerReady(ID, 0, 0, K * S))
    assert ledger.is_ready(0)
    assert ledger.forms is None


@pytest.mark.parametrize(
    "forms",
    [
        LayerForms((FormRun("kivi4-1", 4, E + 1),)),
        LayerForms((FormRun("kivi2-1", 4, encoded_bytes_max(Codec.KIVI2, SHAPE)),)),
        LayerForms((FormRun("unheard-of-9", 4, 10),)),
        LayerForms((FormRun(EXACT, 4, S - 1),)),
        LayerForms((FormRun("kivi4-1", 3, E),)),
        LayerForms((FormRun("kivi4-1", 4, E),), worst_error=0.3),
    ],
)
def test_forms_that_were_not_asked_for_end_the_fetch(forms: LayerForms) -> None:
    """Other sizes, codecs or counts, and an error above the bound: such bytes must not be used."""
    ledger = state()
    ledger.apply(Admitted(ID, Mode.LAYER_MAJOR, K))
    with pytest.raises(ProtocolViolationError):
        ledger.apply(Forms(ID, forms))


@pytest.mark.parametrize(
    ("forms", "problem"),
    [
        (replace(FORMS, worst_loss=0.02, loss_basis=LossBasis.CALIBRATED), "a loss of 0.02, at most 0.01"),
        (replace(FORMS, worst_loss=0.02, loss_basis=LossBasis.WORST), "a loss of 0.02, at most 0.01"),
        (replace(FORMS, worst_loss=0.0, loss_basis=LossBasis.UNCALIBRATED), "no loss was told"),
        (FORMS, "no loss was told"),
    ],
)
def test_a_loss_above_the_bound_is_refused_and_so_is_one_that_is_not_told(forms: LayerForms, problem: str) -> None:
    """Servers may be of any release, or lie: a client that set a bound uses nothing that is said to pass the bound."""
    descriptor = DESCRIPTOR.accepting(Accept(("kivi4-1",), "bfloat16", max_loss=0.01))
    with pytest.raises(ProtocolViolationError, match=problem):
        checked_forms(forms, K, descriptor=descriptor)
    fine = replace(forms, worst_loss=0.01, loss_basis=LossBasis.WORST)
    assert checked_forms(fine, K, descriptor=descriptor) == fine
    exact = LayerForms((FormRun(EXACT, K, S),))
    assert checked_forms(exact, K, descriptor=descriptor) == exact, "exact chunks lose nothing, whoever says so"


@pytest.mark.parametrize("field", ["version", "max_loss"])
def test_a_server_of_the_release_before_is_asked_for_exact_chunks(field: str) -> None:
    descriptor = DESCRIPTOR.accepting(Accept(("kivi4-1",), "bfloat16", max_loss=0.01))
    error = CallerError(ErrorCode.INVALID_DESCRIPTOR, "", field=field)
    assert is_too_new(descriptor, error)
    assert not is_too_new(descriptor.exact, error)


def test_forms_are_refused_where_exact_chunks_were_asked_for() -> None:
    ledger = DeliveryState(ID, DESCRIPTOR.layout, K)
    with pytest.raises(ProtocolViolationError):
        ledger.apply(Forms(ID, FORMS))


def test_a_layer_of_other_bytes_than_its_forms_say_is_refused() -> None:
    ledger = state()
    ledger.apply(Forms(ID, FORMS))
    ledger.apply(Admitted(ID, Mode.LAYER_MAJOR, K))
    with pytest.raises(ProtocolViolationError):
        ledger.apply(LayerReady(ID, 0, 0, 3 * E))


def layers(seed: int = 1) -> np.ndarray:
    """uint8 of shape (L, K, S)."""
    data = np.empty((L, K, S), dtype=np.uint8)
    values = np.random.default_rng(seed).standard_normal(data.size // 2).astype(np.float32)
    from_floats(values, Element.BFLOAT16, data.reshape(-1))
    return data


def placed(exact: np.ndarray, mode: Mode) -> tuple[np.ndarray, np.ndarray]:
    """The buffer as a server writes it, and as it is to be."""
    wanted = exact.copy()
    buffer = np.full(exact.size, 0xEE, dtype=np.uint8)
    for layer in range(L):
        for chunk in range(K):
            data = exact[layer, chunk].tobytes()
            start = layer * K * S + chunk * S
            if chunk < 3:
                data = encode(exact[layer, chunk], SHAPE, Codec.KIVI4)
                decode(data, SHAPE, wanted[layer, chunk])
            if mode is Mode.CHUNK_MAJOR:
                start = chunk * L * S + layer * len(data)
            buffer[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
    order = wanted if mode is Mode.LAYER_MAJOR else wanted.transpose(1, 0, 2)
    return buffer, np.ascontiguousarray(order).reshape(-1)


def in_memory(buffer: np.ndarray, is_tensor: bool) -> Any:  # type: ignore[type-arg]
    """The same bytes, as those of a device are told: as a tensor."""
    return pytest.importorskip("torch").from_numpy(buffer) if is_tensor else buffer


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
def test_placed_layers_are_decoded_once_by_whoever_comes_first(mode: Mode, is_tensor: bool) -> None:
    buffer, wanted = placed(layers(), mode)
    decoding = PlacedLayers(in_memory(buffer, is_tensor), DESCRIPTOR.layout, mode, FORMS, SHAPE)
    with ThreadPoolExecutor(3) as pool:
        for layer in range(L):
            decoding.begin(layer, pool)
        for _ in range(2):
            for layer in range(L):
                decoding.finish(layer, 10)
    assert np.array_equal(buffer, wanted)


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_flipped_bit_is_found_and_named(mode: Mode, is_tensor: bool) -> None:
    buffer, _ = placed(layers(), mode)
    layer, chunk = 1, 2
    start = layer * K * S + chunk * S if mode is Mode.LAYER_MAJOR else chunk * L * S + layer * E
    buffer[start + 100] ^= 16
    decoding = PlacedLayers(in_memory(buffer, is_tensor), DESCRIPTOR.layout, mode, FORMS, SHAPE)
    with pytest.raises(ChunkUnavailable) as error:
        decoding.finish(1)
    assert (error.value.code, error.value.index) == (ErrorCode.CHUNK_CORRUPT, 2)
    if mode is Mode.LAYER_MAJOR:
        decoding.finish(0)
        decoding.finish(2)


def test_nothing_is_decoded_after_the_end() -> None:
    """The buffer is the caller's again then."""
    buffer, _ = placed(layers(), Mode.LAYER_MAJOR)
    before = buffer.copy()
    decoding = PlacedLayers(buffer, DESCRIPTOR.layout, Mode.LAYER_MAJOR, FORMS, SHAPE)
    decoding.close()
    with ThreadPoolExecutor(1) as pool:
        decoding.begin(0, pool)
    assert np.array_equal(buffer, before)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_buffer_is_in_use_until_what_has_come_is_decoded(mode: Mode) -> None:
    """A fetch that was dropped may still be decoded into its buffer, which must not be given to another one."""
    buffer, wanted = placed(layers(), mode)
    decoding = PlacedLayers(buffer, DESCRIPTOR.layout, mode, FORMS, SHAPE)
    assert decoding.is_idle
    gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gate.wait)
        for layer in range(L):
            decoding.begin(layer, pool)
        assert not decoding.is_idle
        gate.set()
        decoding.drain()
        assert decoding.is_idle
    assert np.array_equal(buffer, wanted)


def test_the_shape_follows_from_the_descriptor() -> None:
    assert DESCRIPTOR.accept is not None
    assert layer_shape(DESCRIPTOR.layout, DESCRIPTOR.accept) == SHAPE


def test_a_server_of_version_1_is_asked_again_for_exact_chunks() -> None:
    refused = CallerError(ErrorCode.INVALID_DESCRIPTOR, "version must be 1, not 2", field="version")
    assert is_too_new(DESCRIPTOR, refused)
    assert not is_too_new(DESCRIPTOR.exact, refused)
    assert not is_too_new(DESCRIPTOR, CallerError(ErrorCode.INVALID_DESCRIPTOR, "no", field="chunk_keys"))


def test_readers_say_how_much_loss_they_take() -> None:
    assert accept_of(Lossy.OFF, "torch.bfloat16") is None
    bounded = accept_of(Lossy.BOUNDED, "torch.float16", 0.05)
    assert bounded is not None
    assert (bounded.element, bounded.max_error) == ("float16", 0.05)
    adaptive = accept_of(Lossy.ADAPTIVE, np.dtype("float32"))
    assert adaptive is not None
    assert adaptive.max_error is None
    assert set(bounded.codecs) < set(adaptive.codecs)
    with pytest.raises(ValueError, match="float8_e4m3fn cannot be encoded"):
        accept_of(Lossy.ADAPTIVE, "torch.float8_e4m3fn")


def test_the_engines_options_have_the_loss_off_by_default() -> None:
    base = {"endpoint": "http://127.0.0.1:1", "bucket": "b"}
    assert VllmOptions.of(base).lossy is Lossy.OFF
    assert VllmOptions.of({**base, "lossy": 0.1}).lossy is Lossy.BOUNDED
    for wrong in ({"lossy": "yes"}, {"lossy": -1.0}):
        with pytest.raises(ValueError, match=r"lossy|max_error"):
            VllmOptions.of({**base, **wrong})
