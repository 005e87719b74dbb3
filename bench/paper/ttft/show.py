"""Sections and charts of a result of `bench ttft`, played or on a device. Pure but for the charts' files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.core.plots import Chart, Kind, draw
from bench.core.show import (
    NOT_MEASURED,
    Block,
    Column,
    Json,
    Section,
    Table,
    crossed,
    ms,
    over_one,
    significant,
    table,
)
from bench.paper.ttft.results import beyond_bound_s, case_of
from descriptors.units import gbps_from_bytes_per_s
from objectcache.calibration.knee import Sample, falling_curve

TITLES = {
    "opt_local_lw": "opt-local-LW (copied from local memory in the order of layers)",
    "local_dram_cw": "Local-DRAM-CW (copied from local memory, whole chunks)",
    "local_dram_lw": "Local-DRAM-LW (copied from local memory, layer by layer)",
    "s3_agg_lw": "S3Agg-LW (one request, layer by layer)",
    "s3_batch_cw": "S3Batch-CW (whole chunks)",
}
"""The paper's names, and what they mean."""
SUMMARY_HIT_RATES = (0.5, 0.875)
SUMMARY_CHUNK_TOKENS = 64


def show(result: Json) -> dict[str, Section]:
    """Every cell, what the device does without loading, rates, the figures in short, and targets."""
    said = [f"device: {result['device']}"] if "device" in result else []
    return {
        "notes": [*said, *(f"* {note}" for note in result["notes"])],
        "cells": list(_cells(result)),
        "baselines": _baselines(result) if "baselines" in result else (),
        "rates": [block for sweep in result["figures"].get("15", ()) for block in _sweep(sweep)],
        "ttft": (_summary(result), _targets(result["targets"])),
    }


def _cells(result: Json) -> Iterator[Table]:
    """A table for each case and link: Figure 13 is over opt-local-LW, Figure 14 over the same at the full link."""
    full_link, figures = result["settings"]["link_bytes_per_s"], result["figures"]
    for case, link in dict.fromkeys((case_of(cell), cell["link_bytes_per_s"]) for cell in result["cells"]):
        number, baseline = ("13", "opt-local-LW") if link == full_link else ("14", "the full link")
        over = {row["system"]: row for row in figures.get(number, ()) if case_of(row) == case}
        here = [cell for cell in result["cells"] if (case_of(cell), cell["link_bytes_per_s"]) == (case, link)]
        yield table(
            [{**cell, "over": over.get(cell["system"])} for cell in here],
            Column(f"{_case(here[0])} stored, G={case[2]}, link {_link(link)}", lambda cell: TITLES[cell["system"]]),
            "TTFT, ms = ttft_s:ms",
            Column(f"over {baseline}", "over.ratio", over_one),
            "added, ms = over.added_ms",
            Column(f"beyond Eq. 3 ({ms(here[0]['bound_s'])} ms)", beyond_bound_s, ms),
            "samples = sample_count",
        )


def _baselines(result: Json) -> list[str]:
    """TTFT of computing everything and with the prefix on the device already; and whether logits tell wrong values."""
    logits = result["logits"]
    found = []
    for each in result["baselines"]:
        resident = ", ".join(f"{float(hit_rate):.1%} {ms(found_s)}" for hit_rate, found_s in each["resident_s"].items())
        blind = "" if each["shows_wrong_values"] else ": too little to tell by them"
        found.append(
            f"{each['context']}: recompute {' and '.join(map(ms, each['recompute_s']))} ms; resident {resident} ms; "
            f"wrong values in every cached token change the logits by {each['blind_error']:.2g}{blind}"
        )
    if logits["error_max"] is not None:
        said = "right" if logits["ok"] else "WRONG"
        found.append(f"logits {said}: off by {logits['error_max']:.2g} at most, {logits['limit']:g} allowed")
    return found


def _sweep(sweep: Json) -> Iterator[Block]:
    star, knee = sweep["zero_stall_bytes_per_s"], sweep["knee"]
    target = _link(star + sweep["paper_margin_bytes_per_s"])
    yield f"Figure 15: {_case(sweep)}, G={sweep['chunk_tokens']}: r* is {_link(star)}, with the paper's margin {target}"
    if knee is not None:
        low, high = _link(knee["low_bytes_per_s"]), _link(knee["high_bytes_per_s"])
        margin = _link(sweep["margin_bytes_per_s"])
        yield f"knee {_link(knee['rate_bytes_per_s'])} ({low} to {high}, {knee['side']}), margin {margin}"
    curve, best_s = _curve(sweep)
    rate = Column("link", lambda each: _link(each.rate_bytes_per_s))
    yield table(curve, rate, Column("TTFT over the best rate's", lambda each: over_one(each.ttft_s / best_s)))


