"""Write the figures into the documents: `python -m bench.figures [--check]`.

A test holds documents and results to it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.core.show import (
    NOT_MEASURED,
    Column,
    Json,
    Sections,
    Table,
    as_markdown,
    crossed,
    ms,
    percent,
    table,
    verdict,
    written,
)
from bench.experiments.aggregate.ratios import GOAL, ratio_of
from bench.experiments.aggregate.ratios import show as aggregate
from bench.experiments.concurrency import show as concurrency
from bench.experiments.engine.run import ours_of
from bench.experiments.engine.run import show as engine
from bench.experiments.growth import show as growth
from bench.experiments.lmcache import show as lmcache
from bench.experiments.s3.results import show as s3
from bench.experiments.upstream import show as upstream
from bench.paper.cluster.run import show as cluster
from bench.paper.compression.replacing import show as replacing
from bench.paper.compression.run import show as compression
from bench.paper.device.copies import show as copies
from bench.paper.device.recompute import show as recompute
from bench.paper.ladder.run import show as ladder
from bench.paper.orchestrator.run import show as orchestrator
from bench.paper.overlap.run import show as overlap
from bench.paper.scheduler.cells import show as scheduler
from bench.paper.tiers.show import show as tiers
from bench.paper.ttft.show import show as ttft
from descriptors.units import MIB


def theta(found: Json) -> str:
    """The threshold between the two orders."""
    one = found["theta"]
    text = (
        f"Θ is {one['theta_bytes'] / 2**20:.0f} MiB here, {one['low_bytes'] / 2**20:.0f} to "
        f"{one['high_bytes'] / 2**20:.0f} in {one['confidence']:.0%} of resampled rounds."
    )
    changes = (
        Column("TTFT, mean of all cases", "mean_change", percent),
        Column("worst case", "worst_change", percent),
    )
    return as_markdown([text, table(found["sensitivity"], "with = name", *changes)])


def crash(found: Json) -> str:
    """What the harness did."""
    return (
        f"{found['rounds']} rounds in {found['seconds']:.0f} s (seed {found['seed']}): {found['kills']} kills, "
        f"{found['kills_while_starting']} of them while the server started; {found['acknowledged']:,} changes were "
        f"acknowledged, {found['in_doubt']:,} in doubt"
        + (f", {found['compactions']:,} compactions" if "compactions" in found else "")
        + (f" and {found['deduplications']:,} deduplications" if "deduplications" in found else "")
        + (" ran meanwhile. " if "compactions" in found else ". ")
        + ("Everything acknowledged was there." if found["failure"] is None else f"**Failed**: {found['failure']}")
    )


def cluster_faults(found: Json) -> str:
    """The client's view of each fault, and how long until everything was well after it."""
    cells = crossed(
        found["cells"],
        "",
        lambda cell: f"{cell['moment']}; {cell['role']}",
        lambda cell: cell["fault"],
        lambda cell: f"{cell['outcome']} ({cell['seconds']:.1f} s, well {cell['well_again_s']:.1f} s after)",
    )
    failed = [] if found["failure"] is None else [f"**Failed**: {found['failure']}"]
    return as_markdown([cells, *failed])


def demo(found: Json) -> str:
    """TTFT of the question."""
    ttfts = found["ttft"]
    return (
        f"A question of {found['question_tokens']} tokens after {found['document_tokens']:,} cached ones, over "
        f"`{found['transport']}`: TTFT {ms(ttfts['layer_major']['median_s'])} ms layer-major, "
        f"{ms(ttfts['chunk_major']['median_s'])} ms chunk-major (medians of {ttfts['layer_major']['count']}), "
        f"{ms(ttfts['recompute']['median_s'])} ms recomputed (median of {ttfts['recompute']['count']}); Eq. 3 predicts "
        f"{ms(found['eq3_ttft_s'])} ms."
    )


def demo_answers(found: Json) -> str:
    """The two answers that a person sees, and the time until each began."""
    ttfts = found["ttft"]
    computed_s, loaded_s = ttfts["recompute"]["median_s"], ttfts["layer_major"]["median_s"]
    rows = [("computed", f"{computed_s:.2f} s", found["computed"]), ("loaded", f"{loaded_s:.2f} s", found["loaded"])]
    table = ["| *" + found["question"] + "* | first token after | answer |", "|---|---|---|"]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(table) + (
        f"\n\n{found['model']} after {found['document_tokens']:,} cached tokens, whose KV is "
        f"{found['delivered_bytes'] / MIB:.0f} MiB, over `{found['transport']}`; transformers computes on the CPU "
        f"(medians of {ttfts['recompute']['count']} and {ttfts['layer_major']['count']})."
    )


