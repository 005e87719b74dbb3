"""The policy of the DRAM tier that keeps, compresses or evicts each chunk by its utility: the optimizer, with
frequencies from decayed counts of uses, and with the quality and the speed of codecs as they were measured. Pure: time
is an argument. The home has every chunk exactly, so an evicted chunk is loaded from there.

    16 chunks fit exactly. 24 are used, 8 of them often  ->  8 exact and 16 at 4 bits, and none is loaded from the disk
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from kv_codecs.layer import Codec, goes_on
from storage_server.compression.forms import Reading
from storage_server.compression.optimizer import Move, Optimizer
from storage_server.compression.readers import Kind, Uses, forms_of, reading_with, scaled, taking, use_count, with_use
from storage_server.compression.utility import Entry, Form, Tier

GHOST_COUNT_MAX = 1 << 17
"""Chunks that are not in memory, and whose uses are remembered."""
KINDS_MAX, ERRORS_MAX = 1024, 4096
"""Kinds of readers, and errors of codecs in buckets, that are remembered."""
ENCODABLE_BYTES_MAX = 256 << 20
"""Larger chunks stay exact, since a chunk is encoded as a whole."""
EXPONENT_MAX = 400.0
"""Counts are scaled down when they have grown by this power of two."""
_MADE_FROM = {after: frozenset(before.value for before in Codec if goes_on(before, after)) for after in Codec}
Key = tuple[str, int]
"""The identity of a chunk's bytes."""


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """A codec as it was measured: its quality (1 is that of exact KV), and the bytes of exact KV that one core decodes
    in a second.
    """

    quality: float
    decoded_bytes_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.quality <= 1 or not self.decoded_bytes_per_s > 0:
            raise ValueError("a quality is from 0 to 1, and a decoder has a speed")


