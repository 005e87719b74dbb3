"""Figure 13 as it was measured on a device, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.device.carrier import Landing
from bench.device.ttft import LOGITS_ERROR_MAX, Baseline, DeviceTtft, DeviceTtftSettings
from bench.samples import Spread, spread
from bench.ttft.cases import Case, System
from bench.ttft.report import to_json
from bench.ttft.results import OVERHEAD_LIMIT, Cell, Overhead, Target, overheads, targets
from bench.ttft.run import Ttft, TtftSettings
from descriptors.units import gbps_from_bytes_per_s

COLUMN = 26


def notes(settings: DeviceTtftSettings) -> list[str]:
    """What a reader must know."""
    bed = settings.bed
    landing = {
        Landing.HOST: "pinned host memory, from where layers are copied up in a stream of their own",
        Landing.DEVICE: "the device's memory; only the systems from local DRAM copy from pinned host memory",
    }[bed.landing]
    shape = settings.shape
    said = [
        f"{shape.num_layers} layers, hidden {shape.hidden}, {shape.heads} heads, {shape.kv_heads} KV heads of "
        f"{shape.head_dim}, intermediate {shape.intermediate}, vocabulary {settings.vocabulary}, bfloat16, random "
        "weights; the prefill of the tokens that missed is computed, every attention waiting for its layer",
        f"the server writes over {bed.transport.value} into {landing}",
        "opt-local-LW copies the cache's own order, which nothing has to put in order on the device; all others bring "
        "chunks' order, put in order by a kernel beside the model's",
        "TTFT is from the request until the host knows the first token; resident: the prefix's KV was on the device, "
        "recompute: there was no cached KV",
        "chunks are in the server's DRAM tier, the server on the same host; ratios are medians of those within a "
        "round, extremes in brackets",
        "every bit of the prefix on the device is compared with the KV it was stored from; the last token's logits "
        f"with those of the whole prompt: |difference| / |expected| at most {LOGITS_ERROR_MAX:g}",
    ]
    if settings.link_bytes_per_s is not None:
        said.append(f"the server's scheduler holds it to {gbps_from_bytes_per_s(settings.link_bytes_per_s):g} Gbps")
    return said


def tables(settings: DeviceTtftSettings, found: DeviceTtft) -> str:
    """Everything that was measured."""
    lines = [f"device: {found.device}", *(f"* {note}" for note in notes(settings)), ""]
    lines += ["ms (least to greatest)", *_time_lines(settings, found)]
    over = overheads(found.cells, settings.link_bytes_per_s)
    if over:
        lines += ["", "Figure 13: TTFT over opt-local-LW, in %", *_overhead_lines(settings, over)]
    lines += ["", *map(_target_line, _targets(settings, found)), *_verdicts(found)]
    return "\n".join(lines)


def device_json(
    settings: DeviceTtftSettings, played: TtftSettings, found: DeviceTtft, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain values, raw samples included; cells as `bench ttft` writes them. `played` are its settings for them."""
    cells = to_json(played, Ttft(found.cells, [], found.problem), origin)
    return {
        "bench": "ttft",
        "device": found.device,
        "verified": found.problem is None and found.are_logits_right,
        "problem": found.problem,
        **origin,
        "settings": _settings_json(settings),
        "notes": notes(settings),
        "targets": [{**asdict(target), "is_met": target.is_met} for target in _targets(settings, found)],
        "logits": {"error_max": found.logits_error_max, "limit": LOGITS_ERROR_MAX, "ok": found.are_logits_right},
        "baselines": [_baseline_json(baseline) for baseline in found.baselines],
        "overhead": cells["overhead"],
        "figures": {"13": cells["figures"]["13"]},
        "cells": [
            {
                **cell,
                "logits_errors": [run.logits_error for run in runs],
                "are_first_tokens_same": [run.is_first_token_same for run in runs],
            }
            for cell, runs in zip(cells["cells"], found.runs, strict=True)
        ],
    }


def _settings_json(settings: DeviceTtftSettings) -> dict[str, Any]:
    bed = settings.bed
    return {
        **asdict(settings),
        "systems": [system.value for system in settings.systems],
        "bed": {
            **asdict(bed),
            "transport": bed.transport.value,
            "landing": bed.landing.value,
            "folder": None if bed.folder is None else str(bed.folder),
        },
    }


def _baseline_json(baseline: Baseline) -> dict[str, Any]:
    return {**asdict(baseline), "shows_wrong_values": baseline.shows_wrong_values}


def _targets(settings: DeviceTtftSettings, found: DeviceTtft) -> list[Target]:
    """The one that is about opt-local-LW: Eq. 3's bound is for a link whose rate is given."""
    all_targets = targets(found.cells, settings.link_bytes_per_s, settings.bed.scale)
    return [target for target in all_targets if target.limit == OVERHEAD_LIMIT]


def _time_lines(settings: DeviceTtftSettings, found: DeviceTtft) -> list[str]:
    cells = {(cell.case, cell.system): cell for cell in found.cells}
    baselines = {baseline.context: baseline for baseline in found.baselines}
    heads = ["recompute", "resident", *(system.title for system in settings.systems)]
    lines = [_head(heads)]
    for case in dict.fromkeys(cell.case for cell in found.cells):
        times = [spread(baselines[case.context].recompute_s), spread([case.compute_s])]
        times += [spread(cells[case, system].ttfts_s()) for system in settings.systems]
        lines.append(_case_words(case) + "".join(f"{_ms(each):>{COLUMN}}" for each in times))
    return lines


def _overhead_lines(settings: DeviceTtftSettings, over: Sequence[tuple[Cell, Overhead]]) -> list[str]:
    systems = [system for system in settings.systems if system is not System.OPT_LOCAL_LW]
    by_place = {(cell.case, cell.system): found.ratio for cell, found in over}
    lines = [_head([system.title for system in systems])]
    for case in dict.fromkeys(cell.case for cell, _ in over):
        words = [_percent(by_place[case, system]) for system in systems]
        lines.append(_case_words(case) + "".join(f"{word:>{COLUMN}}" for word in words))
    return lines


def _verdicts(found: DeviceTtft) -> list[str]:
    error = found.logits_error_max
    lines = [
        f"{each.context}: wrong values in every cached token change the logits by {each.blind_error:.2g}"
        + ("" if each.shows_wrong_values else ": too little to tell by them")
        for each in found.baselines
    ]
    if error is not None:
        said = "right" if found.are_logits_right else "WRONG"
        lines.append(f"logits {said}: off by {error:.2g} at most, {LOGITS_ERROR_MAX:g} allowed")
    lines.append("every bit of KV verified" if found.problem is None else f"WRONG BYTES: {found.problem}")
    return lines


def _target_line(target: Target) -> str:
    if target.value is None:
        return f"{target.what}: not measured"
    return f"{target.what}: {target.value:.4g}, at most {target.limit:g}: {'met' if target.is_met else 'MISSED'}"


def _head(words: list[str]) -> str:
    return "context   hit %    G" + "".join(f"{word:>{COLUMN}}" for word in words)


def _case_words(case: Case) -> str:
    return f"{case.context:>7}{case.hit:>8}{case.chunk_tokens:5}"


def _ms(found: Spread) -> str:
    return f"{found.median * 1e3:.1f} ({found.min * 1e3:.1f} to {found.max * 1e3:.1f})"


def _percent(ratio: Spread) -> str:
    median, least, greatest = (f"{100 * (value - 1):+.1f}" for value in (ratio.median, ratio.min, ratio.max))
    return f"{median} ({least} to {greatest})"
