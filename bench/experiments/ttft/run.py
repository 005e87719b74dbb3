"""Settings of `bench ttft`, its measurement, and its command.

There is a server for each context and chunk size; each round has every system, hit rate and link.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bench.beds.play import Waits
from bench.core.experiment import Experiment, WrongUse, need_nixl, published
from bench.core.options import Options, each, filled, names, number, real, some_of
from bench.core.show import Json
from bench.experiments.device.command import declare_ttft, opened_device
from bench.experiments.ttft.bed import BedSettings, filled_bed
from bench.experiments.ttft.cases import (
    BOUNDARY_CHUNK_TOKENS,
    CHUNK_TOKENS,
    CONTEXTS,
    HIT_RATES,
    S3_SYSTEMS,
    Case,
    Scale,
    System,
    Task,
    make_case,
)
from bench.experiments.ttft.results import Row, judged, measure_cells, sweep_row
from bench.experiments.ttft.show import plot, show
from bench.paper.tables import MARGIN_BYTES_PER_S
from calibration.content import VerificationError
from calibration.samples import State
from descriptors.units import bytes_per_s_from_gbps
from nixl_client.client import Transport

LINK_BYTES_PER_S = bytes_per_s_from_gbps(100)
SWEEP_HIT_RATES = (0.5, 0.875)
SWEEP_CHUNK_TOKENS = 64
RATE_FACTORS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
RATE_FACTORS_SMOKE = (0.5, 1.0, 2.0)
PLACES = {
    State.DRAM: "in the server's DRAM tier",
    State.PAGE_CACHE: "in the page cache",
    State.COLD: "on disk, their files dropped from the page cache before each request",
}
WAITED = {
    Waits.ALL: "every window is waited for",
    Waits.LOADING: "windows are waited for until all layers are there; those left then are added, not waited for",
}


class FigureName(Enum):
    """The paper's numbers."""

    OVERHEAD = "13"
    CAPS = "14"
    RATES = "15"


@dataclass(frozen=True, slots=True)
class TtftSettings:
    """What to measure. Rates are unscaled; `link_bytes_per_s` None: not limited, and then there are no caps.
    `rate_factors` are rates of Figure 15 over a workload's r*.
    """

    bed: BedSettings
    figures: tuple[FigureName, ...]
    contexts: tuple[str, ...]
    hit_rates: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    link_bytes_per_s: float | None
    cap_bytes_per_s: float
    sweep_hit_rates: tuple[float, ...]
    sweep_chunk_tokens: int
    rate_factors: tuple[float, ...]
    runs: int
    sweep_runs: int

    def sweep_rates(self, case: Case) -> list[float]:
        """Ascending: those around r*, and the scheduler's own choice in the paper, r* and its margin."""
        wanted = {factor * case.zero_stall_bytes_per_s for factor in self.rate_factors}
        return sorted(wanted | {case.zero_stall_bytes_per_s + MARGIN_BYTES_PER_S})

    def tasks(self, context: str, chunk_tokens: int) -> list[Task]:
        """Figure 13's, and then, at the capped link, Figure 14's, which needs the S3 systems' times of the former."""
        has_overhead = FigureName.OVERHEAD in self.figures
        has_caps = FigureName.CAPS in self.figures and self.link_bytes_per_s is not None
        systems = tuple(System) if has_overhead else S3_SYSTEMS if has_caps else ()
        links = [(self.link_bytes_per_s, systems), (self.cap_bytes_per_s, S3_SYSTEMS if has_caps else ())]
        cases = [make_case(context, hit_rate, chunk_tokens) for hit_rate in self.hit_rates]
        return [Task(case, system, link) for link, these in links for case in cases for system in these]


def measure_ttft(settings: TtftSettings, origin: Mapping[str, Any]) -> Json:
    """All of it; wrong bytes end it early and are the result's `problem`. Raises FAILURES, MemoryError."""
    cells: list[Row] = []
    sweeps: list[Row] = []
    problem = None
    try:
        for context in settings.contexts:
            for chunk_tokens in settings.chunk_tokens:
                _measure_prefix(settings, context, chunk_tokens, cells, sweeps)
    except VerificationError as error:
        problem = str(error)
    found = judged(cells, settings.link_bytes_per_s, settings.cap_bytes_per_s, settings.bed.scale)
    found["figures"]["15"] = sweeps
    return published("ttft", origin, settings, problem, notes=notes(settings), **found, cells=cells)


def notes(settings: TtftSettings) -> list[str]:
    """What a reader must know."""
    scale, waits = settings.bed.scale, settings.bed.waits
    said = [
        f"bytes and link scaled by {scale.link:g} (S shrinks, N stays), windows by {scale.time:g}"
        + (" and bytes by that too" if scale.time != 1 else ""),
        "compute is played: windows of Table A8; at 12.5 %, which it does not have, TTFT of Table A1 (A100, "
        f"G={BOUNDARY_CHUNK_TOKENS}) stands for the compute",
        WAITED[waits],
        "the device is a host buffer, which opt-local-LW copies layers into and the server writes into over "
        f"{settings.bed.transport.value}; local copies run at this machine's memory speed, not scaled, in their favour",
        "local chunks lie one after the other, so Local-DRAM-CW is one copy",
        f"chunks are {PLACES[settings.bed.state]}; ratios are medians of those within a round, extremes in brackets",
    ]
    if settings.link_bytes_per_s is None:
        said.append("the link is not limited: what is measured is what this machine moves, not how it is paced")
    return said


