"""The policy of the DRAM tier that keeps, encodes or evicts each chunk: the one of bounded buckets, with ladders of the
forms that the readers of a chunk take. Pure: time is an argument. The home has every chunk exactly, so an evicted
chunk is loaded from there.

    16 chunks fit exactly. 24 are used, 8 of them often  ->  8 exact and 16 at 4 bits, and none is loaded from the disk
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from objectcache.kv_codecs.layer import Codec, goes_on
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
    than in the best one, to which it has risen, or tried to, `rise_count` times. One that just did so `is_rising`. Its
    forms are those of an `epoch` of the ladders.
    """

    forms: tuple[Form, ...]
    epoch: int
    anchor: Reading | None = None
    held: _Held | None = None
    made: Encoded | None = None
    borne_s: float = 0.0
    rise_count: int = 0
    is_rising: bool = False


class MemoryPolicy:
    """Decides for one memory of `capacity_bytes`, in which a chunk takes a multiple of `unit_bytes`; `eviction` says in
    which order chunks have their turns. Policies may share what they know of `readers`. The same calls always get the
    same answers.
    """

    def __init__(
        self,
        capacity_bytes: int,
        settings: UtilitySettings,
        unit_bytes: int = 1,
        eviction: Eviction = Eviction.REUSE_VALUE,
        readers: ReaderForms | None = None,
        ghost_count_max: int = GHOST_COUNT_MAX,
    ) -> None:
        self._policy = policy_of(eviction, capacity_bytes, ghost_count_max=2 * ghost_count_max)
        self._policy.look_again = self._latest
        self._ghost_count_max = ghost_count_max
        self.ladders = MemoryLadders(settings)
        self.readers = ReaderForms(settings, unit_bytes) if readers is None else readers
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

    @property
    def held(self) -> Collection[Key]:
        """The chunks in memory."""
        return self._chunks.keys()

    def resize(self, capacity_bytes: int) -> TierDecision:
        """Change the capacity, and say what changes. Raises ValueError for one below 0."""
        return self._decided(self._policy.resize(capacity_bytes), {})

    def load_s(self, key: Key) -> float:
        """The seconds that a chunk in memory took from its home."""
        return self.ladders.load_s(self._chunks[key].forms)

    def cost_s(self, key: Key, forms: tuple[Form, ...]) -> float:
        """The seconds that a use costs as things lie, lost quality among them, by a reader who takes these forms."""
        chunk = self._chunks.get(key)
        held = None if chunk is None else chunk.held
        form = next((each for each in forms if held is not None and each.codec == held.form.codec), None)
        return self.ladders.load_s(forms) if form is None else self.ladders.use_cost_s(form, forms)

    def request(self, now_s: float, uses: Sequence[ChunkUse], reading: Reading | None) -> TierDecision:
        """Note a use of these chunks, a prefix in order, by one reader, and say what changes. Raises ValueError where
        `now_s` goes back, or a chunk is named twice.
        """
        kinds: dict[Hashable, ReaderKind] = {}
        ladders: dict[Hashable, Ladder] = {}
        sizes: list[int] = []
        for use in uses:
            ladder = self._used(use, self._kind(use, own_reading(reading, use), kinds))
            if ladder is None:
                sizes.append(self._policy.resident(use.key).nbytes)
                continue
            sizes.append(ladder[0].nbytes)
            if self._chunks[use.key].held is None:
                ladders[use.key] = ladder
            else:
                self._policy.offer(use.key, ladder[0].nbytes, ladder)
        change = self._policy.request(Request(now_s, [use.key for use in uses], sizes, ladders=ladders))
        kept = {use.key: use.key not in ladders for use in uses} | dict.fromkeys(change.admitted, True)
        return self._decided(change.evicted, cast("dict[Key, bool]", kept))

    def note_made(self, key: Key, encoded: Encoded) -> None:
        """Note the form in which a chunk lies in memory now: readers whose bound its error breaks do not take it."""
        if key in self._chunks:
            self._chunks[key].made = encoded

    def remove(self, keys: Iterable[Key]) -> None:
        """Note that these chunks are not in memory, whatever was decided."""
        for key in keys:
            self._policy.remove(key)
            self._leave(key)

    def _kind(self, use: ChunkUse, reading: Reading | None, known: dict[Hashable, ReaderKind]) -> ReaderKind:
        """The kind of the reader. `known` has those of the chunks of this request that have no errors of their own."""
        chunk = self._chunks.get(use.key)
        if reading is not None and chunk is not None and chunk.made is not None:
            self.readers.note_made(use.key, chunk.made, reading)
        if self.readers.has_errors(use.key):
            return self.readers.kind(use, reading)
        name = (use.nbytes, use.content_class)
        kind = known.get(name)
        if kind is None:
            kind = known[name] = self.readers.kind(use, reading)
        return kind

    def _used(self, use: ChunkUse, kind: ReaderKind) -> Ladder | None:
        """Note a use of a chunk. Returns its new ladder, from the form on that it is to have; None where it goes on as
        it was.
        """
        key = use.key
        former = self._uses.get(key, ())
        if self.readers.has_errors(key):  # what is known of the errors now was not known at earlier uses
            taking: Uses = ()
            for each, each_count in former:
                taking = with_count(taking, self.readers.kind(use, each.reading), each_count)
            former = taking
        uses = self._uses[key] = with_use(former, kind)
        self._ghosts.pop(key, None)
        chunk = self._chunks.get(key)
        if chunk is None or chunk.held is None:
            forms = self.ladders.offered(forms_of(uses))
            self._chunks[key] = _Chunk(forms, self.ladders.epoch)
            return self.ladders.of(forms, self.ladders.best(forms))
        known = chunk.forms
        at = self._offered_again(key, chunk, chunk.held)
        forms = chunk.forms
        best = self.ladders.best(forms)
        if at is None:
            return self.ladders.of(forms, best)
        if self._is_to_rise(chunk, at, best):
            chunk.borne_s, chunk.is_rising = 0.0, True
            chunk.rise_count = min(chunk.rise_count + 1, RISES_MAX)
            return self.ladders.rising(forms, best)
        is_as_it_was = forms is known and not chunk.is_rising
        chunk.is_rising = False
        return None if is_as_it_was else self.ladders.of(forms, at)

    def _offered_again(self, key: Key, chunk: _Chunk, held: _Held) -> Form | None:
        """Find the forms of a chunk in memory anew. Returns the present one among them; None where it is no more."""
        chunk.anchor, chunk.epoch = held.reading, self.ladders.epoch
        forms = chunk.forms = self.ladders.offered(forms_of(self._uses[key], chunk.anchor), held.form.codec)
        return next((form for form in forms if (form.codec, form.nbytes) == (held.form.codec, held.form.nbytes)), None)

    def _latest(self, key: Hashable) -> Ladder | None:
        """The ladder of a chunk whose turn it is, where other forms are offered than when it was used; None where it
        goes on as it was.
        """
        chunk = self._chunks[cast("Key", key)]
        if chunk.epoch == self.ladders.epoch or chunk.held is None:
            return None
        at = self._offered_again(cast("Key", key), chunk, chunk.held)
        return None if at is None else self.ladders.of(chunk.forms, at)

    def _is_to_rise(self, chunk: _Chunk, at: Form, best: Form) -> bool:
        """Whether the uses in the present form, with this one, have cost so much more that the chunk is to rise; after
        each time twice as much, because it would not have had to rise again if there were room.
        """
        if best.nbytes <= at.nbytes:
            return False
        forms = chunk.forms
        chunk.borne_s += self.ladders.use_cost_s(at, forms) - self.ladders.use_cost_s(best, forms)
        return chunk.borne_s >= self.ladders.rise_cost_s(forms) * (1 << chunk.rise_count)

    def _decided(self, evicted: Iterable[Hashable], touched: Mapping[Key, bool]) -> TierDecision:
        """As `_decision`, of these chunks, of those that the policy encodes, and of those that it evicts."""
        encoded = dict.fromkeys(self._policy.encoded, True)
        self._policy.encoded.clear()
        left = dict.fromkeys(evicted, False)
        return self._decision({**touched, **cast("dict[Key, bool]", encoded), **cast("dict[Key, bool]", left)})

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
            if len(self._ghosts) > self._ghost_count_max:
                gone, _ = self._ghosts.popitem(last=False)
                del self._uses[gone]


def own_reading(reading: Reading | None, use: ChunkUse) -> Reading | None:
    """The reading, where the chunk is of its size; None where it is to come exactly."""
    return reading if reading is not None and use.nbytes == reading.exact_bytes else None