HEADLINE_RATIOS = {
    "http_over_raw_socket": "One request for 512 chunks, from DRAM: our `http` over a raw socket",
    "shm_over_memcpy": "the same: our `shm` over memcpy by one thread",
    "http_over_mooncake_tcp_layerwise": "Mooncake Store layer by layer, TCP against TCP: our rate over its rate",
}
HEADLINE_ENGINES = {
    "recompute over ObjectCache": "vLLM, 87.5 % stored: TTFT of recomputing over ours",
    "ExampleConnector, told the prefixes, over ObjectCache": "the same: TTFT of vLLM's ExampleConnector, given a list "
    "of the stored prefixes, over ours",
}


def headline(results: Json) -> str:
    """The figures of README: like against like, with what is missed among them."""
    rows = []
    for name, title in HEADLINE_RATIOS.items():
        ratio = ratio_of(results["aggregate"], name)
        rows.append((title, ratio.get("reason") or written(ratio), GOAL.of(ratio)))
    firsts = [found for key, found in results["aggregate"]["first_layers"].items() if key.startswith("dram/")]
    shares = [found["limit_s"] / found["median_s"] for found in firsts]
    title = "First layer from DRAM: 5 ms and a layer at the raw rate, over its time; worst of all transports"
    rows.append((title, written(min(shares)), f"1: {verdict(all(found['is_met'] for found in firsts))}"))
    for target in results["engine"]["targets"]:
        if target["what"] in HEADLINE_ENGINES:
            ours = "" if target["ours"] is None else f", {ours_of(target)}"
            title = f"{HEADLINE_ENGINES[target['what']]}; worst at {target['case']}{ours}"
            rows.append((title, written(target["value"]) or NOT_MEASURED, _goal(target["limit"], target)))
    used = {machine(results[name]): None for name in ("aggregate", "engine")}
    return as_markdown([Table(("", "seen", "at least"), rows), f"({'; '.join(used)}.)"])


def _goal(limit: float, target: Json) -> str:
    return f"{limit:g}: {verdict(target['is_met'])}"


def commits(found: Json) -> str:
    """Which commit and machine each result is of; results of several are not to be compared with each other."""
    rows = found.items()
    named = [
        Column("result", lambda row: f"[{row[0]}](../results/{row[0]}.json)"),
        Column("commit", lambda row: _short(row[1].get("commit"))),
        Column("tree", lambda row: _short(row[1].get("tree"))),
        Column("machine", lambda row: machine(row[1])),
    ]
    return table(rows, *named).markdown()


def machine(result: Json) -> str:
    """The machine that a result is of."""
    known = result["machine"]
    gpu = f", a GPU with CUDA {known['cuda']}" if known.get("cuda") else ""
    return f"{known['cpu_model'].replace('(R)', '')}, {known['cpu_count']} cores{gpu}"


def _short(name: str | None) -> str:
    return f"`{name[:7]}`" if name else ""


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/design/figures.md",
        "docs/design/compression.md",
        "docs/design/compression-paper.md",
        "docs/design/overlap.md",
    )
)
OVERLAP = ("motivation", "throughput", "shares", "figure-a4", "figure-a5", "figure-a6", "figure-a7")


def _of(show: Callable[[Json], Sections], section: str) -> Callable[[Json], str]:
    return lambda result: as_markdown(show(result)[section])


