"""Encoded layers in the caller's buffer become exact ones: what is accepted, and the decoding."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from descriptors.descriptor import ELEMENT_BYTES, Accept, Descriptor
from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError
from descriptors.headers import FORMS_HEADER
from descriptors.layer_forms import EXACT, FormRun, LayerForms, LossBasis, WrongFormsError, parse_forms
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from nixl_client.fetch.delivery_state import ProtocolViolationError
from objectcache.kv_codecs import slots
from objectcache.kv_codecs.dropping import Kept
from objectcache.kv_codecs.elements import Bytes, Element
from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import DROPPING, KIVI, Codec, LayerShape, kept_count, takes
from objectcache.kv_codecs.slots import Run, WrongChunkError, decode_packed

_ELEMENTS = {"float16": Element.FLOAT16, "bfloat16": Element.BFLOAT16, "float32": Element.FLOAT32}
DECODABLE = tuple(codec.value for codec in (*KIVI, Codec.FP8, *DROPPING))
"""The codecs that this client decodes."""


def layer_shape(layout: ChunkLayout, accept: Accept) -> LayerShape:
    """The shape of a chunk's layer."""
    width = layout.per_layer_chunk_bytes // (2 * layout.chunk_tokens * ELEMENT_BYTES[accept.element])
    return LayerShape(layout.chunk_tokens, width, _ELEMENTS[accept.element])


def checked_forms(forms: LayerForms, chunk_count: int, *, descriptor: Descriptor) -> LayerForms:
    """The forms, where they are what was asked for. Raises ProtocolViolationError."""
    accept = descriptor.accept
    allowed = {EXACT: descriptor.per_layer_chunk_bytes}
    if accept is not None:
        shape = layer_shape(descriptor.layout, accept)
        codecs = [Codec(name) for name in accept.codecs if name in DECODABLE]
        allowed |= {codec.value: encoded_bytes_max(codec, shape) for codec in codecs if takes(codec, shape.tokens)}
    for run in forms.runs:
        if allowed.get(run.codec) != run.layer_bytes:
            raise ProtocolViolationError(f"layers of {run.layer_bytes} bytes in {run.codec!r} were not asked for")
    if forms.chunk_count != chunk_count:
        raise ProtocolViolationError(f"forms of {forms.chunk_count} chunks, {chunk_count} come")
    if accept is not None and accept.max_error is not None and forms.worst_error > accept.max_error:
        raise ProtocolViolationError(f"an error of {forms.worst_error:g}, at most {accept.max_error:g} was asked for")
    if accept is not None and accept.max_loss is not None and not forms.is_exact:
        if forms.loss_basis in (None, LossBasis.UNCALIBRATED):
            raise ProtocolViolationError(f"no loss was told, at most {accept.max_loss:g} was asked for")
        if forms.worst_loss > accept.max_loss:
            raise ProtocolViolationError(f"a loss of {forms.worst_loss:g}, at most {accept.max_loss:g} was asked for")
    return forms


def forms_in(headers: Mapping[str, str]) -> LayerForms | None:
    """The forms that an answer tells; None where it tells none: then all is exact. Raises ProtocolViolationError."""
    text = headers.get(FORMS_HEADER)
    try:
        return None if text is None else parse_forms(text)
    except WrongFormsError as error:
        raise ProtocolViolationError(str(error)) from None


def is_too_new(descriptor: Descriptor, error: ObjectCacheError) -> bool:
    """Whether the server knows no encoded layers, or no bound of the loss. The descriptor is then sent again without
    them.
    """
    is_field_unknown = error.field in ("max_loss", "version")
    return descriptor.accept is not None and error.code is ErrorCode.INVALID_DESCRIPTOR and is_field_unknown


def kept_tokens(forms: LayerForms | None, chunk_count: int, chunk_tokens: int) -> int:
    """How many tokens of so many chunks are there in each layer."""
    if forms is None:
        return chunk_count * chunk_tokens
    return sum(run.chunk_count * kept_count(Codec(run.codec), chunk_tokens) for run in forms.runs)


def runs_of(forms: LayerForms) -> Sequence[Run]:
    """The runs as kv_codecs takes them."""
    return [(run.codec, run.chunk_count, run.layer_bytes) for run in forms.runs]


