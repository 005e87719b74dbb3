"""What was measured, for people and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.engine.cases import BLOCK_TOKENS, Case
from bench.engine.results import Cell, Target, find, loading, ratio, targets
from bench.engine.run import Engines
from bench.engine.settings import EngineSettings
from bench.engine.ways import COMPUTING, CONNECTED, NOTES, Way
from bench.engine.work import OUTPUT_TOKENS
from bench.samples import Spread
from descriptors.units import MIB

COUNTERS = ("lookup_s", "load_wait_s", "load_copy_s")


def notes(settings: EngineSettings, found: Engines) -> list[str]:
    """What a reader must know."""
    shape = settings.shape
    ready = next(iter(found.ready.values()), None)
    engine = "" if ready is None else f"vLLM {ready.vllm}, torch {ready.torch}, {ready.threads} threads, eager; "
    return [
        f"{engine}Llama of {shape.num_layers} layers, hidden {shape.hidden}, intermediate {shape.intermediate}, "
        f"{shape.heads} heads and {shape.kv_heads} of KV of {shape.head_dim}, {shape.dtype.value}, weights seeded: "
        f"{shape.token_bytes / 1024:g} KiB of KV a token, blocks of {BLOCK_TOKENS} tokens, "
        f"our chunks of {settings.chunk_tokens}",
        "TTFT is vLLM's, arrival to first token. Every engine is a process of its own; an idle one took at most "
        f"{100 * _idle_share(found):.1f} % of a core. Stored KV is in memory or the page cache. Servers share the "
        "engines' cores",
        f"{OUTPUT_TOKENS} greedy tokens of every request are compared with those of recomputing; that other prefixes "
        "before the same suffix give other tokens was seen" + ("" if _was_seen(found) else " in no case"),
    ]


def tables(settings: EngineSettings, found: Engines) -> str:
    """All of it in lines."""
    lines = [*notes(settings, found), ""]
    for case in dict.fromkeys(cell.case for cell in found.cells):
        lines += [*_case_lines(settings, found.cells, case), ""]
    lines += [f"{way.title}: {NOTES[way]}" for way in settings.ways if way not in found.missing]
    lines += [f"{way.title}: not run: {reason}" for way, reason in found.missing.items()]
    lines += ["", *map(_target_line, targets(found.cells, found.missing))]
    if found.problem is not None:
        lines.append(f"FAILED: {found.problem}")
    return "\n".join(lines)


def to_json(settings: EngineSettings, found: Engines, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, raw samples included."""
    return {
        "benchmark": "engine",
        **origin,
        **settings_json(settings),
        "engines": {way.value: asdict(ready) for way, ready in found.ready.items()},
        "notes": {way.value: NOTES[way] for way in settings.ways},
        "not_run": {way.value: f"not run: {reason}" for way, reason in found.missing.items()},
        "measurements": [_cell_json(settings, found.cells, cell) for cell in found.cells],
        "targets": [_target_json(target) for target in targets(found.cells, found.missing)],
        "distinct_outputs": {case.title: len(set(tokens)) for case, tokens in found.outputs.items()},
        "problem": found.problem,
    }


def settings_json(settings: EngineSettings) -> dict[str, Any]:
    """Plain values."""
    return {
        "settings": {
            "shape": {**asdict(settings.shape), "dtype": settings.shape.dtype.value},
            "ways": [way.value for way in settings.ways],
            "contexts": list(settings.contexts),
            "hit_rates": list(settings.hit_rates),
            "runs": settings.runs,
            "chunk_tokens": settings.chunk_tokens,
            "block_tokens": BLOCK_TOKENS,
            "transport": settings.transport.value,
            "seed": settings.seed,
            "serve_options": list(settings.serve_options),
        },
    }


def _idle_share(found: Engines) -> float:
    return max((answer.idle_cpu_share for cell in found.cells for answer in cell.answers), default=0.0)


def _was_seen(found: Engines) -> bool:
    return any(len(set(tokens)) > 1 for tokens in found.outputs.values())


def _case_lines(settings: EngineSettings, cells: Sequence[Cell], case: Case) -> list[str]:
    megabytes = case.prefix_tokens * settings.shape.token_bytes / MIB
    lines = [
        f"{case.title} of it stored: {case.prefix_tokens} tokens, {megabytes:.4g} MiB of KV",
        f"{'':24}{'TTFT, s':>24}{'recompute over it':>24}{'over own blocks, ms':>28}{'GB/s':>7}"
        f"{'lookup':>8}{'wait':>7}{'copy, ms':>9}{'samples':>8}",
    ]
    baseline, floor = find(cells, case, Way.RECOMPUTE), find(cells, case, Way.OWN_BLOCKS)
    for way in Way:
        cell = find(cells, case, way)
        if cell is None:
            continue
        faster = _words(ratio(baseline, cell), 2) if baseline is not None and way is not Way.RECOMPUTE else ""
        added, rate = "", ""
        if floor is not None and way not in (*COMPUTING, Way.OWN_BLOCKS):
            load = loading(cell, floor, settings.shape.token_bytes)
            added = _words(load.added_s, 0, 1e3)
            rate = "" if load.rate_bytes_per_s is None else f"{load.rate_bytes_per_s / 1e9:.2f}"
        parts = [f"{cell.counted(name).median * 1e3:.0f}" if way in CONNECTED else "" for name in COUNTERS]
        lines.append(
            f"{way.title:24}{_words(cell.ttft_s, 3):>24}{faster:>24}{added:>28}{rate:>7}"
            f"{parts[0]:>8}{parts[1]:>7}{parts[2]:>9}{len(cell.answers):>8}"
        )
    return lines


def _words(values: Spread, digits: int, scale: float = 1.0) -> str:
    median, least, greatest = (f"{scale * each:.{digits}f}" for each in (values.median, values.min, values.max))
    return f"{median} ({least} to {greatest})"


def _target_line(target: Target) -> str:
    relation = "at least" if target.is_least else "more than"
    if target.value is None:
        return f"{target.what}: not measured: {target.reason}"
    assert target.case is not None
    assert target.ours is not None
    return (
        f"{target.what} ({target.ours.title}), worst at {target.case.title}: {_words(target.value, 2)}, "
        f"{relation} {target.limit:g}: {'met' if target.is_met else 'MISSED'}"
    )


def _target_json(target: Target) -> dict[str, Any]:
    return {
        "what": target.what,
        "limit": target.limit,
        "value": None if target.value is None else asdict(target.value),
        "case": None if target.case is None else target.case.title,
        "ours": None if target.ours is None else target.ours.value,
        "is_met": target.is_met,
        "reason": target.reason,
    }


def _cell_json(settings: EngineSettings, cells: Sequence[Cell], cell: Cell) -> dict[str, Any]:
    baseline, floor = find(cells, cell.case, Way.RECOMPUTE), find(cells, cell.case, Way.OWN_BLOCKS)
    load = None
    if floor is not None and cell.way not in (*COMPUTING, Way.OWN_BLOCKS):
        load = asdict(loading(cell, floor, settings.shape.token_bytes))
    return {
        "context_tokens": cell.case.context_tokens,
        "hit_rate": cell.case.hit_rate,
        "way": cell.way.value,
        "ttft_s": asdict(cell.ttft_s),
        "recompute_over_it": None if baseline is None else asdict(ratio(baseline, cell)),
        "over_own_blocks": load,
        "idle_cpu_share_max": max(answer.idle_cpu_share for answer in cell.answers),
        "samples": [asdict(answer) for answer in cell.answers],
    }
