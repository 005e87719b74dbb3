"""Write the figures into the documents: `python -m bench.figures [--check]`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.core.show import Json, Sections, as_markdown
from bench.experiments.aggregate.show import show as aggregate
from bench.experiments.engine.show import show as engine
from bench.experiments.ladder.show import show as ladder
from bench.experiments.s3.show import show as s3
from bench.experiments.scheduler.show import show as scheduler
from bench.experiments.tiers.show import show as tiers
from bench.experiments.ttft.show import show as ttft
from bench.experiments.upstream.show import show as upstream
from bench.figures import sections

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "figures.md")


def _of(show: Callable[[Json], Sections], section: str) -> Callable[[Json], str]:
    return lambda result: as_markdown(show(result)[section])


SECTIONS: Mapping[str, tuple[str, Callable[[Json], str]]] = {
    **{name: ("aggregate", _of(aggregate, name)) for name in ("transports", "peers", "limits", "first-layers")},
    "shared-link": ("scheduler-live", _of(scheduler, "shared-link")),
    "simulated": ("scheduler-simulated", _of(scheduler, "simulated")),
    "ttft": ("ttft", _of(ttft, "ttft")),
    "unscaled-page-cache": ("ttft-64k-page-cache", _of(ttft, "cells")),
    "unscaled-cold": ("ttft-64k-cold", _of(ttft, "cells")),
    "engine": ("engine", _of(engine, "engine")),
    "advised": ("engine-advised", _of(engine, "advised")),
    "stated": ("engine-stated", _of(engine, "stated")),
    "s3": ("s3", _of(s3, "s3")),
    "ladder": ("ladder", _of(ladder, "ladder")),
    "hit-rates": ("tiers", _of(tiers, "hit-rates")),
    "hit-rate-targets": ("tiers", _of(tiers, "targets")),
    **{f"cascade-{number}": ("tiers", _of(tiers, f"table-{number}")) for number in range(1, 7)},
    **{name: ("upstream", _of(upstream, name)) for name in ("upstream", "upstream-ratios", "upstream-targets")},
    "theta": ("calibrate", sections.theta),
    "crash": ("crash", sections.crash),
    "demo": ("demo", sections.demo),
}
WHOLE: Mapping[str, Callable[[Json], str]] = {"commits": sections.commits, "headline": sections.headline}
"""Sections of all results together."""
_PLACE = re.compile(r"(<!-- figures: (?P<name>[a-z0-9-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def load(folder: Path = RESULTS) -> dict[str, Json]:
    """Every published result by name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def render(document: str, results: Mapping[str, Json]) -> str:
    """The document with each place of figures filled. Raises KeyError for a section or a result that there is not."""

    def fill(found: re.Match[str]) -> str:
        name = found["name"]
        if name in WHOLE:
            text = WHOLE[name](results)
        else:
            result, section = SECTIONS[name]
            text = section(results[result])
        return f"{found[1]}{text}\n{found[3]}"

    return _PLACE.sub(fill, document)


def main() -> int:
    """0: written, or with --check nothing to write; 1: a document is not what the results say."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say which document differs")
    check = parser.parse_args().check
    results = load()
    stale = []
    for file in DOCUMENTS:
        text = file.read_text()
        wanted = render(text, results)
        if wanted != text:
            stale.append(file.name)
            if not check:
                file.write_text(wanted)
    if check and stale:
        print(f"not what docs/results says: {', '.join(stale)}; run `make figures`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
