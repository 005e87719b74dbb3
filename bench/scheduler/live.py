"""Workloads A, B and C on a server, its transport and its clients, every variant in every round.

Link, margin and bytes are scaled by one factor, so that times are the paper's; S shrinks, N stays. A second factor may
shorten compute windows and bytes together. Rates and times are put back to the paper's sizes in what is reported.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.child import BaselineError, Child
from bench.content import STAMP_BYTES, VerificationError
from bench.paper import MARGIN_BYTES_PER_S, NUM_LAYERS, TOKEN_LAYER_BYTES, PaperRequest, workload
from bench.progress import progress_bar
from bench.scheduler.live_server import LiveServer, Rules, live_server
from bench.scheduler.player import PlayerJob, Seen
from bench.scheduler.results import Cell, Round
from bench.scheduler.variants import EQUAL, VARIANTS, Variant
from bench.server import BenchServer
from descriptors.units import KIB, MIB
from nixl_client.client import Transport

START_DELAY_S = 0.02
NO_LIMIT_BYTES_PER_S = 1e12
WARMING_ROUNDS = 3
SETTLE_S_MAX = 5.0
FILL_BYTES_PER_S = 256 * MIB
"""Surely slower than the server takes chunks into its memory: it proves their bytes first."""
FILL_BATCH_BYTES = 64 * MIB
PAYLOAD_BYTES = 16 * MIB
"""Of an unscaled link; so long a payload holds back one that is more urgent."""
PAYLOAD_BYTES_MIN = 256 * KIB
EPOCH_TRIALS_MAX = 3


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """What to run. `link_scale` shrinks rates and bytes, `time_scale` compute windows and bytes."""

    workloads: tuple[str, ...]
    variants: tuple[Variant, ...] = VARIANTS
    rounds: int = 3
    link_scale: float = 0.1
    time_scale: float = 0.25
    chunk_tokens: int = 64
    transport: Transport = Transport.SHM
    gather_s: float = 0.05
    seed: int = 1
    folder: Path | None = None

    @property
    def per_layer_chunk_bytes(self) -> int:
        """S."""
        return max(STAMP_BYTES, round(self.chunk_tokens * TOKEN_LAYER_BYTES * self.link_scale * self.time_scale))

    @property
    def payload_bytes_max(self) -> int:
        """Of the server; the time it takes is that of PAYLOAD_BYTES over the paper's link."""
        return max(PAYLOAD_BYTES_MIN, round(PAYLOAD_BYTES * self.link_scale))

    def requests(self) -> list[PaperRequest]:
        """All different ones of the workloads."""
        return list(dict.fromkeys(request for name in self.workloads for request in workload(name).requests))

    def compute_us(self, request: PaperRequest) -> int:
        """A layer's window."""
        return max(1, round(request.layer_compute_s * self.time_scale * 1e6))

    def rules(self, variant: Variant, link_bytes_per_s: float) -> Rules:
        """Of a link of so much, unscaled."""
        scale = self.link_scale
        return Rules(variant, link_bytes_per_s * scale, MARGIN_BYTES_PER_S * scale, self.gather_s)

    def job(self, server: BenchServer, index: int, request: PaperRequest) -> PlayerJob:
        """What the request's player does."""
        return PlayerJob(
            url=server.url,
            access_key=server.access_key,
            secret_key=server.secret_key,
            transport=self.transport.value,
            prefix=f"{index:02d}",
            chunk_count=request.cached_tokens // self.chunk_tokens,
            num_layers=NUM_LAYERS,
            chunk_tokens=self.chunk_tokens,
            per_layer_chunk_bytes=self.per_layer_chunk_bytes,
            seed=self.seed + index,
        )


@dataclass
class Live:
    """What was seen. `problem` says what wrong bytes came, None when all were right. `pace_errors` are
    of each request under held rates: how far its layers lay apart over what its rate says, less one. `repeated_runs`
    are runs that did not count, since their requests fell into several epochs.
    """

    cells: list[Cell] = field(default_factory=list)
    pace_errors: list[float] = field(default_factory=list)
    stored_bytes: int = 0
    repeated_runs: int = 0
    problem: str | None = None


def measure_live(settings: LiveSettings) -> Live:
    """Run it all; wrong bytes are the result's `problem`. Raises BaselineError, BenchServerError, ObjectCacheError."""
    requests = settings.requests()
    live = Live()
    rules = settings.rules(EQUAL, NO_LIMIT_BYTES_PER_S)
    payloads = [request.cached_tokens * NUM_LAYERS * settings.per_layer_chunk_bytes for request in requests]
    live.stored_bytes = sum(payloads) // settings.chunk_tokens
    dram_bytes = live.stored_bytes + live.stored_bytes // 4 + 64 * MIB
    with ExitStack() as stack:
        served = stack.enter_context(live_server(settings.folder, dram_bytes, settings.payload_bytes_max, rules))
        jobs = [settings.job(served.server, index, request) for index, request in enumerate(requests)]
        _fill(served.server, jobs)
        players = dict(zip(requests, _start(jobs, stack), strict=True))
        run = _Runner(settings, served, players, live)
        try:
            run.warm(live.stored_bytes)
            live.cells = run.rounds()
        except VerificationError as error:
            live.problem = str(error)
    return live


