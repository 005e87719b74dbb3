"""The choice among codecs and tiers, simulated: AdaptCache's Figure 2 (002) with the product's optimizer, qualities and
sizes as measured on the models of this bench, and a played clock.

Contexts are asked for by a Poisson process, some much more often than others. A context lies in DRAM, on a disk, or
nowhere; then it is computed again. DRAM, disk and processor serve one request after the other. The best fixed choice is
one codec with LRU in both tiers; the best single codec has our own policy, so that only the choice among codecs is
missing. The oracle places everything once by the optimizer, with the true frequencies and the
qualities by which all are scored; ours has qualities of other samples, and counts uses. Whoever decides, a context is
computed when it is asked for the first time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bench.paper.compression.optimizer import Optimizer, TieredEntry, TierModel, upper_bound
from storage_server.cache.policies.utility import Form

EXACT = "exact"
"""The form besides the codecs."""
SAME_POLICY = " + our policy"
Qualities = Mapping[str, Mapping[str, float]]
"""By class of content and codec."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The sizes and speeds: bytes of a context, bytes/s of DRAM and disk, seconds to compute a context again."""

    context_bytes: int = 1 << 30
    dram_bytes_per_s: float = 20e9
    disk_bytes_per_s: float = 1e9
    prefill_s: float = 3.0
    dram_fraction: float = 0.1
    disk_fraction: float = 0.4


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: when, and which context."""

    at_s: float
    context: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: the mean TTFT and its 90th percentile in seconds, the mean quality, the part that DRAM had, and the part
    that had to be computed; and the mean utility, alpha * quality - TTFT.
    """

    ttft_s: float
    ttft_p90_s: float
    quality: float
    dram_hit_rate: float
    computed_rate: float
    utility_s: float


def requests(contexts: int, count: int, rate_per_s: float, skew: float, seed: int) -> list[Asked]:
    """A Poisson process over contexts whose shares fall with their rank to the power of `skew`."""
    random = np.random.default_rng(seed)
    times_s = np.cumsum(random.exponential(1 / rate_per_s, count))
    which = random.choice(contexts, count, p=shares(contexts, skew))
    return [Asked(float(at_s), int(context)) for at_s, context in zip(times_s, which, strict=True)]


def shares(contexts: int, skew: float) -> np.ndarray:
    """How often each context is asked for."""
    weights = 1.0 / np.arange(1, contexts + 1) ** skew
    weights = np.random.default_rng(1).permutation(weights)
    return np.asarray(weights / weights.sum())


class Cache(Protocol):
    """A way to keep contexts."""

    def find(self, asked: Asked) -> tuple[int | None, str]:
        """The tier and the codec of a context; None where it is computed again. The use is noted afterwards."""


class FixedLru:
    """One codec for everything, and LRU in DRAM and on the disk behind it; None keeps nothing."""

    def __init__(self, nbytes: int | None, codec: str, capacities: Sequence[int]) -> None:
        self._codec = codec
        self._room = [0 if nbytes is None else capacity // nbytes for capacity in capacities]
        self._kept: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())

    def find(self, asked: Asked) -> tuple[int | None, str]:
        tier = next((at for at, kept in enumerate(self._kept) if asked.context in kept), None)
        if tier is not None:
            del self._kept[tier][asked.context]
        self._put(0, asked.context)
        return tier, self._codec if tier is not None else EXACT

    def _put(self, tier: int, context: int) -> None:
        if tier == len(self._kept):
            return
        self._kept[tier][context] = None
        if len(self._kept[tier]) > self._room[tier]:
            gone, _ = self._kept[tier].popitem(last=False)
            self._put(tier + 1, gone)


class Chosen:
    """The optimizer with decayed counts; with `frequencies` it is the oracle, which knows every place beforehand."""

    def __init__(
        self,
        forms: Sequence[tuple[Form, ...]],
        machine: Machine,
        tiers: Sequence[TierModel],
        alpha_s: float,
        half_life_s: float,
        frequencies: np.ndarray | None = None,
    ) -> None:
        self._forms = forms
        self._machine = machine
        self._half_life_s = half_life_s
        self._counts: dict[int, float] = {}
        self._seen: set[int] = set()
        self._is_oracle = frequencies is not None
        self._optimizer = Optimizer(tiers, alpha_s)
        if frequencies is not None:
            for context in np.argsort(-frequencies):
                self._optimizer.put(
                    TieredEntry(int(context), float(frequencies[context]), forms[context], machine.prefill_s)
                )

    def find(self, asked: Asked) -> tuple[int | None, str]:
        place = self._optimizer.placement(asked.context)
        forms = self._forms[asked.context]
        if not self._is_oracle:
            weight = 2.0 ** (asked.at_s / self._half_life_s)
            count = self._counts[asked.context] = self._counts.get(asked.context, 0.0) + weight
            if place is None:
                self._optimizer.put(TieredEntry(asked.context, count, forms, self._machine.prefill_s))
            else:
                self._optimizer.use(asked.context, count)
        is_first = asked.context not in self._seen
        self._seen.add(asked.context)
        return (None, EXACT) if place is None or is_first else (place.tier, forms[place.form].codec)


@dataclass(frozen=True, slots=True)
class Codecs:
    """Bytes of a context by codec, the seconds to decode one, and qualities: those that the policy knows, and those by
    which all are scored.
    """

    nbytes: Mapping[str, int]
    decode_s: Mapping[str, float]
    known: Qualities
    scored: Qualities


