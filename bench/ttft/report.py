"""What was measured, for people and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.paper import MARGIN_BYTES_PER_S
from bench.samples import State, spread
from bench.ttft.cases import BOUNDARY_CHUNK_TOKENS, Case, Scale, System
from bench.ttft.knee import CONFIDENCE, TOLERANCE, falling_curve
from bench.ttft.play import Waits
from bench.ttft.results import Cell, Overhead, Sweep, Target, increases, over_bound, overheads, targets
from bench.ttft.run import Ttft, TtftSettings
from descriptors.units import gbps_from_bytes_per_s

SHORT_CONTEXT = "4K"
_PER_CASE = "context   hit %    G"


PLACES = {
    State.DRAM: "in the server's DRAM tier",
    State.PAGE_CACHE: "in the page cache",
    State.COLD: "on disk, their files dropped from the page cache before each request",
}


def notes(settings: TtftSettings) -> list[str]:
    """What a reader must know."""
    scale = settings.bed.scale
    said = [
        f"bytes and link scaled by {scale.link:g} (S shrinks, N stays), windows by {scale.time:g}"
        + (" and bytes by that too" if scale.time != 1 else ""),
        "compute is played: windows of Table A8; at 12.5 %, which it does not have, TTFT of Table A1 (A100, "
        f"G={BOUNDARY_CHUNK_TOKENS}) stands for the compute",
        "every window is waited for"
        if settings.bed.waits is Waits.ALL
        else "windows are waited for until all layers are there; those left then are added, not waited for",
        "the device is a host buffer: what opt-local-LW copies a layer into, and what the server writes into over "
        f"{settings.bed.transport.value}; local copies run at this machine's memory speed, not scaled, in their favour",
        "local chunks lie one after the other, so Local-DRAM-CW is one copy",
        f"chunks are {PLACES[settings.bed.state]}; ratios are medians of those within a round, extremes in brackets",
    ]
    if settings.link_bytes_per_s is None:
        said.append("the link is not limited: what is measured is what this machine moves, not how it is paced")
    return said


def tables(settings: TtftSettings, found: Ttft) -> str:
    """Everything that was measured, a paragraph for each figure."""
    lines = [f"* {note}" for note in notes(settings)]
    if any(cell.system is System.OPT_LOCAL_LW for cell in found.cells):
        lines += ["", "Figure 13: TTFT over opt-local-LW, in %", *_overhead_lines(settings, found.cells)]
        lines += ["", "S3Agg-LW: ms over opt-local-LW, ms beyond the transfer-time bound (Eq. 3 at the played link)"]
        lines += _agg_lines(settings, found.cells)
    capped = _capped(settings, found)
    if capped:
        lines += ["", f"Figure 14: TTFT at {_gbps(settings.cap_bytes_per_s)} over the same at the full link, in %"]
        lines += _columns((System.S3_BATCH_CW, System.S3_AGG_LW), capped)
    for sweep in found.sweeps:
        lines += ["", *_sweep_lines(sweep)]
    lines += ["", *(_target_line(target) for target in _targets(settings, found))]
    lines.append("every byte verified" if found.problem is None else f"WRONG BYTES: {found.problem}")
    return "\n".join(lines)


def to_json(settings: TtftSettings, found: Ttft, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values, raw samples included."""
    return {
        "bench": "ttft",
        "verified": found.problem is None,
        "problem": found.problem,
        **origin,
        "settings": _settings_json(settings),
        "notes": notes(settings),
        "targets": [{**asdict(target), "is_met": target.is_met} for target in _targets(settings, found)],
        "overhead": _nested(
            (cell.case, _overhead_json(over))
            for cell, over in overheads(found.cells, settings.link_bytes_per_s)
            if cell.system is System.S3_AGG_LW
        ),
        "transfer_bound": _nested(
            (cell.case, _bound_json(cell, settings.bed.scale))
            for cell in _agg_cells(settings, found.cells)
            if cell.case.context == SHORT_CONTEXT
        ),
        "figures": {
            "13": [_cell_over_json(*each) for each in overheads(found.cells, settings.link_bytes_per_s)],
            "14": [_cell_over_json(*each) for each in _capped(settings, found)],
            "15": [_sweep_json(sweep) for sweep in found.sweeps],
        },
        "cells": [_cell_json(cell, settings.bed.scale) for cell in found.cells],
    }