def _measure_prefix(
    settings: TtftSettings, context: str, chunk_tokens: int, cells: list[Row], sweeps: list[Row]
) -> None:
    """Every workload of one context and chunk size: their prefixes are beginnings of the longest one's."""
    tasks = settings.tasks(context, chunk_tokens)
    is_swept = FigureName.RATES in settings.figures and chunk_tokens == settings.sweep_chunk_tokens
    swept = [make_case(context, hit_rate, chunk_tokens) for hit_rate in settings.sweep_hit_rates if is_swept]
    title, scale = f"{context}, G={chunk_tokens}", settings.bed.scale
    longest = max([*(task.case for task in tasks), *swept], key=lambda case: case.chunk_count, default=None)
    if longest is None:
        return
    with filled_bed(longest, settings.bed) as bed:
        cells += measure_cells(bed.run, tasks, settings.runs, title, scale, warming=tasks)
        for case in swept:
            rates = [Task(case, System.S3_AGG_LW, rate) for rate in settings.sweep_rates(case)]
            at_rates = measure_cells(bed.run, rates, settings.sweep_runs, f"{title}, {case.hit_rate:.1%}: rates", scale)
            sweeps.append(sweep_row(case, at_rates, scale))


def _declare(options: Options) -> None:
    every, gbps = tuple(FigureName), bytes_per_s_from_gbps(1)
    text = f"default: {names(every)}"
    options.add("--figures", type=some_of(every), default=every, metavar="LIST", help=text)
    some, sizes, tiny = each(str, CONTEXTS), each(int, CHUNK_TOKENS), (SWEEP_CHUNK_TOKENS,)
    options.add("--contexts", type=some, metavar="LIST", full=CONTEXTS, smoke=("4K",), help="default: 4K,64K")
    text = "hit rates in percent; default: 12.5,50,87.5, and 50,87.5 in figure 15"
    options.add("--hits", type=each(lambda hit: float(hit) / 100, HIT_RATES), metavar="LIST", help=text)
    text = "default: 16,64,256"
    options.add("-G", "--chunk-tokens", type=sizes, metavar="LIST", full=CHUNK_TOKENS, smoke=tiny, help=text)
    options.add("--scale", type=real(1e-4, 1), default=0.125, help="of bytes and link; default: 0.125")
    text = "of windows, and once more of bytes; default: 1"
    options.add("--time-scale", type=real(1e-4, 1), metavar="F", full=1.0, smoke=0.02, help=text)
    text = "unscaled; 0: not limited; default: 100, with --device not limited"
    options.add("--link-gbps", type=real(0, 1e5, gbps), dest="link_bytes_per_s", metavar="R", help=text)
    capped = {"dest": "cap_bytes_per_s", "default": 10 * gbps, "help": "default: 10"}
    options.add("--cap-gbps", type=real(0.01, 1e5, gbps), metavar="R", **capped)
    text = "wait for every window, also when all layers are there: minutes longer"
    options.add("--play", dest="waits", action="store_const", const=Waits.ALL, default=Waits.LOADING, help=text)
    text = "the scheduler's gather_s; default: the server's"
    options.add("--gather-ms", type=real(0, 1e4, 1e-3), dest="gather_s", metavar="MS", help=text)
    options.choice("--transport", tuple(Transport), Transport.SHM)
    options.choice("--state", tuple(PLACES), State.DRAM, "of chunks")
    declare_ttft(options)
    options.runs(None, None)
    options.add("--sweep-runs", type=number(1, 1000), metavar="K", full=3, smoke=1, help="of figure 15; default: 3")
    options.seed()
    options.folder()


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    settings = settings_of(options)
    if options.device is not None:
        with opened_device(options, origin) as (accelerator, described):
            from bench.experiments.device.ttft import measure_on_device

            return measure_on_device(options, settings.hit_rates, accelerator, described)
    need_nixl(settings.bed.transport is Transport.UCX, "--transport shm")
    if settings.link_bytes_per_s is None and FigureName.OVERHEAD not in settings.figures:
        raise WrongUse("figures 14 and 15 are about a limited link: pass --link-gbps")
    if settings.link_bytes_per_s is not None and settings.cap_bytes_per_s >= settings.link_bytes_per_s:
        raise WrongUse("--cap-gbps must be below --link-gbps")
    return measure_ttft(settings, origin)


def settings_of(options: argparse.Namespace) -> TtftSettings:
    """Of options with all their values."""
    is_smoke, sizes, link = options.smoke, options.chunk_tokens, options.link_bytes_per_s
    link_bytes_per_s = LINK_BYTES_PER_S if link is None else link or None
    return filled(
        TtftSettings,
        options,
        bed=filled(BedSettings, options, scale=Scale(options.scale, options.time_scale)),
        figures=tuple(figure for figure in options.figures if link_bytes_per_s or figure is FigureName.OVERHEAD),
        hit_rates=options.hits or (HIT_RATES[1:] if is_smoke else HIT_RATES),
        link_bytes_per_s=link_bytes_per_s,
        sweep_hit_rates=options.hits or (SWEEP_HIT_RATES[1:] if is_smoke else SWEEP_HIT_RATES),
        sweep_chunk_tokens=SWEEP_CHUNK_TOKENS if SWEEP_CHUNK_TOKENS in sizes else sizes[0],
        rate_factors=RATE_FACTORS_SMOKE if is_smoke else RATE_FACTORS,
        runs=options.runs or (1 if is_smoke else 5),
    )


TTFT = Experiment(
    name="ttft",
    help="the paper's figures 13, 14 and 15: time to first token with played compute windows",
    description="Prefixes of Llama 3.1 8B, 4K and 64K, fetched from a server of its own over a played link, or copied "
    "out of local memory, while compute windows of Table A8 pass; every byte compared.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
    charts="DIR",
)
