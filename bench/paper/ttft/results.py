"""What is fetched, what is computed meanwhile, how both are scaled to a machine; rounds, their cells as rows of the
result, and what the figures show of them. Pure but for the rounds.

    L num_layers   G chunk_tokens   S per_layer_chunk_bytes   N chunk_count   s layer_bytes = N*S
    c layer_compute_s   r* = s/c

Bytes and link are scaled by one factor, so a transfer takes as long as the paper's: S shrinks, N stays. A scale of
time, for trials, shortens the windows and shrinks S once more, at the same link. Ratios are taken within a round, whose
requests were made one after the other, and then their median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from bench.beds.fetchers import Played
from bench.core.experiment import plain
from bench.core.rounds import Side, Target
from bench.core.show import Json
from bench.paper.tables import MARGIN_BYTES_PER_S, NUM_LAYERS, TOKEN_LAYER_BYTES, context_tokens, table_a1_a2, table_a8
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.ttft import ttft_layerwise_s, zero_stall_rate_bytes_per_s
from objectcache.calibration.content import STAMP_BYTES
from objectcache.calibration.knee import CONFIDENCE, TOLERANCE, Sample, find_knee, without_first_layer
from objectcache.calibration.samples import RoundTurns, interleaved, spread

MODEL = "Llama-3.1-8B"
GPU = "A100"
BOUNDARY_CHUNK_TOKENS = 16
CONTEXTS = ("4K", "64K")
HIT_RATES = (0.125, 0.5, 0.875)
CHUNK_TOKENS = (16, 64, 256)


class System(Enum):
    """Ways of getting a prefix's KV to where it is computed with (section 5.5): CW chunkwise, LW layerwise."""

    OPT_LOCAL_LW = "opt_local_lw"
    LOCAL_DRAM_CW = "local_dram_cw"
    LOCAL_DRAM_LW = "local_dram_lw"
    S3_BATCH_CW = "s3_batch_cw"
    S3_AGG_LW = "s3_agg_lw"

    @property
    def delivery(self) -> Delivery:
        """The order in which its bytes come."""
        chunkwise = (System.LOCAL_DRAM_CW, System.S3_BATCH_CW)
        return Delivery.CHUNK_MAJOR if self in chunkwise else Delivery.LAYER_MAJOR


S3_SYSTEMS = (System.S3_BATCH_CW, System.S3_AGG_LW)


@dataclass(frozen=True, slots=True)
class Scale:
    """`link` multiplies bytes and link, `time` windows and bytes."""

    link: float
    time: float = 1.0

    def link_bytes_per_s(self, unscaled_bytes_per_s: float | None) -> float | None:
        """The rate that stands for the paper's; None: not limited."""
        return None if unscaled_bytes_per_s is None else unscaled_bytes_per_s * self.link


@dataclass(frozen=True, slots=True)
class Case:
    """One workload. `compute_s` is the unscaled prefill of the tokens that missed, all layers."""

    context: str
    hit_rate: float
    chunk_tokens: int
    compute_s: float

    @property
    def cached_tokens(self) -> int:
        """How many tokens the prefix has that hits."""
        return round(context_tokens(self.context) * self.hit_rate)

    @property
    def chunk_count(self) -> int:
        """N."""
        return self.cached_tokens // self.chunk_tokens

    @property
    def zero_stall_bytes_per_s(self) -> float:
        """r*, unscaled."""
        unscaled_s = self.cached_tokens * TOKEN_LAYER_BYTES
        return zero_stall_rate_bytes_per_s(unscaled_s, self.compute_s / NUM_LAYERS)

    def layout(self, scale: Scale) -> ChunkLayout:
        """L, G and S, which is rounded to whole bytes and large enough for a stamp."""
        slice_bytes = round(self.chunk_tokens * TOKEN_LAYER_BYTES * scale.link * scale.time)
        return ChunkLayout(NUM_LAYERS, self.chunk_tokens, max(STAMP_BYTES, slice_bytes))

    def layer_compute_s(self, scale: Scale) -> float:
        """c, as it is played."""
        return self.compute_s / NUM_LAYERS * scale.time

    def bound_s(self, scale: Scale, link_bytes_per_s: float | None) -> float:
        """Eq. 3 as it is played at a link of that unscaled rate; None: a link that takes no time."""
        link = scale.link_bytes_per_s(link_bytes_per_s)
        transfer_s = 0.0 if link is None else self.layout(scale).layer_bytes(self.chunk_count) / link
        return ttft_layerwise_s([transfer_s] * NUM_LAYERS, [self.layer_compute_s(scale)] * NUM_LAYERS)