def _settings_json(settings: TtftSettings) -> dict[str, Any]:
    bed = settings.bed
    return {
        **asdict(settings),
        "figures": [figure.value for figure in settings.figures],
        "bed": {
            **asdict(bed),
            "transport": bed.transport.value,
            "state": bed.state.value,
            "waits": bed.waits.value,
            "folder": None if bed.folder is None else str(bed.folder),
        },
    }


def _nested(found: Iterable[tuple[Case, dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By context, hit rate in percent and chunk size, all as text."""
    nested: dict[str, dict[str, dict[str, Any]]] = {}
    for case, value in found:
        nested.setdefault(case.context, {}).setdefault(case.hit, {})[str(case.chunk_tokens)] = value
    return nested


def _overhead_json(over: Overhead) -> dict[str, Any]:
    added = asdict(over.added_s)
    return {
        "ratio": asdict(over.ratio),
        "added_ms": {name: value * 1e3 for name, value in added.items()},
        "sample_count": over.sample_count,
    }


def _bound_json(cell: Cell, scale: Scale) -> dict[str, Any]:
    beyond = asdict(over_bound(cell, scale))
    return {
        "bound_ms": _bound_s(cell, scale) * 1e3,
        "over_bound_ms": {name: value * 1e3 for name, value in beyond.items()},
        "sample_count": len(cell.runs),
    }


def _bound_s(cell: Cell, scale: Scale) -> float:
    link = cell.link_bytes_per_s
    return cell.case.bound_s(scale, None if link is None else scale.link_bytes_per_s(link))


def _labels(case: Case) -> dict[str, Any]:
    return {"context": case.context, "hit_rate": case.hit_rate, "chunk_tokens": case.chunk_tokens}


def _cell_over_json(cell: Cell, over: Overhead) -> dict[str, Any]:
    return {**_labels(cell.case), "system": cell.system.value, **_overhead_json(over)}


def _cell_json(cell: Cell, scale: Scale) -> dict[str, Any]:
    layout = cell.case.layout(scale)
    nbytes = layout.payload_bytes(cell.case.chunk_count)
    return {
        **_labels(cell.case),
        "system": cell.system.value,
        "link_bytes_per_s": cell.link_bytes_per_s,
        "chunk_count": cell.case.chunk_count,
        "per_layer_chunk_bytes": layout.per_layer_chunk_bytes,
        "payload_bytes": nbytes,
        "layer_compute_s": cell.case.layer_compute_s(scale),
        "sample_count": len(cell.runs),
        "ttft_s": asdict(spread(cell.ttfts_s())),
        "loaded_bytes_per_s": asdict(spread([nbytes / seconds for seconds in cell.loads_s()])),
        "bound_s": _bound_s(cell, scale),
        "samples_s": cell.ttfts_s(),
        "first_layers_s": [run.ready_s[0] for run in cell.runs],
        "loads_s": cell.loads_s(),
    }


def _sweep_json(sweep: Sweep) -> dict[str, Any]:
    star = sweep.case.zero_stall_bytes_per_s
    knee = sweep.knee
    return {
        **_labels(sweep.case),
        "zero_stall_bytes_per_s": star,
        "paper_margin_bytes_per_s": MARGIN_BYTES_PER_S,
        "knee": None if knee is None else {**asdict(knee), "side": knee.side.value},
        "margin_bytes_per_s": None if knee is None else knee.margin_bytes_per_s(star),
        "tolerance": TOLERANCE,
        "confidence": CONFIDENCE,
        "samples": [asdict(sample) for sample in sweep.samples],
    }


def _targets(settings: TtftSettings, found: Ttft) -> list[Target]:
    return targets(found.cells, settings.link_bytes_per_s, settings.bed.scale)


def _capped(settings: TtftSettings, found: Ttft) -> list[tuple[Cell, Overhead]]:
    return increases(found.cells, settings.link_bytes_per_s, settings.cap_bytes_per_s)


def _agg_cells(settings: TtftSettings, cells: Sequence[Cell]) -> list[Cell]:
    link = settings.link_bytes_per_s
    return [cell for cell in cells if cell.system is System.S3_AGG_LW and cell.link_bytes_per_s == link]


def _overhead_lines(settings: TtftSettings, cells: Sequence[Cell]) -> list[str]:
    systems = tuple(system for system in System if system is not System.OPT_LOCAL_LW)
    return _columns(systems, overheads(cells, settings.link_bytes_per_s))


def _columns(systems: Sequence[System], found: Sequence[tuple[Cell, Overhead]]) -> list[str]:
    """A line for each workload, a column for each system."""
    by_place = {(cell.case, cell.system): over for cell, over in found}
    lines = [_PER_CASE + "".join(f"{system.title:>28}" for system in systems)]
    for case in dict.fromkeys(cell.case for cell, _ in found):
        words = [
            f"{_percent(over.ratio.median)} ({_percent(over.ratio.min)} to {_percent(over.ratio.max)})"
            for system in systems
            if (over := by_place.get((case, system))) is not None
        ]
        lines.append(_case_words(case) + "".join(f"{word:>28}" for word in words))
    return lines


def _agg_lines(settings: TtftSettings, cells: Sequence[Cell]) -> list[str]:
    found = overheads(cells, settings.link_bytes_per_s)
    over = {cell.case: each for cell, each in found if cell.system is System.S3_AGG_LW}
    lines = [f"{_PER_CASE}{'over opt-local':>25}{'beyond the bound':>25}{'bound':>10}{'samples':>9}"]
    for cell in _agg_cells(settings, cells):
        added, beyond = over[cell.case].added_s, over_bound(cell, settings.bed.scale)
        words = [f"{each.median * 1e3:.1f} ({each.min * 1e3:.1f} to {each.max * 1e3:.1f})" for each in (added, beyond)]
        bound_ms = _bound_s(cell, settings.bed.scale) * 1e3
        lines.append(f"{_case_words(cell.case)}{words[0]:>25}{words[1]:>25}{bound_ms:10.1f}{len(cell.runs):9}")
    return lines


def _sweep_lines(sweep: Sweep) -> list[str]:
    case, star = sweep.case, sweep.case.zero_stall_bytes_per_s
    curve = falling_curve(sweep.samples)
    best_s = min(each.ttft_s for each in curve)
    lines = [
        f"Figure 15: {case.context}, {case.hit} %, G={case.chunk_tokens}: TTFT over the best rate's; r* is "
        f"{_gbps(star)}, with the paper's margin {_gbps(star + MARGIN_BYTES_PER_S)}",
        "  ".join(
            f"{gbps_from_bytes_per_s(each.rate_bytes_per_s):.1f}: {_percent(each.ttft_s / best_s)} %" for each in curve
        ),
    ]
    if sweep.knee is not None:
        knee = sweep.knee
        lines.append(
            f"knee {_gbps(knee.rate_bytes_per_s)} ({_gbps(knee.low_bytes_per_s)} to {_gbps(knee.high_bytes_per_s)}, "
            f"{knee.side.value}), margin {_gbps(knee.margin_bytes_per_s(star))}"
        )
    return lines


def _target_line(target: Target) -> str:
    if target.value is None:
        return f"{target.what}: not measured"
    return f"{target.what}: {target.value:.4g}, at most {target.limit:g}: {'met' if target.is_met else 'MISSED'}"


def _case_words(case: Case) -> str:
    return f"{case.context:>7}{case.hit:>8}{case.chunk_tokens:5}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


def _gbps(rate_bytes_per_s: float) -> str:
    return f"{gbps_from_bytes_per_s(rate_bytes_per_s):.1f} Gbps"
