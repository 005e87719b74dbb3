"""Workloads A, B and C on a server, its transport and its clients, every variant in every round.

Link, margin and bytes are scaled by one factor, so that times are the paper's; S shrinks, N stays. A second factor may
shorten compute windows and bytes together. Rates and times are put back to the paper's sizes in what is reported.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.beds.fetchers import Job, Order, Seen, fetch_at_once, fill, start_fetchers, warm_up
from bench.beds.processes import BaselineError, Child
from bench.core import options
from bench.core.experiment import plain
from bench.core.options import each as each_of
from bench.core.options import real
from bench.core.show import Json
from bench.paper.scheduler.cells import cell, ratios, targets
from bench.paper.scheduler.simulation import EPOCH_S_MAX, EQUAL, VARIANTS, Variant
from bench.paper.tables import MARGIN_BYTES_PER_S, NUM_LAYERS, TOKEN_LAYER_BYTES, WORKLOADS, PaperRequest, workload
from descriptors.descriptor import CHUNK_TOKENS_MAX
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from nixl_client.client import Transport
from objectcache.calibration.content import STAMP_BYTES, VerificationError
from objectcache.calibration.samples import progress_bar, spread
from objectcache.calibration.servers import ConfiguredServer, configured_server, is_same_rate
from objectcache.cli.config_text import table_lines

NO_LIMIT_BYTES_PER_S = 1e12
PAYLOAD_BYTES = 16 * MIB
"""The payload of an unscaled link; so long a payload holds back one that is more urgent."""
PAYLOAD_BYTES_MIN = 256 * KIB
EPOCH_TRIALS_MAX = 3
CHUNKWISE_FRACTION = 0.001
"""The part of the link that is kept for chunk-major requests, of which there are none."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the scheduler goes by. `link_bytes_per_s` is the layer-major requests' part of the link."""

    variant: Variant
    link_bytes_per_s: float
    margin_bytes_per_s: float
    gather_s: float

    def rates(self) -> dict[str, float]:
        """The settings `[scheduler]`."""
        return {
            "link_bytes_per_s": self.link_bytes_per_s / (1 - CHUNKWISE_FRACTION),
            "margin_bytes_per_s": self.margin_bytes_per_s,
        }

    def internals(self) -> dict[str, str | float]:
        """The settings `[internals.scheduler]`."""
        return {
            "policy": "slack" if self.variant.policy is None else self.variant.policy.value,
            "rates": "work-conserving" if self.variant.is_work_conserving else "held",
            "gather_s": self.gather_s,
            "epoch_s_max": EPOCH_S_MAX,
            "chunkwise_fraction": CHUNKWISE_FRACTION,
        }

    def table(self) -> str:
        """The same as TOML."""
        internals = table_lines(("internals", "scheduler"), self.internals())
        return "\n".join([*table_lines(("scheduler",), self.rates()), *internals, ""])


def go_by(served: ConfiguredServer, other_tables: str, rules: Rules) -> None:
    """Change the scheduler's rules. Raises LocalServerError when the server does not take them."""
    rates, internals = rules.rates(), rules.internals()

    def holds(status: Mapping[str, Any]) -> bool:
        return all(is_same_rate(status[name], rate) for name, rate in rates.items()) and all(
            status[name] == internals[name] for name in ("policy", "rates")
        )

    served.change(other_tables + rules.table(), holds, rules)


LIVE = "live"
TRANSPORTS = (Transport.SHM, Transport.UCX, Transport.HTTP)
LINK_SCALE_HELP = "link and bytes over the paper's, N kept and S shrunk"
TIME_SCALE_HELP = "compute windows, and bytes once more, over the paper's; 1 is its own times; default: 0.25"
GATHER_HELP = "how long an epoch's first request waits for company"


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """What to run. `link_scale` shrinks rates and bytes, `time_scale` compute windows and bytes."""

    workloads: tuple[str, ...] = options.setting("--workloads", WORKLOADS, ("A",), each_of(str, WORKLOADS))
    variants: tuple[Variant, ...] = VARIANTS
    rounds: int = options.runs(3, group=LIVE)
    link_scale: float = options.setting("--link-scale", 0.1, 0.05, real(1e-4, 10), LINK_SCALE_HELP, LIVE)
    time_scale: float = options.setting("--time-scale", 0.25, 0.005, real(1e-4, 10), TIME_SCALE_HELP, LIVE)
    chunk_tokens: int = options.count("-G --chunk-tokens", 64, most=CHUNK_TOKENS_MAX, group=LIVE)
    transport: Transport = options.choice("--transport", TRANSPORTS, Transport.SHM, group=LIVE)
    gather_s: float = options.setting("--gather-s", 0.05, 0.05, real(0, 10), GATHER_HELP, LIVE)
    seed: int = options.sized(1)
    folder: Path | None = options.folder("for the store", group=LIVE)

    @property
    def per_layer_chunk_bytes(self) -> int:
        """S."""
        return max(STAMP_BYTES, round(self.chunk_tokens * TOKEN_LAYER_BYTES * self.link_scale * self.time_scale))

    def layer_bytes(self, request: PaperRequest) -> int:
        """N*S."""
        return request.cached_tokens // self.chunk_tokens * self.per_layer_chunk_bytes

    def requests(self) -> list[PaperRequest]:
        """All different ones of the workloads."""
        return list(dict.fromkeys(request for name in self.workloads for request in workload(name).requests))

    def compute_us(self, request: PaperRequest) -> int:
        """A layer's window."""
        return max(1, round(request.layer_compute_s * self.time_scale * 1e6))

    def rules(self, variant: Variant, link_bytes_per_s: float) -> Rules:
        """The rules of a link of so much, unscaled."""
        scale = self.link_scale
        return Rules(variant, link_bytes_per_s * scale, MARGIN_BYTES_PER_S * scale, self.gather_s)


