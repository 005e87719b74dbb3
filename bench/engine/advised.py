"""Is `load: advised` as good as the better of loading all and computing all? Over links paced around the break-even.

The break-even is what the case's prefix may be loaded at in the time that computing it takes: measured first, on a way
that nobody paces. Then each link has a server of its own that paces to a factor of it, and three engines take turns.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.child import BaselineError
from bench.engine.cases import Case
from bench.engine.results import Cell, find, ratio
from bench.engine.run import measure_engines
from bench.engine.settings import EngineSettings
from bench.engine.ways import Way
from bench.samples import Spread

FACTORS = (4.0, 1.0, 0.25)
"""Well above the break-even, near it, and well below."""
LIMIT = 1.1
"""TTFT of advised over the better of the two."""
COMPARED = (Way.RECOMPUTE, Way.LAYERWISE, Way.ADVISED)


@dataclass(frozen=True, slots=True)
class Link:
    """What was seen over a link of so much. `problem` is the first wrong token, or why an engine did not run; None when
    all was right.
    """

    factor: float
    bytes_per_s: float
    cells: tuple[Cell, ...]
    problem: str | None = None

    def best(self, case: Case) -> Cell | None:
        """The better of loading all and computing all, by the medians."""
        both = [cell for way in (Way.RECOMPUTE, Way.LAYERWISE) if (cell := find(self.cells, case, way)) is not None]
        return min(both, key=lambda cell: cell.ttft_s.median, default=None)

    def advised_over_best(self, case: Case) -> Spread | None:
        """Ratios of TTFTs, round by round."""
        ours, best = find(self.cells, case, Way.ADVISED), self.best(case)
        return None if ours is None or best is None else ratio(ours, best)


@dataclass(frozen=True, slots=True)
class Advised:
    """All links, of one case."""

    case: Case
    break_even_bytes_per_s: float
    links: tuple[Link, ...]

    @property
    def problem(self) -> str | None:
        """The first wrong token of any link."""
        return next((link.problem for link in self.links if link.problem is not None), None)

    @property
    def is_met(self) -> bool:
        """Whether advised is within LIMIT of the better at every rate, by the medians of the rounds."""
        found = [link.advised_over_best(self.case) for link in self.links]
        return all(each is not None and each.median <= LIMIT for each in found)


def measure_advised(settings: EngineSettings, factors: Sequence[float] = FACTORS) -> Advised:
    """Of the settings' longest context with the highest hit rate. Raises BaselineError, BenchServerError, OSError."""
    case = max(settings.cases, key=lambda each: (each.hit_rate, each.context_tokens))
    one = replace(settings, contexts=(case.context_tokens,), hit_rates=(case.hit_rate,))
    break_even = _break_even(one, case)
    links = []
    for factor in factors:
        rate = factor * break_even
        with tempfile.TemporaryDirectory(prefix="objectcache-link-", dir=settings.folder) as folder:
            config = Path(folder) / "link.toml"
            config.write_text(f"[scheduler]\nlink_bytes_per_s = {rate}\nmargin_bytes_per_s = 0.0\n")
            options = (*settings.serve_options, "--config", str(config))
            found = measure_engines(replace(one, ways=COMPARED, serve_options=options))
        problem = found.problem or next((f"{way.title}: {why}" for way, why in found.missing.items()), None)
        links.append(Link(factor, rate, tuple(found.cells), problem))
    return Advised(case, break_even, tuple(links))


def _break_even(settings: EngineSettings, case: Case) -> float:
    """Bytes/s. Raises BaselineError where computing the prefix takes no time that could be measured."""
    found = measure_engines(replace(settings, ways=(Way.RECOMPUTE, Way.OWN_BLOCKS)))
    whole, rest = find(found.cells, case, Way.RECOMPUTE), find(found.cells, case, Way.OWN_BLOCKS)
    if whole is None or rest is None:
        raise BaselineError(f"the break-even was not measured: {found.problem or found.missing}")
    pairs = zip(whole.ttfts_s(), rest.ttfts_s(), strict=True)
    saved_s = statistics.median(one - other for one, other in pairs)
    if saved_s <= 0:
        raise BaselineError("computing the prefix takes no time")
    return case.prefix_tokens * settings.shape.token_bytes / saved_s


def advised_lines(found: Advised) -> list[str]:
    """For people."""
    lines = [
        f"{found.case.title} stored, over a link paced around the break-even of "
        f"{found.break_even_bytes_per_s / 1e6:.2f} MB/s",
        f"{'':12}{'recompute':>26}{'load all':>26}{'advised':>26}{'advised over the better':>28}",
    ]
    for link in found.links:
        cells = [find(link.cells, found.case, way) for way in COMPARED]
        texts = ["-" if cell is None else _words(cell.ttft_s) for cell in cells]
        over = link.advised_over_best(found.case)
        verdict = "" if over is None else f"{_words(over)} {'met' if over.median <= LIMIT else 'MISSED'}"
        lines.append(f"{link.factor:>8g} of it" + "".join(f"{text:>26}" for text in texts) + f"{verdict:>28}")
    return lines


def advised_json(found: Advised) -> dict[str, object]:
    """Raw samples included."""
    return {
        "case": found.case.title,
        "break_even_bytes_per_s": found.break_even_bytes_per_s,
        "limit": LIMIT,
        "is_met": found.is_met,
        "problem": found.problem,
        "links": [
            {
                "factor": link.factor,
                "link_bytes_per_s": link.bytes_per_s,
                "ttfts_s": {cell.way.value: cell.ttfts_s() for cell in link.cells},
                "loaded_tokens": {
                    cell.way.value: [answer.counters.get("loaded_tokens", 0.0) for answer in cell.answers]
                    for cell in link.cells
                },
                "late_loads": sum(
                    answer.counters.get("late_loads", 0.0)
                    for cell in link.cells
                    if cell.way is Way.ADVISED
                    for answer in cell.answers
                ),
                "advised_over_best": _spread_json(link.advised_over_best(found.case)),
                "best": None if (best := link.best(found.case)) is None else best.way.value,
            }
            for link in found.links
        ],
    }


def _spread_json(found: Spread | None) -> dict[str, float] | None:
    return None if found is None else {"median": found.median, "min": found.min, "max": found.max}


def _words(values: Spread) -> str:
    return f"{values.median:.2f} ({values.min:.2f} to {values.max:.2f})"