@dataclass(frozen=True, slots=True)
class Task:
    """One cell of a figure: a case, the system that fetches it, and the link's unscaled rate; None: not limited."""

    case: Case
    system: System
    link_bytes_per_s: float | None = None


def make_case(context: str, hit_rate: float, chunk_tokens: int) -> Case:
    """Compute is Table A8's; at hit rates it does not have, the TTFT of Table A1 at its smaller chunk size stands in.

    Raises KeyError for what neither has, ValueError where the prefix is no whole number of chunks.
    """
    rows = [row for row in table_a1_a2() if (row.model, row.gpu) == (MODEL, GPU)]
    known_s = {(row.context, row.hit_rate): row.ttft_s_by_chunk_tokens[BOUNDARY_CHUNK_TOKENS] for row in rows}
    known_s |= {(request.context, request.hit_rate): request.compute_s for request in table_a8()}
    case = Case(context, hit_rate, chunk_tokens, known_s[context, hit_rate])
    if not case.cached_tokens or case.cached_tokens % chunk_tokens:
        raise ValueError(f"{case.cached_tokens} tokens are no whole number of chunks of {chunk_tokens}")
    return case


OVERHEAD_LIMIT = 1.02
OVER_BOUND_S_MAX = 0.010
TARGET_CHUNK_TOKENS = 64
SHORT_CONTEXT, LONG_CONTEXT = CONTEXTS
BEYOND_BOUND = "seconds beyond the transfer-time bound"
OPT_LOCAL, AGG = System.OPT_LOCAL_LW.value, System.S3_AGG_LW.value
Row = dict[str, Any]
Run = TypeVar("Run", bound=Played)


def measure_cells(
    run: Callable[[Task], Run],
    tasks: Sequence[Task],
    runs: int,
    title: str,
    scale: Scale,
    warming: Sequence[Task] = (),
    describe: Callable[[Sequence[Run]], Row] = lambda _: {},
) -> list[Row]:
    """Every task once in each of the interleaved rounds, all of which count, after those of `warming`; `describe` adds
    to a cell what only its runs know. Raises what `run` raises.
    """
    for _, task in interleaved(warming, 1, f"{title}: warming up", uncounted=0, turns=RoundTurns.ALTERNATING):
        run(task)
    found: list[tuple[Task, list[Run]]] = [(task, []) for task in tasks]
    for _, (task, done) in interleaved(found, runs, title, uncounted=0, turns=RoundTurns.ALTERNATING):
        done.append(run(task))
    return [{**cell_row(task, done, scale), **describe(done)} for task, done in found]


def cell_row(task: Task, runs: Sequence[Played], scale: Scale) -> Row:
    """The runs of one cell, raw samples included. Links are unscaled, everything else is as it was played."""
    case = task.case
    layout = case.layout(scale)
    payload_bytes = layout.delivery_bytes(case.chunk_count)
    ttfts_s, loads_s = [run.ttft_s for run in runs], [max(run.ready_s) for run in runs]
    return {
        **_labels(case),
        "system": task.system.value,
        "link_bytes_per_s": task.link_bytes_per_s,
        "chunk_count": case.chunk_count,
        "per_layer_chunk_bytes": layout.per_layer_chunk_bytes,
        "payload_bytes": payload_bytes,
        "layer_compute_s": case.layer_compute_s(scale),
        "sample_count": len(runs),
        "ttft_s": plain(spread(ttfts_s)),
        "loaded_bytes_per_s": plain(spread([payload_bytes / seconds for seconds in loads_s])),
        "bound_s": case.bound_s(scale, task.link_bytes_per_s),
        "samples_s": ttfts_s,
        "first_layers_s": [run.ready_s[0] for run in runs],
        "loads_s": loads_s,
    }


def case_of(row: Json) -> tuple[str, float, int]:
    """Context, hit rate and chunk size."""
    return row["context"], row["hit_rate"], row["chunk_tokens"]


def beyond_bound_s(cell: Json) -> Row:
    """TTFT beyond Eq. 3 at the played link."""
    return {name: value - cell["bound_s"] for name, value in cell["ttft_s"].items()}


