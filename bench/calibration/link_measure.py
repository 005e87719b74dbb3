"""Measuring a link: what several requests and one move over each transport, then one request held to many rates."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.aggregate_bed import Bed, Chunks, warm
from bench.calibration.fetching import (
    clients,
    fetch_checked,
    fetch_together,
    fill,
    make_chunks,
    part,
    state_of_warm,
)
from bench.calibration.link_points import LinkPlan, SweptRequest
from bench.calibration.margin import Held, LinkFound, Moved, conclude_link
from bench.calibration.measure import Where
from bench.content import Bytes
from bench.progress import progress_bar
from bench.samples import State
from bench.server import running_server
from bench.ttft.link import FixedConfig, PlayedLink
from descriptors.descriptor import Delivery
from nixl_client.client import ObjectCacheClient, Transport


@dataclass
class LinksFound:
    """What was measured; `missing` gives reasons of transports that could not run."""

    state: State
    links: list[LinkFound] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass
class _Line:
    """One transport under measurement."""

    transport: Transport
    client: ObjectCacheClient
    together: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    held: dict[SweptRequest, list[Held]] = field(default_factory=dict)

    @property
    def moved(self) -> Moved:
        return Moved(tuple(self.together), tuple(self.single))


@dataclass(frozen=True, slots=True)
class _Filled:
    """A filled server, and the buffer that every client has registered."""

    plan: LinkPlan
    link: PlayedLink
    chunks: Chunks
    buffer: Bytes

    def move(self, line: _Line) -> None:
        """One round of each: several requests at once, of different chunks, and one alone."""
        count = self.plan.together_chunks
        prefixes = [part(self.chunks, index * count, count) for index in range(self.plan.together)]
        for some, rates in ((prefixes, line.together), (prefixes[:1], line.single)):
            times = fetch_together(line.client, line.transport, some, self.buffer, Delivery.LAYER_MAJOR)
            rates.append(sum(each.payload_bytes for each in some) / max(map(max, times)))

    def hold(self, line: _Line, request: SweptRequest, rate_bytes_per_s: float) -> None:
        """One request at the rate."""
        self.link.set(rate_bytes_per_s)
        chunks = part(self.chunks, 0, request.chunk_count)
        layers_s = fetch_checked(line.client, line.transport, chunks, self.buffer, Delivery.LAYER_MAJOR)
        line.held[request].append(Held(rate_bytes_per_s, layers_s))


def measure_links(plan: LinkPlan, transports: Sequence[str], where: Where) -> LinksFound:
    """Every transport that can run, in interleaved rounds; `transports` are values of Transport.

    Raises BenchServerError, ObjectCacheError, NixlFailure, VerificationError, TimeoutError and OSError.
    """
    found = LinksFound(state_of_warm(plan.stored_bytes, where.storage))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-link-", dir=where.folder)))
        config = folder / "config.toml"
        config.write_text(where.config_text)
        options = ["--config", str(config)] + (["--dram-bytes", "0"] if found.state is not State.DRAM else [])
        server = stack.enter_context(running_server(folder, options))
        anyone = stack.enter_context(server.client(Transport.HTTP))
        # It rewrites the file's [storage], of which a running server takes no notice.
        link = PlayedLink(server, config, anyone, FixedConfig(where.storage.dram_bytes, gather_s=0.0))
        chunks = make_chunks(plan.chunk_count, plan.layout, plan.seed)
        fill(server, chunks)
        buffer = anyone.allocate_buffer(plan.stored_bytes)
        wanted = [Transport(name) for name in transports]
        lines = [_Line(*each) for each in clients(server, wanted, buffer, found.missing, stack)]
        if lines and found.state is State.DRAM:
            warm(Bed(found.state, server, where.storage, {0: chunks}, buffer), lines[0].client)
        _measure(_Filled(plan, link, chunks, buffer), lines)
    found.links = [conclude_link(line.transport.value, line.moved, line.held, plan.seed) for line in lines]
    return found


def _measure(filled: _Filled, lines: Sequence[_Line]) -> None:
    plan = filled.plan
    with progress_bar((plan.runs + 1) * len(lines), "what the link moves") as advance:
        for round_index in range(plan.runs + 1):
            for line in lines:
                filled.move(line)
                advance(1)
                if round_index == 0:
                    line.together.clear()
                    line.single.clear()
    steps = _steps(filled, lines)
    with progress_bar(plan.sweep_runs * len(steps), "rates") as advance:
        for round_index in range(plan.sweep_runs):
            for step in steps if round_index % 2 == 0 else steps[::-1]:
                step()
                advance(1)
    filled.link.set(None)


def _steps(filled: _Filled, lines: Sequence[_Line]) -> list[Callable[[], None]]:
    """Each rate of each request over each transport, once."""
    plan, steps = filled.plan, []
    for line in lines:
        single = median(line.single)
        for point in plan.points:
            request = plan.request(point, single)
            line.held[request] = []
            steps += [_step(filled, line, request, rate) for rate in plan.rates(request, single)]
    return steps


def _step(filled: _Filled, line: _Line, request: SweptRequest, rate: float) -> Callable[[], None]:
    return lambda: filled.hold(line, request, rate)
