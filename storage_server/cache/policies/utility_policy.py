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
from typing import TypeVar, cast

from objectcache.kv_codecs.chains import Chain
from objectcache.kv_codecs.layer import Codec, LayerShape, goes_on
from storage_server.cache.policies.optimizer import Move, Optimizer
from storage_server.cache.policies.readers import ReaderKind, Uses, forms_of, reading_with, scaled, use_count, with_use
from storage_server.cache.policies.utility import Form, TieredEntry, TierModel
from storage_server.planning.forms import Encoded, Reading

GHOST_COUNT_MAX = 1 << 17
"""Chunks that are not in memory, and whose uses are remembered."""
KINDS_MAX, ERRORS_MAX = 1024, 4096
"""Kinds of readers, and errors of codecs in buckets, that are remembered."""
CHUNK_ERRORS_MAX = 8 * len(Codec)
"""Errors of one chunk that are remembered: those of eight shapes in all codecs."""
ENCODABLE_BYTES_MAX = 256 << 20
"""Larger chunks stay exact, since a chunk is encoded as a whole."""
EXPONENT_MAX = 400.0
"""Counts are scaled down when they have grown by this power of two."""
_MADE_FROM = {after: frozenset(before.value for before in Codec if goes_on(before, after)) for after in Codec}
Key = tuple[str, int]
"""The identity of a chunk's bytes."""
_T = TypeVar("_T")


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
class ChunkUse:
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
class TierDecision:
    """The changes of the tier after a use, in the order in which they are carried out: chunks that go, chunks that are
    encoded further, and chunks that come, encoded or (None) exact. A chunk that changes to a form that is not made from
    its present one goes and comes again.
    """

    evicted: tuple[Key, ...]
    recoded: Mapping[Key, Encoding]
    admitted: Mapping[Key, Encoding | None]


@dataclass(frozen=True, slots=True)
class _Held:
    """A chunk's form, and a reading that takes it; None for the exact form."""

    form: Form
    reading: Reading | None

    def is_same(self, other: _Held) -> bool:
        """Whether nothing is to be done."""
        form, former = self.form, other.form
        if form.codec != former.codec or form.nbytes != former.nbytes:
            return False
        return self.reading is None or (other.reading is not None and self.reading.is_shape_of(other.reading))

    def is_made_from(self, other: _Held) -> bool:
        """Whether a chunk is encoded where it lies: from the exact one, or further in the same shape."""
        if other.reading is not None and (self.reading is None or not self.reading.is_shape_of(other.reading)):
            return False
        return goes_on(Codec(other.form.codec), Codec(self.form.codec)) and self.form.nbytes <= other.form.nbytes


@dataclass(frozen=True, slots=True)
class _Cost:
    """The error of a chunk in a codec, and the codecs that it passed; none where it was not made yet."""

    worst_error: float = 0.0
    chain: Chain = ()


_NO_COST = _Cost()