def judged(cells: Sequence[Row], link_bytes_per_s: float | None, cap_bytes_per_s: float | None, scale: Scale) -> Row:
    """Figures 13 and 14, and S3Agg-LW against its targets, which shortened windows say nothing about."""
    over = overheads(cells, link_bytes_per_s)
    agg = [row for row in over if row["system"] == AGG]
    cases = {case_of(row) for row in agg} if scale.time == 1 else set()
    aim = (AGG, link_bytes_per_s, SHORT_CONTEXT)
    short = [cell for cell in cells if (cell["system"], cell["link_bytes_per_s"], cell["context"]) == aim]

    def target(context: str, what: str, limit: float, rows: Iterable[Row], value: Callable[[Row], Row]) -> Row:
        wanted = [each for each in rows if (each["context"], each["chunk_tokens"]) == (context, TARGET_CHUNK_TOKENS)]
        worst = max((value(each)["median"] for each in wanted if case_of(each) in cases), default=None)
        return Target(f"{context}, G={TARGET_CHUNK_TOKENS}: {what}", limit, worst, Side.AT_MOST).json()

    return {
        "targets": [
            target(LONG_CONTEXT, "S3Agg-LW over opt-local-LW", OVERHEAD_LIMIT, agg, lambda row: dict(row["ratio"])),
            target(SHORT_CONTEXT, BEYOND_BOUND, OVER_BOUND_S_MAX, short, beyond_bound_s),
        ],
        "overhead": _nested(agg, lambda row: {name: row[name] for name in ("ratio", "added_ms", "sample_count")}),
        "transfer_bound": _nested(short, _over_bound),
        "figures": {"13": over, "14": increases(cells, link_bytes_per_s, cap_bytes_per_s)},
    }


def overheads(cells: Iterable[Row], link_bytes_per_s: float | None) -> list[Row]:
    """Figure 13: every cell at that link over opt-local-LW, the baseline itself left out."""
    here = [cell for cell in cells if cell["link_bytes_per_s"] == link_bytes_per_s]
    baselines = {case_of(cell): cell for cell in here if cell["system"] == OPT_LOCAL}
    others = [cell for cell in here if cell["system"] != OPT_LOCAL and case_of(cell) in baselines]
    return [_over(cell, baselines[case_of(cell)]) for cell in others]


def increases(cells: Sequence[Row], link_bytes_per_s: float | None, cap_bytes_per_s: float | None) -> list[Row]:
    """Figure 14: every cell at the cap over the same one at the link; none without a cap."""
    full = {(case_of(cell), cell["system"]): cell for cell in cells if cell["link_bytes_per_s"] == link_bytes_per_s}
    capped = [cell for cell in cells if cap_bytes_per_s is not None and cell["link_bytes_per_s"] == cap_bytes_per_s]
    return [_over(cell, full[key]) for cell in capped if (key := (case_of(cell), cell["system"])) in full]


def sweep_row(case: Case, cells: Sequence[Row], scale: Scale) -> Row:
    """Figure 15: one workload at many rates, unscaled, its times put back to the paper's scale. There is no knee with
    fewer than three rates; times have the first layer taken out for it: no rate hides that.
    """
    samples = [Sample(cell["link_bytes_per_s"], each_s / scale.time) for cell in cells for each_s in cell["samples_s"]]
    stalls = without_first_layer(samples, case.cached_tokens * TOKEN_LAYER_BYTES)
    knee = find_knee(stalls) if len({each.rate_bytes_per_s for each in samples}) >= 3 else None
    star = case.zero_stall_bytes_per_s
    return {
        **_labels(case),
        "zero_stall_bytes_per_s": star,
        "paper_margin_bytes_per_s": MARGIN_BYTES_PER_S,
        "knee": plain(knee),
        "margin_bytes_per_s": None if knee is None else knee.margin_bytes_per_s(star),
        "tolerance": TOLERANCE,
        "confidence": CONFIDENCE,
        "samples": plain(samples),
    }


def _over(cell: Row, baseline: Row) -> Row:
    """TTFT over another cell's of the same rounds. Raises ValueError where they have not the same rounds, or none."""
    pairs = list(zip(cell["samples_s"], baseline["samples_s"], strict=True))
    return {
        **{name: cell[name] for name in ("context", "hit_rate", "chunk_tokens", "system")},
        "ratio": plain(spread([ours / theirs for ours, theirs in pairs])),
        "added_ms": plain(spread([1e3 * (ours - theirs) for ours, theirs in pairs])),
        "sample_count": len(pairs),
    }


def _over_bound(cell: Row) -> Row:
    beyond_ms = {name: 1e3 * value for name, value in beyond_bound_s(cell).items()}
    return {"bound_ms": 1e3 * cell["bound_s"], "over_bound_ms": beyond_ms, "sample_count": cell["sample_count"]}


def _nested(rows: Iterable[Row], value: Callable[[Row], Row]) -> Row:
    """By context, hit rate in percent and chunk size, all as text."""
    found: Row = {}
    for row in rows:
        by_hit = found.setdefault(row["context"], {})
        by_hit.setdefault(f"{100 * row['hit_rate']:g}", {})[str(row["chunk_tokens"])] = value(row)
    return found


def _labels(case: Case) -> Row:
    return {"context": case.context, "hit_rate": case.hit_rate, "chunk_tokens": case.chunk_tokens}
