"""Measuring on servers of our own, every byte compared: for Theta both orders of every payload over every transport;
for a link what several requests and one move over each transport, then one request held to many rates.
"""

from __future__ import annotations

import tempfile
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from nixl_client.client import Client, Transport
from nixl_client.transports.shm import ShmUnavailableError
from objectcache.adapters.nixl_agent import NixlFailure
from objectcache.calibration.chunks import (
    Chunks,
    StoredFiles,
    fetch_checked,
    fetch_together,
    make_chunks,
    state_of_warm,
    store_chunks,
    warm,
)
from objectcache.calibration.content import Bytes
from objectcache.calibration.link import LinkPlan, Row, SweptRequest, link_row
from objectcache.calibration.samples import RoundTurns, State, interleaved
from objectcache.calibration.servers import FixedConfig, LocalServer, PlayedLink, running_server
from objectcache.calibration.theta import CalibrationPlan, point_row
from storage_server.settings import StorageSettings

ORDERS = (Delivery.CHUNK_MAJOR, Delivery.LAYER_MAJOR)


@dataclass(frozen=True, slots=True)
class Where:
    """`folder` is on the disk to be measured (None: the system's temporary folder); `storage` what servers run with,
    `config_text` the same as TOML.
    """

    folder: Path | None
    storage: StorageSettings
    config_text: str


@dataclass(frozen=True, slots=True)
class _Bed:
    """A filled server and its config file, and of each transport that can run a client that has registered `buffer`."""

    server: LocalServer
    config: Path
    buffer: Bytes
    clients: dict[Transport, Client]


def measure(plan: CalibrationPlan, states: Sequence[State], transports: Sequence[str], where: Where) -> dict[str, Any]:
    """Measure each state in a server of its own; `transports` are values of Transport. The result's `points`, `missing`
    with reasons of transports that could not run, and `remarks`, which say how a state came about.

    Raises LocalServerError, ObjectCacheError, NixlFailure, VerificationError, TimeoutError and OSError.
    """
    points, missing, remarks = list[dict[str, Any]](), dict[str, str](), dict[str, str]()
    stored = [
        make_chunks(family.counts[-1], family.layout, plan.seed + index, f"calibrate {plan.seed + index}")
        for index, family in enumerate(plan.families)
    ]
    for state in states:
        with ExitStack() as stack:
            bed = _filled(
                where,
                state,
                stored=stored,
                buffer_bytes=max(plan.largest_bytes),
                transports=transports,
                missing=missing,
                stack=stack,
            )
            if not bed.clients:
                continue
            files = StoredFiles(bed.server.data_files() if state is State.COLD else [])
            tasks = [
                (
                    point_row(family, count, transport.value, state),
                    partial(_layers_s, client, chunks.part(0, count), bed.buffer, transport, files),
                )
                for family, chunks in zip(plan.families, stored, strict=True)
                for count in family.counts
                for transport, client in bed.clients.items()
            ]
            for round_index, (point, fetch) in interleaved(tasks, plan.runs, f"calibrating, {state.value}"):
                # The orders alternate, so that neither always finds what the other left behind.
                times = {order: fetch(order) for order in (ORDERS if round_index % 2 == 0 else ORDERS[::-1])}
                if round_index > 0:
                    chunk_s, layers_s = (times[order] for order in ORDERS)
                    point["runs"].append({"chunk_major_s": max(chunk_s), "layers_s": list(layers_s)})
        points += [point for point, _ in tasks]
        remarks[state.value] = "from the server's DRAM tier" if state is State.DRAM else "from the page cache"
        if state is State.COLD:
            stayed = f"{max(files.resident_shares):.1%} stayed"
            remarks[state.value] = f"dropped from the page cache before each; at most {stayed}"
    return {"remarks": remarks, "missing": missing, "points": points}


def _layers_s(
    client: Client,
    chunks: Chunks,
    buffer: Bytes,
    transport: Transport,
    files: StoredFiles,
    delivery: Delivery,
) -> tuple[float, ...]:
    files.drop()
    return fetch_checked(client, chunks, buffer, delivery, transport).layers_s


