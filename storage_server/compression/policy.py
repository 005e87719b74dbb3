"""The policy of the DRAM tier that keeps, compresses or evicts each chunk by its utility: the optimizer, with
frequencies from decayed counts of uses, and with the quality and the speed of codecs as they were measured. Pure: time
is an argument. The home has every chunk exactly, so an evicted chunk is loaded from there.

    16 chunks fit exactly. 24 are used, 8 of them often  ->  8 exact and 16 at 4 bits, and none is loaded from the disk
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from kv_codecs.layer import Codec, goes_on
from storage_server.compression.forms import Reading
from storage_server.compression.optimizer import Move, Optimizer
from storage_server.compression.utility import Entry, Form, Tier

GHOST_COUNT_MAX = 1 << 17
"""Chunks that are not in memory, and whose uses are remembered."""
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
class Decision:
    """The changes of the tier after a use, in the order in which they are carried out: chunks that go, chunks that are
    encoded further, and chunks that come. A codec says in which form; None stands for exact. A chunk that changes to a
    form that is not made from its present one goes and comes again.
    """

    evicted: tuple[Key, ...]
    recoded: Mapping[Key, Codec]
    admitted: Mapping[Key, Codec | None]


class UtilityPolicy:
    """Decides for one memory of `capacity_bytes`, in which a chunk takes a multiple of `unit_bytes`. The same calls
    always get the same answers.
    """

    def __init__(self, capacity_bytes: int, settings: UtilitySettings, unit_bytes: int = 1) -> None:
        self._unit_bytes = unit_bytes
        self._settings = settings
        self._optimizer = Optimizer([Tier("memory", capacity_bytes, settings.memory_bytes_per_s)], settings.alpha_s)
        self._began_s: float | None = None
        self._counts: dict[Key, float] = {}
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._forms: dict[Key, tuple[Form, ...]] = {}
        self._held: dict[Key, Form] = {}
        """The form of each chunk as the last decision has it."""
        self._errors: dict[Codec, float] = {}
        self._exact_only: OrderedDict[Key, None] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """The bytes of all chunks in memory."""
        return self._optimizer.used_bytes[0]

    def request(self, now_s: float, uses: Sequence[Use], reading: Reading | None) -> Decision:
        """Note a use of these chunks by one reader, and say what changes."""
        inflation = self._optimizer.use_weight = self._inflated(now_s)
        forms: dict[str, tuple[Form, ...]] = {}
        touched: dict[Key, None] = {}
        for use in uses:
            is_encodable = use.nbytes <= ENCODABLE_BYTES_MAX and use.key not in self._exact_only
            mine: tuple[Form, ...] = (Form(Codec.EXACT.value, self._taken(use.nbytes)),)
            if reading is not None and use.nbytes == reading.exact_bytes and is_encodable:
                found = forms.get(use.content_class)
                if found is None:
                    found = forms[use.content_class] = self._made_forms(reading, use.content_class)
                mine = found
            touched[use.key] = None
            moves = self._used(use.key, mine, inflation)
            touched.update((cast(Key, move.key), None) for move in moves)
        return self._decision(touched)

    def note_error(self, codec: Codec, worst_error: float) -> None:
        """Note the error of a chunk that was encoded: it says which codecs a reader with a bound may get."""
        known = self._errors.get(codec, worst_error)
        self._errors[codec] = known + (worst_error - known) / 8

    def note_unencodable(self, key: Key) -> None:
        """Note that a chunk has no finite error in any codec: its elements are no numbers, or too large."""
        self._exact_only[key] = None
        if len(self._exact_only) > GHOST_COUNT_MAX:
            self._exact_only.popitem(last=False)

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
            self._counts = {key: count * factor for key, count in self._counts.items()}
            self._began_s, exponent = now_s, 0.0
        return float(2.0**exponent)

    def _used(self, key: Key, forms: tuple[Form, ...], weight: float) -> Sequence[Move]:
        count = self._counts[key] = self._counts.get(key, 0.0) + weight
        self._ghosts.pop(key, None)
        if self._optimizer.placement(key) is not None and self._forms.get(key) == forms:
            return self._optimizer.use(key, count)
        self._forms[key] = forms
        load_s = forms[0].nbytes / self._settings.home_bytes_per_s
        return self._optimizer.put(Entry(key, count, forms, load_s, load_s))

    def _decision(self, touched: Iterable[Key]) -> Decision:
        evicted: list[Key] = []
        recoded: dict[Key, Codec] = {}
        admitted: dict[Key, Codec | None] = {}
        for key in touched:
            was, now = self._held.get(key), self._form(key)
            if now is None:
                self._leave(key)  # also where it has never been in memory: its uses are remembered for a while only
            else:
                self._held[key] = now
            if now is None and was is None:
                continue
            if now is not None and was is not None:
                if now.codec == was.codec:
                    continue
                if goes_on(Codec(was.codec), Codec(now.codec)) and now.nbytes <= was.nbytes:  # it fits where it lies
                    recoded[key] = Codec(now.codec)
                    continue
            if was is not None:
                evicted.append(key)
            if now is not None:
                admitted[key] = None if now.codec == Codec.EXACT.value else Codec(now.codec)
        return Decision(tuple(evicted), recoded, admitted)

    def _form(self, key: Key) -> Form | None:
        """The form that the optimizer has for a chunk; None where it is not kept."""
        placement = self._optimizer.placement(key)
        return None if placement is None else self._forms[key][placement.form]

    def _made_forms(self, reading: Reading, content_class: str) -> tuple[Form, ...]:
        """The forms that a reader takes, largest first: exact, and each codec that is known to keep its bound."""
        qualities = self._settings.class_qualities.get(content_class, {})
        found = [Form(Codec.EXACT.value, self._taken(reading.exact_bytes))]
        for codec in reading.codecs:
            figures, error = self._settings.codecs.get(codec), self._errors.get(codec, 0.0)
            if figures is not None and (reading.max_error is None or error <= reading.max_error):
                decode_s = reading.exact_bytes / figures.decoded_bytes_per_s
                quality = qualities.get(codec, figures.quality)
                nbytes = self._taken(reading.chunk_bytes(codec))
                found.append(Form(codec.value, nbytes, quality, decode_s, _MADE_FROM[codec]))
        return tuple(sorted(found, key=lambda form: -form.nbytes))

    def _taken(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self._unit_bytes)) * self._unit_bytes

    @property
    def known_count(self) -> int:
        """How many chunks are remembered, in memory or not."""
        return len(self._counts)

    def holds(self, key: Key) -> bool:
        """Whether a chunk is in memory, as decided last."""
        return key in self._held

    def _leave(self, key: Key) -> None:
        """Remember the uses of a chunk that is not in memory, for a while."""
        self._forms.pop(key, None)
        self._held.pop(key, None)
        if key in self._counts:
            self._ghosts[key] = None
            if len(self._ghosts) > GHOST_COUNT_MAX:
                gone, _ = self._ghosts.popitem(last=False)
                del self._counts[gone]