SECTIONS: Mapping[str, tuple[str, Callable[[Json], str]]] = {
    **{name: ("aggregate", _of(aggregate, name)) for name in ("transports", "peers", "limits", "first-layers")},
    "limits-ucx": ("aggregate-ucx", _of(aggregate, "measured-limits")),
    "shared-link": ("scheduler-live", _of(scheduler, "shared-link")),
    "simulated": ("scheduler-simulated", _of(scheduler, "simulated")),
    "ttft": ("ttft", _of(ttft, "ttft")),
    "unscaled-page-cache": ("ttft-64k-page-cache", _of(ttft, "cells")),
    "ttft-gpu": ("ttft-gpu", _of(ttft, "cells")),
    "ttft-gpu-target": ("ttft-gpu", _of(ttft, "ttft")),
    "copies-gpu": ("copies-gpu", _of(copies, "copies")),
    "recompute-gpu": ("recompute-gpu", _of(recompute, "boundaries")),
    "table-a6": ("recompute-gpu", _of(recompute, "table-a6")),
    "unscaled-cold": ("ttft-64k-cold", _of(ttft, "cells")),
    "engine": ("engine", _of(engine, "engine")),
    "advised": ("engine-advised", _of(engine, "advised")),
    "tier": ("engine-tier", _of(engine, "tier")),
    "beside": ("engine-beside", _of(engine, "beside")),
    "lmcache": ("lmcache", _of(lmcache, "lmcache")),
    "stated": ("engine-stated", _of(engine, "stated")),
    "s3": ("s3", _of(s3, "s3")),
    "ladder": ("ladder", _of(ladder, "ladder")),
    "hit-rates": ("tiers", _of(tiers, "hit-rates")),
    "hit-rate-targets": ("tiers", _of(tiers, "targets")),
    **{f"cascade-{number}": ("tiers", _of(tiers, f"table-{number}")) for number in (1, 2, 3, 4, 6)},
    "cascade-5": ("tiers-ablation", _of(tiers, "table-5")),
    **{name: ("upstream", _of(upstream, name)) for name in ("upstream", "upstream-ratios", "upstream-targets")},
    **{
        f"orchestrator-{name}": ("orchestrator", _of(orchestrator, name))
        for name in ("simulated", "shared-simulated", "cost", "model", "targets")
    },
    **{
        f"cluster-{name}": ("cluster", _of(cluster, section))
        for name, section in (
            ("rates", "cluster"),
            ("figure-3", "figure-3"),
            ("downlinks", "downlinks"),
            ("table-7", "table-7"),
            ("targets", "targets"),
        )
    },
    **{
        f"compression-{name}": (result, _of(compression, section))
        for name, result, section in (
            ("codecs", "compression", "codecs"),
            ("wire", "compression", "wire"),
            ("device", "compression-gpu", "device"),
            ("engine", "compression-engine", "engine"),
            ("targets", "compression", "targets"),
            ("quality", "compression-quality", "quality"),
            ("choice", "compression-quality", "choice"),
            ("choice-targets", "compression-quality", "targets"),
            ("histories", "compression-quality", "histories"),
            ("real", "compression-real", "real"),
            ("chains", "compression-real", "chains"),
            ("ranges", "compression-real", "ranges"),
            ("live", "compression-live", "live"),
            ("live-targets", "compression-live", "targets"),
        )
    },
    **{
        f"orchestrator-{name}": ("orchestrator-live", _of(orchestrator, section))
        for name, section in (("live", "live"), ("serving", "serving"), ("live-targets", "targets"))
    },
    "orchestrator-shared": ("orchestrator-shared", _of(orchestrator, "shared")),
    "concurrency": ("concurrency", _of(concurrency, "levels")),
    "growth": ("growth", _of(growth, "growth")),
    "replacing": ("replacing", _of(replacing, "replayed")),
    **{f"overlap-{name}": ("overlap", _of(overlap, name)) for name in OVERLAP},
    "theta": ("calibrate", theta),
    "crash": ("crash", crash),
    "cluster-faults": ("cluster-faults", cluster_faults),
    "demo": ("demo", demo),
    "demo-answers": ("demo", demo_answers),
}
WHOLE: Mapping[str, Callable[[Json], str]] = {"commits": commits, "headline": headline}
"""Sections of all results together."""
_PLACE = re.compile(r"(<!-- figures: (?P<name>[a-z0-9-]+) -->)\s.*?(<!-- /figures -->)", re.DOTALL)


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
            found_on = machine(results[result])
            text = f"{section(results[result])}\n\n({found_on}; commit {_short(results[result].get('commit'))}.)"
        return f"{found[1]}\n{text}\n{found[3]}"

    return _PLACE.sub(fill, document)


def main(arguments: Sequence[str]) -> int:
    """0: written, or with --check nothing to write; 1: a document is not what the results say."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say which document differs")
    check = parser.parse_args(arguments).check
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
    sys.exit(main(sys.argv[1:]))