class UtilityPolicy:
    """Decides for one memory of `capacity_bytes`, in which a chunk takes a multiple of `unit_bytes`. The same calls
    always get the same answers.
    """

    def __init__(self, capacity_bytes: int, settings: UtilitySettings, unit_bytes: int = 1) -> None:
        self._unit_bytes = unit_bytes
        self._settings = settings
        self._optimizer = Optimizer(
            [TierModel("memory", capacity_bytes, settings.memory_bytes_per_s)], settings.alpha_s
        )
        self._began_s: float | None = None
        self._uses: dict[Key, Uses] = {}
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._forms: dict[Key, tuple[Form, ...]] = {}
        self._anchors: dict[Key, Reading | None] = {}
        """The readings of the forms that chunks had when `_forms` were made."""
        self._held: dict[Key, _Held] = {}
        """The form of each chunk as the last decision has it."""
        self._made: dict[Key, Encoded] = {}
        """Encoded chunks as they are in memory."""
        self._kinds: OrderedDict[Hashable, ReaderKind] = OrderedDict()
        self._known_forms: OrderedDict[Hashable, tuple[Form, ...]] = OrderedDict()
        self._errors: OrderedDict[tuple[str, LayerShape, Codec], float] = OrderedDict()
        self._chunk_errors: OrderedDict[Key, dict[tuple[LayerShape, Codec], _Cost]] = OrderedDict()
        """The costs of chunks that were greater than a reader takes."""

    @property
    def used_bytes(self) -> int:
        """The bytes of all chunks in memory."""
        return self._optimizer.used_bytes[0]

    def request(self, now_s: float, uses: Sequence[ChunkUse], reading: Reading | None) -> TierDecision:
        """Note a use of these chunks by one reader, and say what changes."""
        weight = self._optimizer.use_weight = self._inflated(now_s)
        kinds: dict[Hashable, ReaderKind] = {}
        touched: dict[Key, None] = {}
        for use in uses:
            mine = reading if reading is not None and use.nbytes == reading.exact_bytes else None
            made = self._made.get(use.key)
            if mine is not None and made is not None and mine.is_shape_of(made) and _is_too_much(made, mine):
                self._note_chunk_error(use.key, made.shape, made.codec, _Cost(made.worst_error, made.chain))
            errors = self._chunk_errors.get(use.key)
            name = (use.nbytes, use.content_class)
            kind = kinds.get(name) if errors is None else None
            if kind is None:
                kind = self._kind(use, mine)
            if errors is None:
                kinds[name] = kind
            touched[use.key] = None
            moves = self._used(use, kind, weight)
            touched.update((cast(Key, move.key), None) for move in moves)
        return self._decision(touched)

    def note_made(self, key: Key, encoded: Encoded) -> None:
        """Note the form in which a chunk lies in memory now: readers whose bound its error breaks do not take it."""
        if key in self._held:
            self._made[key] = encoded

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
        for codec in Codec:
            self._note_chunk_error(key, shape, codec, _Cost(math.inf))

    def remove(self, keys: Iterable[Key]) -> None:
        """Note that these chunks are not in memory, whatever was decided."""
        for key in keys:
            self._optimizer.remove(key)
            self._leave(key)

    def _note_chunk_error(self, key: Key, shape: LayerShape, codec: Codec, cost: _Cost) -> None:
        errors = self._chunk_errors.setdefault(key, {})
        errors[shape, codec] = cost
        if len(errors) > CHUNK_ERRORS_MAX:  # whoever reads a chunk says its shape
            del errors[next(iter(errors))]
        self._chunk_errors.move_to_end(key)
        if len(self._chunk_errors) > GHOST_COUNT_MAX:
            self._chunk_errors.popitem(last=False)

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

    def _used(self, use: ChunkUse, kind: ReaderKind, weight: float) -> Sequence[Move]:
        key = use.key
        former = self._uses.get(key, ())
        if key in self._chunk_errors:  # what is known of the errors now was not known at earlier uses
            taking: Uses = ()
            for each, each_count in former:
                taking = with_use(taking, self._kind(use, each.reading), each_count)
            former = taking
        uses = self._uses[key] = with_use(former, kind, weight)
        self._ghosts.pop(key, None)
        held = self._held.get(key)
        count, known = use_count(uses), self._forms.get(key)
        anchor = self._anchors[key] = None if held is None else held.reading
        forms = self._forms[key] = forms_of(uses, anchor)
        placement = self._optimizer.placement(key)
        if placement is not None and known is not None:
            present = known[placement.form]
            if forms is known:
                return self._optimizer.use(key, count)
            if any(form.codec == present.codec and form.nbytes == present.nbytes for form in forms):
                return self._optimizer.use(key, count, forms)
        load_s = forms[0].nbytes / self._settings.home_bytes_per_s
        return self._optimizer.put(TieredEntry(key, count, forms, load_s, load_s))

    def _decision(self, touched: Iterable[Key]) -> TierDecision:
        evicted: list[Key] = []
        recoded: dict[Key, Encoding] = {}
        admitted: dict[Key, Encoding | None] = {}
        for key in touched:
            was, form = self._held.get(key), self._form(key)
            if form is None:
                self._leave(key)  # also where it has never been in memory: its uses are remembered for a while only
                if was is not None:
                    evicted.append(key)
                continue
            now = self._held[key] = _Held(form, reading_with(self._uses[key], form.codec, self._anchors[key]))
            if was is not None and now.is_same(was):
                continue
            encoding = None if now.reading is None else Encoding(Codec(form.codec), now.reading)
            if was is not None and encoding is not None and now.is_made_from(was):
                recoded[key] = encoding
                continue
            self._made.pop(key, None)
            if was is not None:
                evicted.append(key)
            admitted[key] = encoding
        return TierDecision(tuple(evicted), recoded, admitted)

    def _form(self, key: Key) -> Form | None:
        """The form that the optimizer has for a chunk; None where it is not kept."""
        placement = self._optimizer.placement(key)
        return None if placement is None else self._forms[key][placement.form]

    def _kind(self, use: ChunkUse, reading: Reading | None) -> ReaderKind:
        """The kind of a reader, the same object for the same forms: exact, and each codec that is known to keep its
        bound.
        """
        if reading is None or use.nbytes > ENCODABLE_BYTES_MAX:
            return _remembered(self._kinds, use.nbytes, lambda: ReaderKind((self._exact(use.nbytes),)))
        errors = self._chunk_errors.get(use.key, {})
        codecs = tuple(
            codec
            for codec in reading.codecs
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
                nbytes = self._taken(reading.chunk_bytes(codec))
                forms.append(Form(codec.value, nbytes, quality, decode_s, _MADE_FROM[codec]))
            return tuple(sorted(forms, key=lambda form: -form.nbytes))

        def made() -> ReaderKind:
            shape = (reading.shape, reading.num_layers)
            return ReaderKind(_remembered(self._known_forms, (*name, shape), made_forms), reading)

        return _remembered(self._kinds, (*name, reading), made)

    def _is_offered(self, codec: Codec, reading: Reading, known: _Cost) -> bool:
        if codec not in self._settings.codecs or math.isinf(known.worst_error):
            return False
        if not reading.bears(reading.loss_of(known.chain or (codec,))):
            return False
        error = max(known.worst_error, self._errors.get((reading.bucket, reading.shape, codec), 0.0))
        return reading.max_error is None or error <= reading.max_error

    def _exact(self, nbytes: int) -> Form:
        return Form(Codec.EXACT.value, self._taken(nbytes))

    def _taken(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._unit_bytes)) * self._unit_bytes

    @property
    def known_count(self) -> int:
        """How many chunks are remembered, in memory or not."""
        return len(self._uses)

    def _leave(self, key: Key) -> None:
        """Remember the uses of a chunk that is not in memory, for a while."""
        self._forms.pop(key, None)
        self._anchors.pop(key, None)
        self._held.pop(key, None)
        self._made.pop(key, None)
        if key in self._uses:
            self._ghosts[key] = None
            if len(self._ghosts) > GHOST_COUNT_MAX:
                gone, _ = self._ghosts.popitem(last=False)
                del self._uses[gone]


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