def _filled(
    where: Where,
    state: State,
    stored: Sequence[Chunks],
    buffer_bytes: int,
    transports: Sequence[str],
    missing: MutableMapping[str, str],
    stack: ExitStack,
) -> _Bed:
    """A server with the settings under calibration, without its DRAM tier unless the state is that, which has the
    chunks, in memory if they are to be there; `missing` is told why a transport cannot run here.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-calibrate-", dir=where.folder)))
    config = folder / "config.toml"
    config.write_text(where.config_text)
    options = ["--config", str(config)] + (["--dram-bytes", "0"] if state is not State.DRAM else [])
    server = stack.enter_context(running_server(folder, options))
    for chunks in stored:
        store_chunks(server, chunks)
    buffer = stack.enter_context(server.client(Transport.HTTP)).allocate_buffer(buffer_bytes)
    clients = {}
    for transport in map(Transport, transports):
        client = stack.enter_context(server.client(transport))
        try:
            client.register_buffer(buffer)
        except (ImportError, NixlFailure, ShmUnavailableError, ObjectCacheError) as error:
            missing[transport.value] = str(error)
            continue
        clients[transport] = client
    if clients and state is State.DRAM:
        warm(server, next(iter(clients.values())), stored, buffer)
    return _Bed(server, config, buffer, clients)


def measure_links(plan: LinkPlan, transports: Sequence[str], where: Where) -> dict[str, Any]:
    """Every transport that can run, in interleaved rounds; `transports` are values of Transport. `state`, `missing`,
    which has reasons of transports that could not run, and `links`, a row of calibration.link for each that could.

    Raises LocalServerError, ObjectCacheError, NixlFailure, VerificationError, TimeoutError and OSError.
    """
    state, missing = state_of_warm(plan.stored_bytes, where.storage), dict[str, str]()
    chunks = make_chunks(plan.chunk_count, plan.layout, plan.seed, f"calibrate {plan.seed}")
    count = plan.together_chunks
    prefixes = [chunks.part(index * count, count) for index in range(plan.together)]
    with ExitStack() as stack:
        bed = _filled(
            where,
            state,
            stored=[chunks],
            buffer_bytes=plan.stored_bytes,
            transports=transports,
            missing=missing,
            stack=stack,
        )
        moved = {transport: (list[float](), list[float]()) for transport in bed.clients}
        for round_index, transport in interleaved(list(moved), plan.runs, "what the link moves"):
            for some, rates in zip((prefixes, prefixes[:1]), moved[transport], strict=True):
                client = bed.clients[transport]
                found = fetch_together(client, some, bed.buffer, Delivery.LAYER_MAJOR, transport)
                if round_index > 0:
                    rates.append(sum(each.payload_bytes for each in some) / max(max(each.layers_s) for each in found))
        # It rewrites the file's [storage], of which a running server takes no notice.
        fixed = FixedConfig(where.storage.dram_bytes, gather_s=0.0)
        link = PlayedLink(bed.server, bed.config, stack.enter_context(bed.server.client(Transport.HTTP)), fixed)
        held: dict[Transport, dict[SweptRequest, list[Row]]] = {transport: {} for transport in moved}
        steps = [
            (transport, request, rate)
            for transport, (_, single) in moved.items()
            for request in (plan.request(point, median(single)) for point in plan.points)
            for rate in plan.rates(request, median(single))
        ]
        for _, step in interleaved(steps, plan.sweep_runs, "rates", uncounted=0, turns=RoundTurns.ALTERNATING):
            transport, request, rate = step
            link.set(rate)
            one = chunks.part(0, request.chunk_count)
            layers_s = fetch_checked(bed.clients[transport], one, bed.buffer, Delivery.LAYER_MAJOR, transport).layers_s
            held[transport].setdefault(request, []).append({"rate_bytes_per_s": rate, "layers_s": list(layers_s)})
        link.set(None)
    links = {each.value: link_row(*rates, held[each], plan.seed) for each, rates in moved.items()}
    return {"state": state.value, "missing": missing, "links": links}
