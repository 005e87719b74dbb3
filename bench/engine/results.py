"""From answers to what is shown: TTFTs, ratios within a round, targets, and what makes a run worth nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.engine.cases import Case
from bench.engine.ways import COMPUTING, OURS, Way
from bench.engine.work import Answer
from bench.samples import Spread, spread

TARGET_HIT_RATE = 0.875
RECOMPUTE_TARGET = 4.0
PEER_TARGET = 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A way's answers in one case, one for each round."""

    case: Case
    way: Way
    answers: tuple[Answer, ...]

    def ttfts_s(self) -> list[float]:
        """Of each round."""
        return [answer.ttft_s for answer in self.answers]

    @property
    def ttft_s(self) -> Spread:
        """Raises ValueError without a round."""
        return spread(self.ttfts_s())

    def counted(self, name: str) -> Spread:
        """One of our connector's counters; of others 0."""
        return spread([answer.counters.get(name, 0.0) for answer in self.answers])


@dataclass(frozen=True, slots=True)
class Loading:
    """What a way adds to the same request with its prefix in the engine's own blocks: seconds by round, and the bytes
    over their median. `rate_bytes_per_s` is None where nothing was added.
    """

    added_s: Spread
    nbytes: int
    rate_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio of TTFTs from the issue of this project, in the case where it is worst: theirs over the best of ours,
    median of the rounds' ratios. None with the `reason` where one side was not measured.
    """

    what: str
    limit: float
    value: Spread | None = None
    case: Case | None = None
    ours: Way | None = None
    reason: str | None = None

    @property
    def is_least(self) -> bool:
        """Whether the limit itself is enough; of peers we must be faster."""
        return self.limit != PEER_TARGET

    @property
    def is_met(self) -> bool | None:
        """None where it was not measured."""
        if self.value is None:
            return None
        return self.value.median >= self.limit if self.is_least else self.value.median > self.limit


def find(cells: Sequence[Cell], case: Case, way: Way) -> Cell | None:
    """That one, if it was measured."""
    return next((cell for cell in cells if (cell.case, cell.way) == (case, way) and cell.answers), None)


def ratio(over: Cell, under: Cell) -> Spread:
    """TTFT over TTFT, round by round. Raises ValueError where they have not the same rounds."""
    pairs = zip(over.ttfts_s(), under.ttfts_s(), strict=True)
    return spread([theirs / ours for theirs, ours in pairs])


def loading(cell: Cell, own_blocks: Cell, token_bytes: int) -> Loading:
    """Raises ValueError where they have not the same rounds."""
    pairs = zip(cell.ttfts_s(), own_blocks.ttfts_s(), strict=True)
    added_s = spread([with_load - without for with_load, without in pairs])
    nbytes = cell.answers[0].cached_tokens * token_bytes
    return Loading(added_s, nbytes, nbytes / added_s.median if added_s.median > 0 else None)


def best_of_ours(cells: Sequence[Cell], case: Case) -> Cell | None:
    """The one with the lower median."""
    found = [cell for way in OURS if (cell := find(cells, case, way)) is not None]
    return min(found, key=lambda cell: cell.ttft_s.median, default=None)


def targets(cells: Sequence[Cell], missing: Mapping[Way, str]) -> list[Target]:
    """The issue's three, that of the ExampleConnector both as it comes and for what it can do when told more."""
    wanted = [
        ("recompute over ObjectCache", Way.RECOMPUTE, RECOMPUTE_TARGET),
        ("ExampleConnector over ObjectCache", Way.EXAMPLE, PEER_TARGET),
        ("ExampleConnector, told the prefixes, over ObjectCache", Way.EXAMPLE_TOLD, PEER_TARGET),
        ("LMCache with S3 over ObjectCache", Way.LMCACHE_S3, PEER_TARGET),
    ]
    return [_target(what, limit, way, cells, missing) for what, way, limit in wanted]


def _target(what: str, limit: float, way: Way, cells: Sequence[Cell], missing: Mapping[Way, str]) -> Target:
    compared = []
    for case in dict.fromkeys(cell.case for cell in cells if cell.case.hit_rate == TARGET_HIT_RATE):
        theirs, ours = find(cells, case, way), best_of_ours(cells, case)
        if theirs is not None and ours is not None:
            compared.append((ratio(theirs, ours), case, ours.way))
    if not compared:
        return Target(what, limit, reason=missing.get(way, "not measured"))
    value, case, our_way = min(compared, key=lambda each: each[0].median)
    return Target(what, limit, value, case, our_way)


def wrong(way: Way, case: Case, answer: Answer, wanted: Sequence[int], grain_tokens: int) -> str | None:
    """What is wrong with an answer: other tokens than recomputing gives, or not the load that it is to measure."""
    if list(answer.tokens) != list(wanted):
        return f"{way.title}, {case.title}: tokens {list(answer.tokens)}, recomputed {list(wanted)}"
    stored = 0 if way in COMPUTING else case.prefix_tokens // grain_tokens * grain_tokens
    if way is Way.ADVISED:  # how much it loads is its own choice
        stored = min(stored, answer.cached_tokens)
    if answer.cached_tokens != stored:
        return f"{way.title}, {case.title}: {answer.cached_tokens} tokens were not computed, {stored} expected"
    if way in OURS:
        loaded, failures = answer.counters.get("loaded_tokens", 0), answer.counters.get("load_failures", 0)
        if loaded != stored or failures:
            return f"{way.title}, {case.title}: {loaded:.0f} of {stored} tokens loaded, {failures:.0f} failures"
    return None


def insensitive(outputs: Mapping[Case, Sequence[Sequence[int]]]) -> str | None:
    """The first case whose rounds, of the same suffix after other prefixes, all end in the same tokens: there wrong KV
    would go unnoticed.
    """
    for case, tokens in outputs.items():
        if len(tokens) > 1 and len({tuple(each) for each in tokens}) == 1:
            return f"{case.title}: the same tokens after every prefix: a comparison of tokens shows nothing"
    return None
