"""`objectcache bench upstream` on the command line: every way, in front of every service, in the same rounds."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.beds.processes import BaselineError
from bench.beds.s3_servers import Peer, PeerName, running_moto, running_ours, running_rgw
from bench.core.experiment import Experiment, WrongUse, published
from bench.core.options import Options, filled, names, some_of
from bench.core.show import Json
from bench.core.targets import Side, Target
from bench.experiments.upstream.bed import Bed, Shape, Taken, Way
from bench.experiments.upstream.show import plot, show
from calibration.content import VerificationError
from calibration.samples import Spread, Turns, interleaved, spread
from descriptors.layout import ChunkLayout
from descriptors.units import KIB
from nixl_client.client import Transport

COLD_RATE_MIN = 0.9
FIRST_LAYER_MAX = 2.0
ASKED_MAX = 1.2
DRAM_RATE_MIN = 0.9
"""It should be as without upstream; single rounds of either lie further apart than this."""
SERVICES = (PeerName.OURS, PeerName.MOTO, PeerName.RGW)
SAID = {PeerName.OURS: "a second ObjectCache", PeerName.MOTO: "moto", PeerName.RGW: "Ceph RGW"}


@dataclass(frozen=True, slots=True)
class UpstreamBenchSettings:
    """Prefixes of N chunks with L layers of S bytes."""

    services: tuple[PeerName, ...]
    chunk_count: int
    num_layers: int
    per_layer_chunk_bytes: int
    runs: int
    seed: int
    transport: Transport
    moto_python: str
    folder: Path | None

    @property
    def shape(self) -> Shape:
        """Of every prefix."""
        return Shape(self.chunk_count, ChunkLayout(self.num_layers, 16, self.per_layer_chunk_bytes))


def measure_upstream(settings: UpstreamBenchSettings, origin: Mapping[str, Any]) -> Json:
    """Everything, with the targets. Wrong bytes are the problem of the result; a service that is not here is named."""
    starts: dict[PeerName, Callable[[], AbstractContextManager[Peer]]] = {
        PeerName.OURS: partial(running_ours, settings.folder, []),
        PeerName.MOTO: partial(running_moto, settings.moto_python, settings.folder),
        PeerName.RGW: partial(running_rgw, settings.folder),
    }
    found: dict[str, Json] = {}
    absent: dict[str, str] = {}
    problem = None
    for name in settings.services:
        with ExitStack() as stack:
            try:
                peer = stack.enter_context(starts[name]())
            except BaselineError as error:
                if name is PeerName.OURS:
                    raise
                absent[SAID[name]] = str(error)
                continue
            try:
                found[SAID[name]] = {"version": peer.version, **_measured(settings, peer, stack)}
            except VerificationError as error:
                problem = f"{SAID[name]}: {error}"
                break
    targets = [target for name, service in found.items() for target in _targets(name, service)]
    listed = [{**target.json(), "case": target.case, "side": target.side.value} for target in targets]
    return published("upstream", origin, settings, problem, upstream=found, absent=absent, targets=listed)


def _measured(settings: UpstreamBenchSettings, peer: Peer, stack: ExitStack) -> Json:
    """One service. In each round a new prefix comes from there in every way, the cold one before those it warms."""
    bed = Bed(peer.target, settings.shape, settings.transport, settings.folder, stack)
    ways, taken = list(Way), dict[Way, list[Taken]]()
    prefix, prefix_round = None, None
    for round_index, way in interleaved(ways, settings.runs, SAID[peer.name], turns=Turns.SAME):
        if prefix is None or prefix_round != round_index:
            if prefix is not None:
                bed.removed(prefix)
            prefix, prefix_round = bed.stored(settings.seed + round_index), round_index
        sample = bed.sample(way, prefix)
        if round_index > 0:
            taken.setdefault(way, []).append(sample)
    assert prefix is not None
    asked = bed.asked_over_needed(prefix)
    bed.removed(prefix)
    return {
        "ways": {way.value: _described(samples, settings.shape.nbytes) for way, samples in taken.items()},
        "ratios": {name: spread(values) for name, values in _ratios(taken).items()},
        "asked_over_needed": asked,
    }


def _described(samples: list[Taken], nbytes: int) -> Json:
    return {
        "first_layer_s": spread([sample.first_s for sample in samples]),
        "whole_s": spread([sample.whole_s for sample in samples]),
        "bytes_per_s": statistics.median(nbytes / sample.whole_s for sample in samples),
        "samples": [[sample.first_s, sample.whole_s] for sample in samples],
    }


def _ratios(taken: Mapping[Way, list[Taken]]) -> dict[str, list[float]]:
    """Round by round, rates and times over those of the native client and of the embedded server."""

    def each(ratio: Callable[[Taken, Taken], float], one: Way, other: Way) -> list[float]:
        return [ratio(ours, theirs) for ours, theirs in zip(taken[one], taken[other], strict=True)]

    def rate(ours: Taken, theirs: Taken) -> float:
        return theirs.whole_s / ours.whole_s

    return {
        "cold_over_native": each(rate, Way.COLD, Way.NATIVE),
        "cache_over_native": each(rate, Way.CACHE, Way.NATIVE),
        "dram_over_native": each(rate, Way.DRAM, Way.NATIVE),
        "dram_over_embedded": each(rate, Way.DRAM, Way.EMBEDDED),
        "first_layer_over_native": each(lambda ours, theirs: ours.first_s / theirs.whole_s, Way.COLD, Way.NATIVE_LAYER),
    }


def _targets(name: str, service: Json) -> list[Target]:
    ratios: Mapping[str, Spread] = service["ratios"]

    def target(what: str, limit: float, ratio: str, side: Side) -> Target:
        return Target(what, limit, ratios[ratio].median, side, case=name)

    return [
        target("cold rate over the native client's", COLD_RATE_MIN, "cold_over_native", Side.AT_LEAST),
        target("first layer over the native client's", FIRST_LAYER_MAX, "first_layer_over_native", Side.AT_MOST),
        Target("bytes got over bytes asked for", ASKED_MAX, service["asked_over_needed"], Side.AT_MOST, case=name),
        target("DRAM over DRAM without upstream", DRAM_RATE_MIN, "dram_over_embedded", Side.AT_LEAST),
    ]


def _declare(options: Options) -> None:
    text = f"default: {names(SERVICES)}; those that are not installed are left out"
    options.add("--services", type=some_of(SERVICES), metavar="LIST", full=SERVICES, smoke=SERVICES[:1], help=text)
    options.shape((64, 4), (16, 4), (128 * KIB, 64 * KIB), "of a prefix")
    options.runs(7)
    options.choice("--transport", tuple(Transport)[1:], Transport.SHM, "of ours")
    options.add("--moto", default=sys.executable, metavar="PYTHON", help="an interpreter that has moto[server]")
    options.seed()
    options.folder()


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    if importlib.util.find_spec("obstore") is None:
        raise WrongUse("the native client is obstore: pip install 'objectcache[bench]'")
    return measure_upstream(filled(UpstreamBenchSettings, options, moto_python=options.moto), origin)


UPSTREAM = Experiment(
    name="upstream",
    help="prefixes in another S3 service: through us cold, from the cache, from DRAM, and by a native client",
    description="Stores prefixes in an S3 service. They are fetched through a server of ours that stands before it: "
    "cold, from the files of its cache, and from DRAM; and straight from the service by obstore. A second ObjectCache, "
    "moto and Ceph RGW are the services.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
)
