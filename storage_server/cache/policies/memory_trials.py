"""Which codec a memory is to encode with, tried. Pure: the trials are books, without bytes.

Where bytes are short, the best codec is the one that saves most for each byte. Where nearly all chunks fit at 8 bits, 4
bits only lose quality: that depends on how many uses find room, and no single chunk shows it. So policies of the same
kind keep the books of small memories beside it: one for each codec alone, and one for exact chunks only. Each is told
of the same part of all uses, and has the same part of the capacity (Waldspurger et al. 2017, "Cache modeling and
optimization using miniature simulations"). The memory encodes with the codec whose trial costs least, and not at all
where that is the exact one.

    costs of the last 200 requests in the trials: exact 41 s, kivi8-1 30 s, kivi4-1 33 s   ->  kivi8-1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.choice import Eviction
from storage_server.cache.policies.memory_ladder import MemoryLadders
from storage_server.cache.policies.memory_policy import MemoryPolicy, TierDecision, own_reading
from storage_server.cache.policies.reader_forms import ChunkUse, Key
from storage_server.cache.policies.utility import Form, UtilitySettings
from storage_server.planning.forms import Reading

TRIED_HELD_MAX = 4096
"""The chunks in a trial's memory of exact ones: with more, half of all are left out from then on. So many of one
request are tried.
"""
TRIED_GHOSTS_MAX = 16 * TRIED_HELD_MAX
TRIED_REQUESTS_MIN = 16
"""Before so many requests have been tried in full memories, the memory goes by what a byte saves."""
CHOICE_REQUESTS = 8
"""The codec is chosen again after so many."""
KEPT_PART = 0.5 ** (1 / 200)
"""A request keeps this part of all gains: what was seen 200 tried requests ago counts half."""
SURE_DEVIATIONS = 3.0
"""Where the memory has exact chunks only, a codec's gain has to be so many standard deviations of the sum. Gains of one
stream come in runs; with 2, replayed requests cost up to 5 % more than without codecs.
"""
BETTER_FACTOR = 1.1
"""Another codec's gain has to be so many times the present one's."""


Taken = Mapping[Key, tuple[Form, ...]]
"""The forms of chunks that a reader takes, the exact one first."""


@dataclass(slots=True)
class _Trial:
    """The books of a small memory, its codec, and what its requests have cost less than those of exact chunks: the sum,
    and that of the squares.
    """

    policy: MemoryPolicy
    codec: str
    gain_s: float = 0.0
    squared_gain_s2: float = 0.0

    @property
    def is_sure(self) -> bool:
        """Whether the gain is hardly one by chance."""
        return self.gain_s > SURE_DEVIATIONS * math.sqrt(self.squared_gain_s2)

    def note(self, gain_s: float) -> None:
        """Note the gain of one more request."""
        self.gain_s = KEPT_PART * self.gain_s + gain_s
        self.squared_gain_s2 = KEPT_PART * self.squared_gain_s2 + gain_s**2

    def request(self, now_s: float, uses: Sequence[ChunkUse], taken: Taken, reading: Reading | None) -> float:
        """Note these uses, by a reader who takes these forms of them. Returns the seconds that they cost."""
        policy = self.policy
        cost_s = sum(policy.cost_s(key, forms) for key, forms in taken.items())
        decision = policy.request(now_s, uses, reading)
        again = decision.admitted.keys() & set(decision.evicted)  # they come in another form
        return cost_s + sum(policy.load_s(key) for key in again)


class TryingMemoryPolicy(MemoryPolicy):
    """A MemoryPolicy that tries its codecs. The `secret` says which chunks are tried, so that nobody chooses names that
    are.
    """

    def __init__(
        self,
        capacity_bytes: int,
        settings: UtilitySettings,
        unit_bytes: int = 1,
        eviction: Eviction = Eviction.REUSE_VALUE,
        secret: bytes = b"",
    ) -> None:
        super().__init__(capacity_bytes, settings, unit_bytes, eviction)
        self._capacity_bytes = capacity_bytes
        self._secret = secret
        self._exact = self._trial(settings, unit_bytes, eviction, Codec.EXACT)
        self._trials = [self._trial(settings, unit_bytes, eviction, codec) for codec in settings.codecs]
        self._by_bytes = MemoryLadders(settings)
        self._least_bytes = math.inf
        """Smaller chunks are never encoded, and not tried: a crowd of them would leave the trials no room."""
        self._halvings = 0
        self._request_count = 0
        self._is_tight = False
        """Whether the trials' memories have been full: before, encoding has nothing to gain."""

    def request(self, now_s: float, uses: Sequence[ChunkUse], reading: Reading | None) -> TierDecision:
        """As in MemoryPolicy."""
        decision = super().request(now_s, uses, reading)
        alike = {(use.nbytes, use.content_class): use for use in uses if use.nbytes < self._least_bytes}.values()
        if self._codec_by_bytes(self._taken(list(alike), reading)):
            self._least_bytes = min(use.nbytes for use in alike if self._codec_by_bytes(self._taken([use], reading)))
        tried = [use for use in uses if use.nbytes >= self._least_bytes and self._is_tried(use.key)]
        if tried:
            self._try(now_s, tried[:TRIED_HELD_MAX], reading)
        return decision

    def _trial(self, settings: UtilitySettings, unit_bytes: int, eviction: Eviction, codec: Codec) -> _Trial:
        policy = MemoryPolicy(
            self._capacity_bytes,
            settings,
            unit_bytes,
            eviction,
            readers=self.readers,
            ghost_count_max=TRIED_GHOSTS_MAX,
        )
        policy.ladders.prefer((codec.value,))
        return _Trial(policy, codec.value)

    def _try(self, now_s: float, uses: Sequence[ChunkUse], reading: Reading | None) -> None:
        taken = self._taken(uses, reading)
        exact = self._exact
        exact_s = exact.request(now_s, uses, taken, reading)
        for trial in self._trials:
            gain_s = exact_s - trial.request(now_s, uses, taken, reading)
            if self._is_tight:
                trial.note(gain_s)
        self._request_count += self._is_tight
        self._is_tight |= exact.policy.used_bytes + uses[-1].nbytes > self._capacity_bytes >> self._halvings
        if self._request_count >= TRIED_REQUESTS_MIN and self._request_count % CHOICE_REQUESTS == 0:
            order = self.ladders.order
            present = self._codec_by_bytes(taken) if order is None else next(iter(order), "")
            self.ladders.prefer(preferred(present, self._trials))
        while len(exact.policy.held) > TRIED_HELD_MAX:
            self._halve()

    def _taken(self, uses: Sequence[ChunkUse], reading: Reading | None) -> Taken:
        return {use.key: self.readers.kind(use, own_reading(reading, use)).forms for use in uses}

    def _codec_by_bytes(self, taken: Taken) -> str:
        """The codec with which these chunks are encoded before the first choice; empty where they never are."""
        offered = (form.codec for forms in taken.values() for form in self._by_bytes.offered(forms)[1:])
        return next(offered, "")

    def _is_tried(self, key: Key) -> bool:
        if not self._halvings:
            return True
        name = f"{key[1]} {key[0]}".encode("utf-8", "surrogatepass")
        digest = blake2b(name, key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - self._halvings) == 0

    def _halve(self) -> None:
        """Try half as many chunks from now on, in half of the memory."""
        self._halvings += 1
        for trial in (self._exact, *self._trials):
            policy = trial.policy
            policy.remove([key for key in policy.held if not self._is_tried(key)])
            policy.resize(self._capacity_bytes >> self._halvings)


def preferred(present: str, trials: Sequence[_Trial]) -> tuple[str, ...]:
    """The codecs that gain, the best first; without a present one only those that surely do. The present one stays as
    long as it gains, and no other gains clearly more.
    """
    held = next((trial for trial in trials if trial.codec == present and trial.gain_s > 0), None)
    gaining = [trial for trial in trials if (trial.is_sure if held is None else trial.gain_s > 0)]
    gaining.sort(key=lambda trial: -trial.gain_s * (BETTER_FACTOR if trial is held else 1.0))
    return tuple(trial.codec for trial in gaining)