def _summary(result: Json) -> Table:
    """Over a payload that lies in the client's memory in order of layers."""
    rows = [
        {**row, "title": f"{TITLES[system]}{suffix}"}
        for figure, suffix in (("13", ""), ("14", ", link capped"))
        for system in ("s3_agg_lw", "s3_batch_cw")
        for row in result["figures"].get(figure, ())
        if (row["system"], row["chunk_tokens"]) == (system, SUMMARY_CHUNK_TOKENS)
        and row["hit_rate"] in SUMMARY_HIT_RATES
    ]
    head = f"TTFT over opt-local-LW, G={SUMMARY_CHUNK_TOKENS}"
    return crossed(rows, head, lambda row: row["title"], _case, lambda row: over_one(row["ratio"]["median"]))


def _targets(targets: Iterable[Json]) -> Table:
    return table(
        targets,
        "target = what | at most = limit:significant",
        Column("seen", lambda target: NOT_MEASURED if target["value"] is None else significant(target["value"])),
        "= is_met:verdict",
    )


def plot(result: Json, folder: Path) -> None:
    """Figures 13 to 15, each in a file of the folder where it was measured."""
    figures = result["figures"]
    for number, over in (("13", "opt-local-LW"), ("14", "the full link's")):
        rows = figures.get(number, ())
        count = min((row["sample_count"] for row in rows), default=0)
        title = f"Figure {number} ({count} samples, medians of ratios within a round, least and greatest)"
        draw(replace(CHART, value_title=f"TTFT over {over}, %"), rows, title, folder / f"figure-{number}.png")
    rows = [row for sweep in figures.get("15", ()) for row in _rates(sweep)]
    draw(RATES, rows, "Figure 15: S3Agg-LW under throttled rates", folder / "figure-15.png")


def _rates(sweep: Json) -> Iterator[Json]:
    """TTFT over its best at each rate over r*, and as points the paper's target and the knee."""
    curve, best_s = _curve(sweep)
    star, knee = sweep["zero_stall_bytes_per_s"], sweep["knee"]
    for each in curve:
        at = [found["ttft_s"] for found in sweep["samples"] if found["rate_bytes_per_s"] == each.rate_bytes_per_s]
        at.append(each.ttft_s)  # a level of the curve may lie outside of its own rate's samples
        over = {"median": each.ttft_s / best_s, "min": min(at) / best_s, "max": max(at) / best_s}
        yield {**sweep, "of": "S3Agg-LW", "rate": each.rate_bytes_per_s / star, "over": over}
    yield {**sweep, "of": "r* + 5 Gbps", "rate": (star + sweep["paper_margin_bytes_per_s"]) / star, "over": 1.0}
    if knee is not None:
        yield {**sweep, "of": "knee", "rate": knee["rate_bytes_per_s"] / star, "over": 1.0}


def _curve(sweep: Json) -> tuple[list[Sample], float]:
    curve = falling_curve([Sample(**each) for each in sweep["samples"]])
    return curve, min(each.ttft_s for each in curve)


def _case(row: Any) -> str:
    return f"{row['context']}, {row['hit_rate']:.1%}"


def _link(bytes_per_s: float | None) -> str:
    return "not limited" if bytes_per_s is None else f"{gbps_from_bytes_per_s(bytes_per_s):.1f} Gbps"


CHART = Chart(
    Kind.BARS,
    lambda row: f"G={row['chunk_tokens']}",
    "ratio",
    "",
    lambda row: TITLES[row["system"]].split()[0],
    row="context",
    column=lambda row: f"{row['hit_rate']:.1%}",
    scale=100,
    offset=1.0,
)
RATES = Chart(
    Kind.LINES,
    lambda row: round(row["rate"], 2),
    "over",
    "TTFT over the best rate's, %",
    "of",
    column=lambda row: f"{_case(row)}, G={row['chunk_tokens']}",
    across_title="rate over r*",
    scale=100,
    offset=1.0,
)
