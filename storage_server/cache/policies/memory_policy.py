"""The policy of the DRAM tier that keeps, encodes or evicts each chunk: the one of bounded buckets, with ladders of the
forms that the readers of a chunk take. Pure: time is an argument. The home has every chunk exactly, so an evicted
chunk is loaded from there.

    16 chunks fit exactly. 24 are used, 8 of them often  ->  8 exact and 16 at 4 bits, and none is loaded from the disk
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from objectcache.kv_codecs.layer import Codec, LayerShape, goes_on
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.ladder import Ladder
from storage_server.cache.policies.memory_ladder import MemoryLadders
from storage_server.cache.policies.order import Request
from storage_server.cache.policies.reader_forms import ChunkUse, Key, ReaderForms
from storage_server.cache.policies.readers import ReaderKind, Uses, forms_of, reading_with, with_count, with_use
from storage_server.cache.policies.utility import Form, UtilitySettings
from storage_server.planning.forms import Encoded, Reading

GHOST_COUNT_MAX = 1 << 17
"""Chunks that are not in memory, and whose readers are remembered."""

RISES_MAX = 4
"""After so many times a chunk waits no longer to rise again."""


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


@dataclass(slots=True)
class _Chunk:
    """A chunk that the policy has: the forms that its readers take, the reading of the form that it had when these were
    made, its form as the last decision has it, and as it lies in memory. Its uses in that form have cost `borne_s` more
    than in the best one, to which it has risen, or tried to, `rise_count` times. One that just did so `is_rising`.
    """

    forms: tuple[Form, ...]
    anchor: Reading | None = None
    held: _Held | None = None
    made: Encoded | None = None
    borne_s: float = 0.0
    rise_count: int = 0
    is_rising: bool = False


class MemoryPolicy:
    """Decides for one memory of `capacity_bytes`, in which a chunk takes a multiple of `unit_bytes`; `eviction` says in
    which order chunks have their turns. The same calls always get the same answers.
    """

    def __init__(
        self,
        capacity_bytes: int,
        settings: UtilitySettings,
        unit_bytes: int = 1,
        eviction: Eviction = Eviction.REUSE_VALUE,
    ) -> None:
        self._policy = policy_of(eviction, capacity_bytes)
        self._ladders = MemoryLadders(settings)
        self._readers = ReaderForms(settings, unit_bytes)
        self._uses: dict[Key, Uses] = {}
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._chunks: dict[Key, _Chunk] = {}

    @property
    def used_bytes(self) -> int:
        """The bytes of all chunks in memory."""
        return self._policy.used_bytes

    @property
    def known_count(self) -> int:
        """How many chunks are remembered, in memory or not."""
        return len(self._uses)

    def request(self, now_s: float, uses: Sequence[ChunkUse], reading: Reading | None) -> TierDecision:
        """Note a use of these chunks, a prefix in order, by one reader, and say what changes. Raises ValueError where
        `now_s` goes back, or a chunk is named twice.
        """
        kinds: dict[Hashable, ReaderKind] = {}
        ladders: dict[Hashable, Ladder] = {}
        sizes: list[int] = []
        for use in uses:
            mine = reading if reading is not None and use.nbytes == reading.exact_bytes else None
            ladder = self._used(use, self._kind(use, mine, kinds))
            if ladder is None:
                sizes.append(self._policy.resident(use.key).nbytes)
                continue
            sizes.append(ladder[0].nbytes)
            if self._chunks[use.key].held is None:
                ladders[use.key] = ladder
            else:
                self._policy.offer(use.key, ladder[0].nbytes, ladder)
        change = self._policy.request(Request(now_s, [use.key for use in uses], sizes, ladders=ladders))
        touched = dict.fromkeys((use.key for use in uses), True) | dict.fromkeys(self._policy.encoded, True)
        self._policy.encoded.clear()
        touched |= dict.fromkeys(set(ladders).difference(change.admitted), False)
        return self._decision(cast("dict[Key, bool]", touched | dict.fromkeys(change.evicted, False)))

    def note_made(self, key: Key, encoded: Encoded) -> None:
        """Note the form in which a chunk lies in memory now: readers whose bound its error breaks do not take it."""
        if key in self._chunks:
            self._chunks[key].made = encoded

    def note_error(self, reading: Reading, codec: Codec, worst_error: float) -> None:
        """As in ReaderForms."""
        self._readers.note_error(reading, codec, worst_error)

    def note_unencodable(self, key: Key, shape: LayerShape) -> None:
        """As in ReaderForms."""
        self._readers.note_unencodable(key, shape)

    def remove(self, keys: Iterable[Key]) -> None:
        """Note that these chunks are not in memory, whatever was decided."""
        for key in keys:
            self._policy.remove(key)
            self._leave(key)

    def _kind(self, use: ChunkUse, reading: Reading | None, known: dict[Hashable, ReaderKind]) -> ReaderKind:
        """The kind of the reader. `known` has those of the chunks of this request that have no errors of their own."""
        chunk = self._chunks.get(use.key)
        if reading is not None and chunk is not None and chunk.made is not None:
            self._readers.note_made(use.key, chunk.made, reading)
        if self._readers.has_errors(use.key):
            return self._readers.kind(use, reading)
        name = (use.nbytes, use.content_class)
        kind = known.get(name)
        if kind is None:
            kind = known[name] = self._readers.kind(use, reading)
        return kind

    def _used(self, use: ChunkUse, kind: ReaderKind) -> Ladder | None:
        """Note a use of a chunk. Returns its new ladder, from the form on that it is to have; None where it goes on as
        it was.
        """
        key = use.key
        former = self._uses.get(key, ())
        if self._readers.has_errors(key):  # what is known of the errors now was not known at earlier uses
            taking: Uses = ()
            for each, each_count in former:
                taking = with_count(taking, self._readers.kind(use, each.reading), each_count)
            former = taking
        uses = self._uses[key] = with_use(former, kind)
        self._ghosts.pop(key, None)
        chunk = self._chunks.get(key)
        if chunk is None or chunk.held is None:
            forms = self._ladders.offered(forms_of(uses))
            self._chunks[key] = _Chunk(forms)
            return self._ladders.of(forms, self._ladders.best(forms))
        known, present = chunk.forms, chunk.held.form
        chunk.anchor = chunk.held.reading
        forms = chunk.forms = self._ladders.offered(forms_of(uses, chunk.anchor), present.codec)
        at = next((form for form in forms if (form.codec, form.nbytes) == (present.codec, present.nbytes)), None)
        best = self._ladders.best(forms)
        if at is None:
            return self._ladders.of(forms, best)
        if self._is_to_rise(chunk, at, best):
            chunk.borne_s, chunk.is_rising = 0.0, True
            chunk.rise_count = min(chunk.rise_count + 1, RISES_MAX)
            return self._ladders.rising(forms, best)
        is_as_it_was = forms is known and not chunk.is_rising
        chunk.is_rising = False
        return None if is_as_it_was else self._ladders.of(forms, at)

    def _is_to_rise(self, chunk: _Chunk, at: Form, best: Form) -> bool:
        """Whether the uses in the present form, with this one, have cost so much more that the chunk is to rise; after
        each time twice as much, because it would not have had to rise again if there were room.
        """
        if best.nbytes <= at.nbytes:
            return False
        forms = chunk.forms
        chunk.borne_s += self._ladders.use_cost_s(at, forms) - self._ladders.use_cost_s(best, forms)
        return chunk.borne_s >= self._ladders.rise_cost_s(forms) * (1 << chunk.rise_count)

    def _decision(self, touched: Mapping[Key, bool]) -> TierDecision:
        """The changes that put these chunks where the policy has them: in memory, or (False) not."""
        evicted: list[Key] = []
        recoded: dict[Key, Encoding] = {}
        admitted: dict[Key, Encoding | None] = {}
        for key, is_kept in touched.items():
            chunk = self._chunks[key]
            was = chunk.held
            if not is_kept:
                self._leave(key)  # also where it has never been in memory: its readers are remembered for a while only
                if was is not None:
                    evicted.append(key)
                continue
            form = self._form(key, chunk)
            now = chunk.held = _Held(form, reading_with(self._uses[key], form.codec, chunk.anchor))
            if was is not None and now.is_same(was):
                continue
            chunk.borne_s = 0.0
            encoding = None if now.reading is None else Encoding(Codec(form.codec), now.reading)
            if was is not None and encoding is not None and now.is_made_from(was):
                recoded[key] = encoding
                continue
            chunk.made = None
            if was is not None:
                evicted.append(key)
            admitted[key] = encoding
        return TierDecision(tuple(evicted), recoded, admitted)

    def _form(self, key: Key, chunk: _Chunk) -> Form:
        """The form in which the policy has a chunk."""
        rung = self._policy.resident(key).rung
        assert rung is not None, "each chunk came with a ladder"
        return next(form for form in chunk.forms if form.codec == rung.codec.value)

    def _leave(self, key: Key) -> None:
        """Remember the readers of a chunk that is not in memory, for a while."""
        self._chunks.pop(key, None)
        if key in self._uses:
            self._ghosts[key] = None
            if len(self._ghosts) > GHOST_COUNT_MAX:
                gone, _ = self._ghosts.popitem(last=False)
                del self._uses[gone]