def run(
    cache: Cache,
    asked: Sequence[Asked],
    classes: Sequence[str],
    codecs: Codecs,
    machine: Machine,
    alpha_s: float,
    warm: int,
) -> dict[str, Outcome]:
    """Carry all requests out; the first `warm` do not count. Outcomes by class, and of all under "all"."""
    free_s = [0.0, 0.0, 0.0]
    rates = (machine.dram_bytes_per_s, machine.disk_bytes_per_s)
    rows: list[tuple[str, float, float, int]] = []
    for number, each in enumerate(asked):
        tier, codec = cache.find(each)
        place = 2 if tier is None else tier
        took_s = machine.prefill_s if tier is None else codecs.nbytes[codec] / rates[tier]
        free_s[place] = max(free_s[place], each.at_s) + took_s
        ttft_s = free_s[place] - each.at_s + (codecs.decode_s[codec] if tier is not None else 0.0)
        if number >= warm:
            name = classes[each.context]
            quality = 1.0 if tier is None else codecs.scored[name][codec]
            rows.append((name, ttft_s, quality, place))
    found = {}
    for name in ("all", *sorted(set(classes))):
        mine = [row for row in rows if name in ("all", row[0])]
        if not mine:
            continue
        ttft = np.array([row[1] for row in mine])
        qualities = np.array([row[2] for row in mine])
        places = np.array([row[3] for row in mine])
        found[name] = Outcome(
            float(ttft.mean()), float(np.percentile(ttft, 90)), float(qualities.mean()), float((places == 0).mean()),
            float((places == 2).mean()), float((alpha_s * qualities - ttft).mean()),
        )  # fmt: skip
    return found


def forms_of(name: str, codecs: Codecs, qualities: Qualities) -> tuple[Form, ...]:
    """The forms of a context of a class, largest first."""
    found = [
        Form(codec, nbytes, qualities[name][codec], codecs.decode_s[codec]) for codec, nbytes in codecs.nbytes.items()
    ]
    return tuple(sorted(found, key=lambda form: -form.nbytes))


def ways(
    classes: Sequence[str], codecs: Codecs, machine: Machine, alpha_s: float, half_life_s: float, skew: float
) -> Iterator[tuple[str, Cache]]:
    """Every way by name: "prefill", each codec with LRU and with our policy, "ours", "oracle"."""
    whole = machine.context_bytes * len(classes)
    capacities = [round(machine.dram_fraction * whole), round(machine.disk_fraction * whole)]
    yield "prefill", FixedLru(None, EXACT, capacities)
    for codec, nbytes in codecs.nbytes.items():
        yield f"{codec} + LRU", FixedLru(nbytes, codec, capacities)
    tiers = [
        TierModel("dram", capacities[0], machine.dram_bytes_per_s),
        TierModel("disk", capacities[1], machine.disk_bytes_per_s),
    ]
    known = [forms_of(name, codecs, codecs.known) for name in classes]
    for codec in codecs.nbytes:
        single = [tuple(form for form in forms if form.codec == codec) for forms in known]
        yield f"{codec}{SAME_POLICY}", Chosen(single, machine, tiers, alpha_s, half_life_s)
    yield "ours", Chosen(known, machine, tiers, alpha_s, half_life_s)
    scored = [forms_of(name, codecs, codecs.scored) for name in classes]
    yield "oracle", Chosen(scored, machine, tiers, alpha_s, half_life_s, shares(len(classes), skew))


def greedy_over_bound(seed: int, entries: int) -> float:
    """How far the optimizer's placement of random entries comes towards the bound of the linear relaxation."""
    random = np.random.default_rng(seed)
    whole = 0
    made = []
    for key in range(entries):
        nbytes = int(random.integers(50, 150))
        whole += nbytes
        forms = tuple(Form(codec, max(1, int(nbytes * part)), quality) for codec, part, quality in RANDOM_FORMS)
        made.append(TieredEntry(key, float(random.pareto(1.2)) + 0.01, forms, recompute_s=3.0))
    tiers = [TierModel("dram", whole // 10, 2000.0), TierModel("disk", whole * 4 // 10, 100.0)]
    optimizer = Optimizer(tiers, 1.0)
    for entry in made:
        optimizer.put(entry)
    return optimizer.total_utility / upper_bound(made, tiers, 1.0)


def decision_us(entries: int, decisions: int, seed: int) -> list[float]:
    """Microseconds of each of ten runs of decisions, for one: uses and new contexts while `entries` are kept in a full
    memory.
    """
    random = np.random.default_rng(seed)
    nbytes = random.integers(50, 150, entries + decisions)
    forms = [
        tuple(Form(codec, max(1, int(size * part)), quality) for codec, part, quality in RANDOM_FORMS)
        for size in nbytes
    ]
    frequencies = random.pareto(1.2, entries + decisions) + 0.01
    optimizer = Optimizer([TierModel("dram", int(nbytes[:entries].sum() * 0.6), 2000.0)], 1.0)
    for key in range(entries):
        optimizer.put(TieredEntry(key, float(frequencies[key]), forms[key], 3.0))
    taken = []
    for part in np.array_split(np.arange(decisions), 10):
        began_s = time.perf_counter()
        for number in part.tolist():
            if number % 2:
                optimizer.use(int(random.integers(0, entries)), float(frequencies[number]))
            else:
                key = entries + number
                optimizer.put(TieredEntry(key, float(frequencies[key]), forms[key], 3.0))
        taken.append((time.perf_counter() - began_s) / len(part) * 1e6)
    return taken


RANDOM_FORMS = (("exact", 1.0, 1.0), ("a", 0.5, 0.995), ("b", 0.3, 0.97), ("c", 0.2, 0.8))
"""Codecs of random entries: the part of the bytes, and the quality."""