class _Runner:
    def __init__(
        self, settings: LiveSettings, served: LiveServer, players: Mapping[PaperRequest, Child], live: Live
    ) -> None:
        self._settings = settings
        self._served = served
        self._players = players
        self._live = live

    def warm(self, stored_bytes: int) -> None:
        """Until connections stand and chunks are in the server's memory."""
        settle_s = min(SETTLE_S_MAX, stored_bytes / FILL_BYTES_PER_S)
        for round_index in range(WARMING_ROUNDS):
            self._together(dict.fromkeys(self._players, 1))
            if round_index:
                time.sleep(settle_s)

    def rounds(self) -> list[Cell]:
        """Every workload and variant in every round, in an order of the round's own."""
        settings = self._settings
        shuffle = random.Random(settings.seed)
        found: dict[tuple[str, Variant], list[Round]] = {
            (name, each): [] for name in settings.workloads for each in settings.variants
        }
        with progress_bar(settings.rounds * len(settings.workloads) * (len(settings.variants) + 1), "live") as advance:
            for _ in range(settings.rounds):
                for name in settings.workloads:
                    tasks: list[Variant | None] = [None, *settings.variants]
                    shuffle.shuffle(tasks)
                    seen: dict[Variant | None, list[Seen]] = {}
                    for task in tasks:
                        seen[task] = self._run(name, task)
                        advance(1)
                    for each in settings.variants:
                        found[name, each].append(self._round(name, seen[each], seen[None]))
        return [Cell(name, each, tuple(rounds)) for (name, each), rounds in found.items()]

    def _run(self, name: str, variant: Variant | None) -> list[Seen]:
        """One workload once; None: over a link that is not limited, by the same code."""
        paper = workload(name)
        link = NO_LIMIT_BYTES_PER_S if variant is None else paper.budget_bytes_per_s
        self._served.go_by(self._settings.rules(variant or EQUAL, link))
        windows = {request: self._settings.compute_us(request) for request in paper.requests}
        for _ in range(EPOCH_TRIALS_MAX):
            seen = self._together(windows)
            if len({each.epoch for each in seen}) == 1:
                self._note_pace(name, variant, seen)
                return seen
            self._live.repeated_runs += 1
        raise BaselineError(f"{name}: the requests did not come within {self._settings.gather_s} s of each other")

    def _together(self, windows: Mapping[PaperRequest, int]) -> list[Seen]:
        """Fetch and play these at the same moment. Raises VerificationError, BaselineError."""
        players = [self._players[request] for request in windows]
        for player, compute_us in zip(players, windows.values(), strict=True):
            player.tell(str(compute_us))
        for player in players:
            player.answer()
        start_at_s = time.monotonic() + START_DELAY_S
        for player in players:
            player.tell(repr(start_at_s))
        answers = [json.loads(player.answer()) for player in players]
        for answer in answers:
            if "problem" in answer:
                raise (VerificationError if answer["wrong_bytes"] else BaselineError)(answer["problem"])
        return [Seen(**{**answer["seen"], "ready_s": tuple(answer["seen"]["ready_s"])}) for answer in answers]

    def _round(self, name: str, seen: Sequence[Seen], no_limit: Sequence[Seen]) -> Round:
        settings = self._settings

        def unscaled_s(each: Seen) -> float:
            return (each.ttft_s - settings.gather_s) / settings.time_scale

        return Round(
            tuple(map(unscaled_s, seen)),
            tuple(
                settings.compute_us(each) * NUM_LAYERS / 1e6 / settings.time_scale for each in workload(name).requests
            ),
            tuple(map(unscaled_s, no_limit)),
            tuple(each.rate_bytes_per_s / settings.link_scale for each in seen),
        )

    def _note_pace(self, name: str, variant: Variant | None, seen: Sequence[Seen]) -> None:
        if variant is None or variant.is_work_conserving:
            return
        for request, each in zip(workload(name).requests, seen, strict=True):
            count = request.cached_tokens // self._settings.chunk_tokens
            layer_bytes = count * self._settings.per_layer_chunk_bytes
            if each.rate_bytes_per_s:
                self._live.pace_errors.append(each.spacing_s * each.rate_bytes_per_s / layer_bytes - 1)


def _start(jobs: Sequence[PlayerJob], stack: ExitStack) -> list[Child]:
    """Client processes, all at once; `stack` ends them."""

    def start(job: PlayerJob) -> Child:
        child = Child("bench.scheduler.player", job.to_line())
        stack.callback(child.close)
        return child

    with ThreadPoolExecutor(len(jobs)) as starters:
        return list(starters.map(start, jobs))


def _fill(server: BenchServer, jobs: Sequence[PlayerJob]) -> None:
    with server.client(Transport.HTTP) as client, progress_bar(len(jobs), "storing chunks") as advance:
        for job in jobs:
            content, keys = job.content(), job.keys()
            batch = max(1, FILL_BATCH_BYTES // job.layout.chunk_bytes)
            for first in range(0, len(keys), batch):
                some = keys[first : first + batch]
                client.put_chunks(some, [content.chunk(first + index) for index in range(len(some))])
            advance(1)