def measure_live(settings: LiveSettings) -> tuple[dict[str, Any], str | None]:
    """What was seen, without a cell where wrong bytes came; and what wrong bytes came. Raises FAILURES."""
    requests = settings.requests()
    stored_bytes = NUM_LAYERS * sum(map(settings.layer_bytes, requests))
    dram_bytes = stored_bytes + stored_bytes // 4 + 64 * MIB
    payload_bytes_max = max(PAYLOAD_BYTES_MIN, round(PAYLOAD_BYTES * settings.link_scale))
    storage = f"[storage]\ndram_bytes = {dram_bytes}\n"
    storage += f"[internals.storage]\ndirect_payload_bytes = {payload_bytes_max}\n\n"
    rules = settings.rules(EQUAL, NO_LIMIT_BYTES_PER_S)
    layout = ChunkLayout(NUM_LAYERS, settings.chunk_tokens, settings.per_layer_chunk_bytes)
    cells, problem = list[Json](), None
    with ExitStack() as stack:
        served = stack.enter_context(configured_server(settings.folder, storage + rules.table()))
        jobs = [
            Job(
                served.server,
                (settings.transport,),
                f"scheduler/{index:02d}",
                request.cached_tokens // settings.chunk_tokens,
                layout,
                settings.seed + index,
            )
            for index, request in enumerate(requests)
        ]
        fill(served.server, jobs)
        run = _Run(settings, served, storage, dict(zip(requests, start_fetchers(jobs, stack), strict=True)))
        try:
            warm_up(lambda: run.together(dict.fromkeys(requests, 1)), stored_bytes)
            cells = run.rounds()
        except VerificationError as error:
            problem = str(error)
    found = {
        "stored_bytes": stored_bytes,
        "added_ttft_is_over": "computing alone",
        "repeated_runs": run.repeated,
        "targets": targets(ratios(cells)),
        "pace_error": plain(spread(run.pace_errors)) if run.pace_errors else None,
        "cells": cells,
    }
    return found, problem


@dataclass
class _Run:
    """`repeated` counts runs that did not count, since their requests fell into several epochs. `pace_errors` are of
    each request under held rates: how far its layers lay apart over what its rate says, less one, without the sign.
    """

    settings: LiveSettings
    served: ConfiguredServer
    storage: str
    clients: Mapping[PaperRequest, Child]
    repeated: int = 0
    pace_errors: list[float] = field(default_factory=list)

    def together(self, windows: Mapping[PaperRequest, int]) -> list[Seen]:
        """Fetch and play these at the same moment. Raises VerificationError, BaselineError."""
        transport = self.settings.transport
        orders = [(self.clients[each], Order(transport, layer_compute_us=us)) for each, us in windows.items()]
        return [seen for (seen,) in fetch_at_once(orders)]

    def rounds(self) -> list[Json]:
        """Every workload and variant in every round, in an order of the round's own."""
        settings = self.settings
        shuffle = random.Random(settings.seed)
        found = {(name, each): list[Json]() for name in settings.workloads for each in settings.variants}
        with progress_bar(settings.rounds * len(settings.workloads) * (len(settings.variants) + 1), "live") as advance:
            for name in settings.workloads * settings.rounds:
                tasks: list[Variant | None] = [None, *settings.variants]
                shuffle.shuffle(tasks)
                windows = {request: settings.compute_us(request) for request in workload(name).requests}
                seen = dict[Variant | None, list[Seen]]()
                for task in tasks:
                    seen[task] = self._run(name, windows, task)
                    advance(1)
                ttfts_s = {
                    task: [(each.ttft_s - settings.gather_s) / settings.time_scale for each in some]
                    for task, some in seen.items()
                }
                for variant in settings.variants:
                    values = {
                        "ttfts_s": ttfts_s[variant],
                        "compute_s": [us * NUM_LAYERS / 1e6 / settings.time_scale for us in windows.values()],
                        "no_limit_s": ttfts_s[None],
                        "rates_bytes_per_s": [each.rate_bytes_per_s / settings.link_scale for each in seen[variant]],
                    }
                    found[name, variant].append(values)
        return [cell(name, each.name, rounds) for (name, each), rounds in found.items()]

    def _run(self, name: str, windows: Mapping[PaperRequest, int], variant: Variant | None) -> list[Seen]:
        """One workload once; None: over a link that is not limited, by the same code."""
        link = NO_LIMIT_BYTES_PER_S if variant is None else workload(name).budget_bytes_per_s
        go_by(self.served, self.storage, self.settings.rules(variant or EQUAL, link))
        for _ in range(EPOCH_TRIALS_MAX):
            seen = self.together(windows)
            if len({each.epoch for each in seen}) > 1:
                self.repeated += 1
                continue
            if variant is not None and not variant.is_work_conserving:
                for request, each in zip(windows, seen, strict=True):
                    if each.rate_bytes_per_s:
                        layer_s = self.settings.layer_bytes(request) / each.rate_bytes_per_s
                        self.pace_errors.append(abs(each.spacing_s / layer_s - 1))
            return seen
        raise BaselineError(f"{name}: the requests did not come within {self.settings.gather_s} s of each other")