@dataclass(frozen=True, slots=True)
class UtilitySettings:
    """`alpha_s` are the seconds that quality 1 is worth. `memory_bytes_per_s` and `home_bytes_per_s` are the rates at
    which chunks are delivered from memory, and from the home. A use counts half after `half_life_s`. Codecs that have
    no figures are not used. `class_qualities` are the qualities on content of a class, where they are other ones.
    """

    codecs: Mapping[Codec, CodecFigures] = field(default_factory=dict)
    class_qualities: Mapping[str, Mapping[Codec, float]] = field(default_factory=dict)
    alpha_s: float = 1.0
    memory_bytes_per_s: float = 8e9
    home_bytes_per_s: float = 1e9
    half_life_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Use:
    """A chunk that is used: its exact bytes, and the class of its content, empty for none."""

    key: Key
    nbytes: int
    content_class: str = ""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A chunk is to be encoded with a codec, as this reader takes it."""

    codec: Codec
    reading: Reading


@dataclass(frozen=True, slots=True)
class Decision:
    """The changes of the tier after a use, in the order in which they are carried out: chunks that go, chunks that are
    encoded further, and chunks that come, encoded or (None) exact. A chunk that changes to a form that is not made from
    its present one goes and comes again.
    """

    evicted: tuple[Key, ...]
    recoded: Mapping[Key, Encoding]
    admitted: Mapping[Key, Encoding | None]


class UtilityPolicy:
    """Decides for one memory of `capacity_bytes`, in which a chunk takes a multiple of `unit_bytes`. The same calls
    always get the same answers.
    """

    def __init__(self, capacity_bytes: int, settings: UtilitySettings, unit_bytes: int = 1) -> None:
        self._unit_bytes = unit_bytes
        self._settings = settings
        self._optimizer = Optimizer([Tier("memory", capacity_bytes, settings.memory_bytes_per_s)], settings.alpha_s)
        self._began_s: float | None = None
        self._uses: dict[Key, Uses] = {}
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._forms: dict[Key, tuple[Form, ...]] = {}
        self._held: dict[Key, Form] = {}
        """The form of each chunk as the last decision has it."""
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._errors: OrderedDict[tuple[str, Codec], float] = OrderedDict()
        self._chunk_errors: OrderedDict[Key, dict[Codec, float]] = OrderedDict()
        """Of chunks that have been more than a reader takes."""

    @property
    def used_bytes(self) -> int:
        """The bytes of all chunks in memory."""
        return self._optimizer.used_bytes[0]

    def request(self, now_s: float, uses: Sequence[Use], reading: Reading | None) -> Decision:
        """Note a use of these chunks by one reader, and say what changes."""
        weight = self._optimizer.use_weight = self._inflated(now_s)
        kinds: dict[Hashable, Kind] = {}
        touched: dict[Key, None] = {}
        for use in uses:
            is_encodable = reading is not None and use.nbytes == reading.exact_bytes
            is_usual = use.key not in self._chunk_errors
            name = (use.nbytes, use.content_class)
            kind = kinds.get(name) if is_usual else None
            if kind is None:
                kind = self._kind(use, reading if is_encodable else None)
            if is_usual:
                kinds[name] = kind
            touched[use.key] = None
            moves = self._used(use.key, kind, weight)
            touched.update((cast(Key, move.key), None) for move in moves)
        return self._decision(touched)

    def note_error(self, bucket: str, codec: Codec, worst_error: float) -> None:
        """Note the error of a chunk that was encoded: it says which codecs a reader of its bucket with a bound may get.
        Buckets are told apart, so that odd KV of one tenant decides nothing for others.
        """
        known = self._errors.pop((bucket, codec), worst_error)
        self._errors[bucket, codec] = known + (worst_error - known) / 8
        if len(self._errors) > ERRORS_MAX:
            self._errors.popitem(last=False)

    def note_chunk_error(self, key: Key, codec: Codec, worst_error: float) -> None:
        """Note that this chunk's error is more than its reader takes, so that such readers are not counted on again."""
        errors = self._chunk_errors.pop(key, {})
        self._chunk_errors[key] = errors | {codec: worst_error}
        if len(self._chunk_errors) > GHOST_COUNT_MAX:
            self._chunk_errors.popitem(last=False)

    def note_unencodable(self, key: Key) -> None:
        """Note that a chunk has no finite error in any codec: its elements are no numbers, or too large."""
        for codec in Codec:
            self.note_chunk_error(key, codec, math.inf)

    def remove(self, keys: Iterable[Key]) -> None:
        """Note that these chunks are not in memory, whatever was decided."""
        for key in keys:
            self._optimizer.remove(key)
            self._leave(key)

    def _inflated(self, now_s: float) -> float:
        """The weight of a use now. Older uses keep theirs, and so decay against it."""
        if self._began_s is None:
            self._began_s = now_s
        exponent = (now_s - self._began_s) / self._settings.half_life_s
        if exponent > EXPONENT_MAX:
            factor = 2.0**-exponent
            self._optimizer.scale(factor)
            self._uses = {key: scaled(uses, factor) for key, uses in self._uses.items()}
            self._began_s, exponent = now_s, 0.0
        return float(2.0**exponent)

    def _used(self, key: Key, kind: Kind, weight: float) -> Sequence[Move]:
        former = self._uses.get(key, ())
        if key in self._chunk_errors:  # readers of this kind were counted as another before the error was known
            still = taking(former, self._chunk_errors[key])
            weight, former = weight + use_count(former) - use_count(still), still
        uses = self._uses[key] = with_use(former, kind, weight)
        self._ghosts.pop(key, None)
        count, known, forms = use_count(uses), self._forms.get(key), forms_of(uses)
        self._forms[key] = forms
        placement = self._optimizer.placement(key)
        if placement is not None and known is not None:
            if forms is known:
                return self._optimizer.use(key, count)
            present = known[placement.form]
            if any(form.codec == present.codec and form.nbytes == present.nbytes for form in forms):
                return self._optimizer.use(key, count, forms)
        load_s = forms[0].nbytes / self._settings.home_bytes_per_s
        return self._optimizer.put(Entry(key, count, forms, load_s, load_s))

    def _decision(self, touched: Iterable[Key]) -> Decision:
        evicted: list[Key] = []
        recoded: dict[Key, Encoding] = {}
        admitted: dict[Key, Encoding | None] = {}
        for key in touched:
            was, now = self._held.get(key), self._form(key)
            if now is None:
                self._leave(key)  # also where it has never been in memory: its uses are remembered for a while only
            else:
                self._held[key] = now
            if was is not None and now is not None and (was.codec, was.nbytes) == (now.codec, now.nbytes):
                continue
            encoding = None if now is None else self._encoding(key, now)
            if encoding is not None and was is not None and now is not None and _fits_in_place(was, now):
                recoded[key] = encoding
                continue
            if was is not None:
                evicted.append(key)
            if now is not None:
                admitted[key] = encoding
        return Decision(tuple(evicted), recoded, admitted)

    def _encoding(self, key: Key, form: Form) -> Encoding | None:
        """None for the exact form."""
        reading = reading_with(self._uses[key], form.codec)
        return None if form.codec == Codec.EXACT.value or reading is None else Encoding(Codec(form.codec), reading)

    def _form(self, key: Key) -> Form | None:
        """The form that the optimizer has for a chunk; None where it is not kept."""
        placement = self._optimizer.placement(key)
        return None if placement is None else self._forms[key][placement.form]

    def _kind(self, use: Use, reading: Reading | None) -> Kind:
        """The kind of a reader, the same object for the same forms: exact, and each codec that is known to keep its
        bound.
        """
        if reading is None or use.nbytes > ENCODABLE_BYTES_MAX:
            return self._kept(use.nbytes, lambda: Kind((self._exact(use.nbytes),)))
        errors = self._chunk_errors.get(use.key, {})
        codecs = tuple(codec for codec in reading.codecs if self._is_offered(codec, reading, errors.get(codec, 0.0)))
        qualities = self._settings.class_qualities.get(use.content_class, {})
        name = (reading, codecs, use.content_class if qualities else "")

        def made() -> Kind:
            forms = [self._exact(use.nbytes)]
            for codec in codecs:
                figures = self._settings.codecs[codec]
                decode_s = reading.exact_bytes / figures.decoded_bytes_per_s
                quality = qualities.get(codec, figures.quality)
                nbytes = self._taken(reading.chunk_bytes(codec))
                forms.append(Form(codec.value, nbytes, quality, decode_s, _MADE_FROM[codec]))
            return Kind(tuple(sorted(forms, key=lambda form: -form.nbytes)), reading)

        return self._kept(name, made)

    def _kept(self, name: Hashable, made: Callable[[], Kind]) -> Kind:
        kind = self._kinds.pop(name, None)
        self._kinds[name] = kind = made() if kind is None else kind
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)
        return kind

    def _is_offered(self, codec: Codec, reading: Reading, chunk_error: float) -> bool:
        if codec not in self._settings.codecs or math.isinf(chunk_error):
            return False
        error = max(chunk_error, self._errors.get((reading.bucket, codec), 0.0))
        return reading.max_error is None or error <= reading.max_error

    def _exact(self, nbytes: int) -> Form:
        return Form(Codec.EXACT.value, self._taken(nbytes))

    def _taken(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._unit_bytes)) * self._unit_bytes

    @property
    def known_count(self) -> int:
        """How many chunks are remembered, in memory or not."""
        return len(self._uses)

    def holds(self, key: Key) -> bool:
        """Whether a chunk is in memory, as decided last."""
        return key in self._held

    def _leave(self, key: Key) -> None:
        """Remember the uses of a chunk that is not in memory, for a while."""
        self._forms.pop(key, None)
        self._held.pop(key, None)
        if key in self._uses:
            self._ghosts[key] = None
            if len(self._ghosts) > GHOST_COUNT_MAX:
                gone, _ = self._ghosts.popitem(last=False)
                del self._uses[gone]


def _fits_in_place(was: Form, now: Form) -> bool:
    """Whether a chunk is encoded where it lies."""
    return goes_on(Codec(was.codec), Codec(now.codec)) and now.nbytes <= was.nbytes