@dataclass(frozen=True, slots=True)
class Packed:
    """Decodes a body: its layers come one after the other, in chunk-major mode chunk after chunk."""

    forms: LayerForms
    shape: LayerShape

    def chunk(self, index: int, num_layers: int) -> Packed:
        """The layers of one chunk, as if they were one layer of so many chunks."""
        left = index
        for run in self.forms.runs:
            if left < run.chunk_count:
                return Packed(LayerForms((FormRun(run.codec, num_layers, run.layer_bytes),)), self.shape)
            left -= run.chunk_count
        raise IndexError(index)

    def place(self, packed: Bytes, places: Bytes, layer_index: int, first_chunk: int) -> Kept | None:
        """Decode one layer of all chunks. Returns the tokens that are there. Raises ChunkUnavailable."""
        try:
            return decode_packed(packed, runs_of(self.forms), self.shape, places)
        except WrongChunkError as error:
            raise damaged(first_chunk + error.index, layer_index) from None

    def place_chunk(self, packed: Bytes, places: Bytes, chunk_index: int) -> Kept | None:
        """Decode all layers of one chunk. Returns the tokens that are there, in each layer. Raises ChunkUnavailable."""
        try:
            return decode_packed(packed, runs_of(self.forms), self.shape, places)
        except WrongChunkError as error:
            raise damaged(chunk_index, error.index) from None


def damaged(chunk_index: int, layer_index: int) -> ChunkUnavailable:
    """The error for an encoded layer that cannot be decoded."""
    problem = f"chunk {chunk_index} came with an encoded layer that is damaged, or not the one that was announced"
    return ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, problem, index=chunk_index, layer=layer_index)


class PlacedLayers:
    """Decodes layers that lie in the buffer, each once: in a thread of `pool` when it has come, or in the caller's that
    waits for it. `payload` is uint8 of shape (N * L * S): a numpy array, or a torch tensor in a device's memory, which
    the device decodes. Safe from any thread.
    """

    def __init__(self, payload: Any, layout: ChunkLayout, mode: Mode, forms: LayerForms, shape: LayerShape) -> None:
        self._payload = payload
        self._layout = layout
        self._mode = mode
        self._runs = runs_of(forms)
        self._chunk_count = forms.chunk_count
        self._shape = shape
        self._lock = threading.Lock()
        self._begun: dict[int, Future[Kept | None]] = {}
        self._submitted: set[int] = set()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no layer is being decoded, or waits for that: nothing is written into the buffer."""
        with self._lock:
            waits = not self._is_closed and not self._submitted <= self._begun.keys()
            return not waits and all(each.done() for each in self._begun.values())

    def begin(self, layer_index: int, pool: Executor) -> None:
        """A layer has come."""
        with self._lock:
            self._submitted.add(self._number(layer_index))
        pool.submit(self._run, layer_index)

    def drain(self) -> None:
        """Return when every layer that has come is decoded, or has turned out damaged."""
        with self._lock:
            submitted = sorted(self._submitted)
        for number in submitted:
            decoding = self._run(number)
            if not decoding.cancelled():
                decoding.exception()

    def finish(self, layer_index: int, timeout_s: float | None = None) -> Kept | None:
        """Return when the layer is decoded, with the tokens of each chunk that are there; None for all. Raises
        ChunkUnavailable, TimeoutError.
        """
        kept = self._run(layer_index).result(timeout_s)
        return kept if kept is None or self._mode is Mode.LAYER_MAJOR else kept[:, layer_index]

    def close(self) -> None:
        """Decode no further layer; on return none is being decoded."""
        with self._lock:
            self._is_closed = True
            begun = list(self._begun.values())
        for each in begun:
            if not each.cancelled():
                each.exception()

    def _run(self, layer_index: int) -> Future[Kept | None]:
        number = self._number(layer_index)
        with self._lock:
            known = self._begun.get(number)
            if known is not None:
                return known
            mine = self._begun[number] = Future[Kept | None]()
            if self._is_closed:
                mine.cancel()
                return mine
        try:
            kept = self._decode(number)
        except BaseException as error:
            mine.set_exception(error)
        else:
            mine.set_result(kept)
        return mine

    def _number(self, layer_index: int) -> int:
        """In chunk-major mode all layers come, and are decoded, at once."""
        return layer_index if self._mode is Mode.LAYER_MAJOR else 0

    def _decode(self, layer_index: int) -> Kept | None:
        layer_bytes = self._layout.layer_bytes(self._chunk_count)
        decoder = _slots_of(self._payload)
        kept: Kept | None
        try:
            if self._mode is Mode.LAYER_MAJOR:
                places = self._payload[layer_index * layer_bytes : (layer_index + 1) * layer_bytes]
                kept = decoder.decode_places(places, self._runs, self._shape)
            else:
                payload = self._payload[: self._layout.num_layers * layer_bytes]
                kept = decoder.decode_chunks(payload, self._runs, self._shape, self._layout.num_layers)
            return kept
        except WrongChunkError as error:
            raise damaged(error.index, layer_index) from None


def _slots_of(payload: Any) -> Any:
    """The module that decodes in this memory: kv_codecs.slots in the host's, kv_codecs.device_slots in a device's."""
    if isinstance(payload, np.ndarray):
        return slots
    from objectcache.kv_codecs import device_slots  # torch, which only those need who have tensors

    return device_slots


def host_bytes(view: memoryview) -> Bytes:
    """A buffer's bytes as an array."""
    return np.frombuffer(view, dtype=np.uint8)
