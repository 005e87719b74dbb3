"""The forms that the readers of a chunk take: exact, and the codecs that are known to keep their bounds. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from objectcache.kv_codecs.chains import Chain
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.policies.readers import ReaderKind
from storage_server.cache.policies.utility import Form, UtilitySettings
from storage_server.planning.forms import Encoded, Reading

CHUNKS_MAX = 1 << 17
"""Chunks whose errors are remembered."""
KINDS_MAX, ERRORS_MAX = 1024, 4096
"""Kinds of readers, and errors of codecs in buckets, that are remembered."""
CHUNK_ERRORS_MAX = 8 * len(Codec)
"""Errors of one chunk that are remembered: those of eight shapes in all codecs."""
ALL_ERRORS_MAX = 4 * CHUNKS_MAX
"""Errors of all chunks that are remembered: some 80 MB. A chunk has one for each codec that is too much for a reader,
and one for a shape in which it has no finite error.
"""
ENCODABLE_BYTES_MAX = 256 << 20
"""Larger chunks stay exact, since a chunk is encoded as a whole."""
Key = tuple[str, int]
"""The identity of a chunk's bytes."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """A chunk that is used: its exact bytes, and the class of its content, empty for none."""

    key: Key
    nbytes: int
    content_class: str = ""


@dataclass(frozen=True, slots=True)
class _Cost:
    """The error of a chunk in a codec, and the codecs that it passed; none where it was not made yet."""

    worst_error: float = 0.0
    chain: Chain = ()


_NO_COST = _Cost()


class ReaderForms:
    """Knows the errors of codecs, and makes the kinds of readers; a chunk takes a multiple of `unit_bytes`."""

    def __init__(self, settings: UtilitySettings, unit_bytes: int = 1) -> None:
        self._settings = settings
        self._unit_bytes = unit_bytes
        self._kinds: OrderedDict[Hashable, ReaderKind] = OrderedDict()
        self._known_forms: OrderedDict[Hashable, tuple[Form, ...]] = OrderedDict()
        self._errors: OrderedDict[tuple[str, LayerShape, Codec], float] = OrderedDict()
        self._chunk_errors: OrderedDict[Key, dict[tuple[LayerShape, Codec | None], _Cost]] = OrderedDict()
        """The costs of chunks that were greater than a reader takes; without a codec those of all codecs."""
        self._error_count = 0
        """The entries in all of them."""

    def has_errors(self, key: Key) -> bool:
        """Whether a chunk was too much for a reader: others of its content and size are then no guide to it."""
        return key in self._chunk_errors

    def note_made(self, key: Key, made: Encoded, reading: Reading) -> None:
        """Note the form of a chunk that this reader asked for. It counts where the reader's bound is broken."""
        if reading.is_shape_of(made) and _is_too_much(made, reading):
            self._note(key, made.shape, made.codec, _Cost(made.worst_error, made.chain))

    def note_error(self, reading: Reading, codec: Codec, worst_error: float) -> None:
        """Note the error of a chunk that was encoded from the exact one: it says which codecs a reader with a bound may
        get, of chunks of this shape in this bucket. Others are told apart, so that odd KV of one tenant, or a reader
        that names a wrong shape, decides nothing for them.
        """
        name = (reading.bucket, reading.shape, codec)
        known = self._errors.get(name, worst_error)
        self._errors[name] = known + (worst_error - known) / 8
        self._errors.move_to_end(name)
        if len(self._errors) > ERRORS_MAX:
            self._errors.popitem(last=False)

    def note_unencodable(self, key: Key, shape: LayerShape) -> None:
        """Note that a chunk has no finite error in any codec: its elements are no numbers, or too large."""
        self._note(key, shape, None, _Cost(math.inf))

    def _note(self, key: Key, shape: LayerShape, codec: Codec | None, cost: _Cost) -> None:
        errors = self._chunk_errors.setdefault(key, {})
        self._error_count -= len(errors)
        errors[shape, codec] = cost
        if len(errors) > CHUNK_ERRORS_MAX:  # whoever reads a chunk says its shape
            del errors[next(iter(errors))]
        self._error_count += len(errors)
        self._chunk_errors.move_to_end(key)
        while len(self._chunk_errors) > CHUNKS_MAX or self._error_count > ALL_ERRORS_MAX:
            _, gone = self._chunk_errors.popitem(last=False)
            self._error_count -= len(gone)

    def kind(self, use: ChunkUse, reading: Reading | None) -> ReaderKind:
        """The kind of a reader, the same object for the same forms: exact, and each codec that is known to keep its
        bound.
        """
        if reading is None or use.nbytes > ENCODABLE_BYTES_MAX:
            return _remembered(self._kinds, use.nbytes, lambda: ReaderKind((self._exact(use.nbytes),)))
        errors = self._chunk_errors.get(use.key, {})
        codecs = tuple(
            codec
            for codec in (() if (reading.shape, None) in errors else reading.codecs)
            if self._is_offered(codec, reading, errors.get((reading.shape, codec), _NO_COST))
        )
        qualities = self._settings.class_qualities.get(use.content_class, {})
        name = (codecs, use.content_class if qualities else "")

        def made_forms() -> tuple[Form, ...]:
            forms = [self._exact(use.nbytes)]
            for codec in codecs:
                figures = self._settings.codecs[codec]
                decode_s = reading.exact_bytes / figures.decoded_bytes_per_s
                quality = qualities.get(codec, figures.quality)
                forms.append(Form(codec.value, self._taken(reading.chunk_bytes(codec)), quality, decode_s))
            return tuple(sorted(forms, key=lambda form: -form.nbytes))

        def made() -> ReaderKind:
            shape = (reading.shape, reading.num_layers)
            return ReaderKind(_remembered(self._known_forms, (*name, shape), made_forms), reading)

        return _remembered(self._kinds, (*name, reading), made)

    def _is_offered(self, codec: Codec, reading: Reading, known: _Cost) -> bool:
        if codec not in self._settings.codecs:
            return False
        if not reading.bears(reading.loss_of(known.chain or (codec,))):
            return False
        error = max(known.worst_error, self._errors.get((reading.bucket, reading.shape, codec), 0.0))
        return reading.max_error is None or error <= reading.max_error

    def _exact(self, nbytes: int) -> Form:
        return Form(Codec.EXACT.value, self._taken(nbytes))

    def _taken(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._unit_bytes)) * self._unit_bytes


def _is_too_much(encoded: Encoded, reading: Reading) -> bool:
    if reading.max_error is not None and encoded.worst_error > reading.max_error:
        return True
    return reading.losses is not None and not reading.losses.takes(encoded)


def _remembered(known: OrderedDict[Hashable, _T], name: Hashable, made: Callable[[], _T]) -> _T:
    """The one of this name, made where none is known. The one that was not asked for longest is forgotten."""
    found = known.get(name)
    known[name] = found = made() if found is None else found
    known.move_to_end(name)
    if len(known) > KINDS_MAX:
        known.popitem(last=False)
    return found
