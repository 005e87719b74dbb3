"""Settings of `bench ttft`, its measurement, and its command. There is a server for each context and chunk size; each
round has every system, hit rate and link.

One prefix is in a server's memory and in this process's, and all systems fill one buffer. It stands for the device's
memory: here it is host memory, registered with the server, which writes into it as RDMA does into a GPU's. Local
systems copy into the same buffer. What is local is chunks one after the other, as they were stored, and the payload
aggregated in layer order, which is what opt-local-LW starts from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.beds.fetchers import CopiedLayers, FetchedLayers, Played, Source, Waits, play
from bench.core import options
from bench.core.experiment import Experiment, WrongUse, need_nixl, published
from bench.core.options import each, filled, real, some_of
from bench.core.show import Json
from bench.paper.device.command import Landing, opened_device
from bench.paper.tables import MARGIN_BYTES_PER_S
from bench.paper.ttft.results import (
    BOUNDARY_CHUNK_TOKENS,
    CHUNK_TOKENS,
    CONTEXTS,
    HIT_RATES,
    S3_SYSTEMS,
    Case,
    Row,
    Scale,
    System,
    Task,
    judged,
    make_case,
    measure_cells,
    sweep_row,
)
from bench.paper.ttft.show import plot, show
from descriptors.units import MIB, bytes_per_s_from_gbps
from nixl_client.client import Client, Transport
from objectcache.calibration.chunks import Chunks, StoredFiles, check_fetch, register_as, store_chunks, warm
from objectcache.calibration.content import Bytes, VerificationError, make_content, verify_payload
from objectcache.calibration.samples import State
from objectcache.calibration.servers import FixedConfig, PlayedLink, served_link


@dataclass(frozen=True, slots=True)
class BedSettings:
    """How a bed is made. `gather_s` is the scheduler's setting, None its default; `state` is where chunks are when they
    are asked for, `folder` is for the store.
    """

    scale: Scale
    waits: Waits = Waits.LOADING
    transport: Transport = Transport.SHM
    seed: int = 1
    gather_s: float | None = None
    folder: Path | None = None
    state: State = State.DRAM


@dataclass(frozen=True, slots=True)
class Bed:
    """`chunks` is uint8 of shape (N, L, S), `payload` of shape (L, N, S); cases of fewer chunks take the first ones."""

    settings: BedSettings
    link: PlayedLink
    client: Client
    prefix: Chunks
    device: Bytes
    chunks: NDArray[np.uint8]
    payload: NDArray[np.uint8]
    copier: ThreadPoolExecutor
    files: StoredFiles

    def run(self, task: Task) -> Played:
        """One request and its windows over the task's link; every byte is compared afterwards. Raises
        VerificationError, LocalServerError, and what the client raises.
        """
        self.link.set(self.settings.scale.link_bytes_per_s(task.link_bytes_per_s))
        content = self.prefix.part(0, task.case.chunk_count).content
        target = self.device[: content.layout.delivery_bytes(task.case.chunk_count)]
        target.fill(0)
        compute_s = task.case.layer_compute_s(self.settings.scale)
        with self._source(task, target, compute_s) as (source, started_s):
            played = play(source, content.layout.num_layers, compute_s, started_s, self.settings.waits)
        verify_payload(target, content, task.system.delivery)
        return played

    @contextmanager
    def _source(self, task: Task, target: Bytes, compute_s: float) -> Iterator[tuple[Source, float]]:
        """The layers on their way, and when they were asked for."""
        layout, system, count = self.prefix.layout, task.system, task.case.chunk_count
        if system in S3_SYSTEMS:
            keys, delivery = self.prefix.keys[:count], system.delivery
            windows_us = [round(compute_s * 1e6)] * layout.num_layers
            self.files.drop()
            started_s = time.monotonic()
            with self.client.fetch(keys, layout, self.device, delivery=delivery, layer_compute_us=windows_us) as fetch:
                yield FetchedLayers(fetch), started_s
                check_fetch(fetch, delivery, target.nbytes)
            return
        chunks = self.chunks[:count]
        if system is System.LOCAL_DRAM_CW:
            copies = [partial(np.copyto, target.reshape(chunks.shape), chunks)]
        else:
            sources = self.payload[:, :count] if system is System.OPT_LOCAL_LW else chunks.transpose(1, 0, 2)
            layers = target.reshape(sources.shape)
            copies = [partial(np.copyto, layer, source) for layer, source in zip(layers, sources, strict=True)]
        started_s = time.monotonic()
        yield CopiedLayers(self.copier, copies), started_s


@contextmanager
def filled_bed(case: Case, settings: BedSettings) -> Iterator[Bed]:
    """Everything in place and warm for `case` and for those of its context and chunk size that hit less; the link is
    not limited. Raises LocalServerError, ObjectCacheError, NixlFailure, VerificationError, OSError, MemoryError.
    """
    layout, count = case.layout(settings.scale), case.chunk_count
    payload_bytes = layout.delivery_bytes(count)
    keys = tuple(f"ttft/{index:06d}" for index in range(count))
    prefix = Chunks(keys, make_content(count, layout, settings.seed))
    dram_bytes = payload_bytes + payload_bytes // 4 + 64 * MIB if settings.state is State.DRAM else 0
    with (
        served_link(settings.folder, FixedConfig(dram_bytes, settings.gather_s)) as link,
        link.server.client(settings.transport) as client,
        ThreadPoolExecutor(1, "copy") as copier,
    ):
        store_chunks(link.server, prefix, f"{case.context}, G={case.chunk_tokens}: storing")
        device = client.allocate_buffer(payload_bytes)
        register_as(client, device, settings.transport)
        files = StoredFiles(link.server.data_files() if settings.state is State.COLD else [])
        if settings.state is State.DRAM:
            warm(link.server, client, [prefix], device)
        chunks = np.empty((count, layout.num_layers, layout.per_layer_chunk_bytes), dtype=np.uint8)
        for index, chunk in enumerate(chunks):
            chunk[:] = prefix.content.chunk(index).reshape(chunk.shape)
        payload = np.ascontiguousarray(chunks.transpose(1, 0, 2))
        yield Bed(settings, link, client, prefix, device, chunks, payload, copier, files)


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


def _systems(text: str) -> tuple[System, ...]:
    """opt-local-LW is what the others are over: it comes first, asked for or not."""
    chosen = some_of(tuple(System))(text)
    return tuple(system for system in System if system is System.OPT_LOCAL_LW or system in chosen)


GBPS = bytes_per_s_from_gbps(1)
HITS = each(lambda hit: float(hit) / 100, HIT_RATES)
HITS_HELP = "hit rates in percent; default: 12.5,50,87.5, and 50,87.5 in figure 15"
LINK_HELP = "unscaled; 0: not limited; default: 100, with --device not limited"
PLAY_HELP = "wait for every window, also when all layers are there: minutes longer"
DEVICE_HELP = "compute on it instead of playing windows: figure 13 with a real model, nothing scaled; cpu: --smoke only"


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """What the command is asked for; options that are left open are settled by whether there is a device."""

    figures: tuple[FigureName, ...] = options.choice("--figures", FigureName, tuple(FigureName))
    contexts: tuple[str, ...] = options.setting("--contexts", CONTEXTS, ("4K",), each(str, CONTEXTS))
    hits: tuple[float, ...] | None = options.setting("--hits", None, None, HITS, HITS_HELP)
    chunk_tokens: tuple[int, ...] = options.setting(
        "-G --chunk-tokens", CHUNK_TOKENS, (SWEEP_CHUNK_TOKENS,), each(int, CHUNK_TOKENS)
    )
    scale: float = options.setting("--scale", 0.125, 0.125, real(1e-4, 1), "of bytes and link")
    time_scale: float = options.setting("--time-scale", 1.0, 0.02, real(1e-4, 1), "of windows, and once more of bytes")
    link_bytes_per_s: float | None = options.setting("--link-gbps", None, None, real(0, 1e5, GBPS), LINK_HELP)
    cap_bytes_per_s: float = options.setting("--cap-gbps", 10 * GBPS, 10 * GBPS, real(0.01, 1e5, GBPS), "default: 10")
    waits: Waits = options.setting("--play", Waits.LOADING, text=PLAY_HELP, action="store_const", const=Waits.ALL)
    gather_s: float | None = options.setting("--gather-s", None, None, real(0, 10), "the scheduler's gather_s")
    transport: Transport = options.choice("--transport", Transport, Transport.SHM)
    state: State = options.choice("--state", PLACES, State.DRAM, text="of chunks")
    device: str | None = options.setting("--device", None, choices=("cuda", "cpu"), text=DEVICE_HELP)
    landing: Landing = options.choice("--landing", Landing, Landing.HOST, text="what the server fills, with --device")
    systems: tuple[System, ...] = options.setting(
        "--systems", tuple(System), tuple(System), _systems, "with --device; default: all of figure 13's"
    )
    runs: int | None = options.runs(None, None, "counted rounds; default: 5, with --device 3")
    sweep_runs: int = options.count("--sweep-runs", 3, 1, most=1000, text="of figure 15")
    seed: int = options.seed()
    folder: Path | None = options.folder()
    smoke: bool = options.sized(False, True)


def _measure(asked: TtftOptions, origin: Mapping[str, Any]) -> Json:
    settings = settings_of(asked)
    if asked.device is not None:
        with opened_device(asked.device, asked.smoke, origin) as (accelerator, described):
            from bench.paper.device.ttft import measure_on_device

            return measure_on_device(asked, settings.hit_rates, accelerator, described)
    need_nixl(settings.bed.transport is Transport.UCX, "--transport shm")
    if settings.link_bytes_per_s is None and FigureName.OVERHEAD not in settings.figures:
        raise WrongUse("figures 14 and 15 are about a limited link: pass --link-gbps")
    if settings.link_bytes_per_s is not None and settings.cap_bytes_per_s >= settings.link_bytes_per_s:
        raise WrongUse("--cap-gbps must be below --link-gbps")
    return measure_ttft(settings, origin)


def settings_of(asked: TtftOptions) -> TtftSettings:
    """The settings of `asked`, with all their values."""
    is_smoke, sizes, link = asked.smoke, asked.chunk_tokens, asked.link_bytes_per_s
    link_bytes_per_s = LINK_BYTES_PER_S if link is None else link or None
    return filled(
        TtftSettings,
        asked,
        bed=filled(BedSettings, asked, scale=Scale(asked.scale, asked.time_scale)),
        figures=tuple(figure for figure in asked.figures if link_bytes_per_s or figure is FigureName.OVERHEAD),
        hit_rates=asked.hits or (HIT_RATES[1:] if is_smoke else HIT_RATES),
        link_bytes_per_s=link_bytes_per_s,
        sweep_hit_rates=asked.hits or (SWEEP_HIT_RATES[1:] if is_smoke else SWEEP_HIT_RATES),
        sweep_chunk_tokens=SWEEP_CHUNK_TOKENS if SWEEP_CHUNK_TOKENS in sizes else sizes[0],
        rate_factors=RATE_FACTORS_SMOKE if is_smoke else RATE_FACTORS,
        runs=asked.runs or (1 if is_smoke else 5),
    )


TTFT = Experiment(
    name="ttft",
    help="the paper's figures 13, 14 and 15: time to first token with played compute windows",
    description="See TTFT with stored prefixes over a link of your rate. Prefixes of Llama 3.1 8B, 4K and 64K, "
    "fetched from a server of its own over a played link, or copied out of local memory, while compute "
    "windows of Table A8 pass; every byte compared.",
    settings=TtftOptions,
    measure=_measure,
    show=show,
    plot=plot,
    charts="DIR",
)
