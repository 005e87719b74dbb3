"""`bench lmcache`: LMCache's multiprocess server over our L2 adapter, over LMCache's own for S3 through the same
gateway, and over its two for files: storing, finding and loading a batch of chunks.

The adapters run in a process of their own, made and called as LMCache's server does (beds/kv_peers/lmcache_l2_host).
Ways take turns in each round, with chunks that nobody has stored, and an adapter that has stored none of them finds and
loads; all chunks that come are compared. All stores have what they are asked for in memory: a server's, or the page
cache. None waits for a disk: the server's durability is relaxed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from bench.beds.cache_layers import (
    CacheLayer,
    beside_a_server,
    problem_of,
    rows_of,
    seconds_of,
    section_of,
    seed_of,
)
from bench.beds.kv_peers.install import LMCACHE_L2
from bench.beds.kv_peers.work import S3Target
from bench.core import options
from bench.core.experiment import Experiment, WrongUse, published
from bench.core.plots import Chart, Kind, draw
from bench.core.rounds import Side, Target, interval, paired, sampled
from bench.core.show import Json, Section
from objectcache.calibration.servers import BUCKET, LocalServer

L2_HOST = "bench.beds.kv_peers.lmcache_l2_host"
OPERATIONS = ("store", "lookup", "load")
RATIO_MIN = 1.0


class L2Way(Enum):
    """An L2 adapter of LMCache's server."""

    OURS = "objectcache"
    """Chunks arrive in memory that the server fills."""
    OURS_HTTP = "objectcache_http"
    """As from a server on another host."""
    S3 = "s3"
    FS = "fs"
    FS_NATIVE = "fs_native"


@dataclass(frozen=True, slots=True)
class LMCacheSettings:
    """A batch of `chunks`: by default what `lmcache server --chunk-size 256` has for Llama 3.1 8B in 8 layers."""

    ways: tuple[L2Way, ...] = options.choice("--ways", L2Way, tuple(L2Way))
    chunks: int = options.count("--chunks", 16, 4, most=128, text="in a batch")
    chunk_bytes: int = options.count("--chunk-bytes", 8 << 20, 64 << 10, least=4096, most=64 << 20)
    runs: int = options.runs(9)
    seed: int = options.seed()
    folder: Path | None = options.folder()


def measure_lmcache(settings: LMCacheSettings, origin: Mapping[str, Any]) -> Json:
    """Measure all ways; a chunk that did not come right is the result's `problem`. Raises WrongUse, FAILURES."""
    if not LMCACHE_L2.is_installed:
        raise WrongUse("LMCache is not installed: make engines")
    with beside_a_server(settings.folder, L2_HOST, LMCACHE_L2.python, "LMCache", _proxy) as (server, layer, files):
        for way in settings.ways:
            adapter = adapter_of(way, _target(server), files)
            layer.ask("open", bed=way.value, config=adapter, chunks=settings.chunks, chunk_bytes=settings.chunk_bytes)
        ways: dict[L2Way, Callable[[int], Json]] = {
            way: partial(_timed, layer, way, settings, place) for place, way in enumerate(settings.ways)
        }
        samples = sampled(ways, settings.runs, "lmcache", uncounted=2)
    rows = rows_of(samples, OPERATIONS, {"chunks": settings.chunks, "chunk_bytes": settings.chunk_bytes})
    judged = targets_of(seconds_of(samples, OPERATIONS))
    problem = problem_of(samples, "chunks")
    return published("lmcache", origin, settings, problem, lmcache=rows, targets=[target.json() for target in judged])


def targets_of(seconds: Mapping[L2Way, Mapping[str, Sequence[float]]]) -> list[Target]:
    """How much sooner ours stores, finds and loads, in the same rounds, in each of our ways: LMCache's own adapter for
    an S3 service over it.
    """
    found = []
    for operation in OPERATIONS:
        for way in (L2Way.OURS, L2Way.OURS_HTTP):
            what = f"{operation}, s3 over {way.value}"
            if way not in seconds or L2Way.S3 not in seconds:
                found.append(Target(what, RATIO_MIN, None, Side.AT_LEAST, reason="not all ways were measured"))
                continue
            ratio = interval(paired(seconds[L2Way.S3][operation], seconds[way][operation]))
            found.append(Target(what, RATIO_MIN, ratio, Side.AT_LEAST))
    return found


def show(result: Json) -> dict[str, Section]:
    """One line for each operation and way, and the targets."""
    return {"lmcache": section_of(result["lmcache"], result["targets"], "adapter", L2Way.S3)}


def plot(result: Json, path: Path) -> None:
    """The time of each operation by adapter."""
    draw(CHART, result["lmcache"], "LMCache's L2 adapters; medians, least and greatest", path)


def adapter_of(way: L2Way, target: S3Target, files: Path) -> Json:
    """The configuration of an adapter, as `lmcache server --l2-adapter` takes it; defaults for all that is not said."""
    match way:
        case L2Way.FS | L2Way.FS_NATIVE:
            return {"type": way.value, "base_path": str(files / way.value)}
        case L2Way.S3:
            return {
                "type": "s3",
                "s3_endpoint": f"s3://{target.address}",
                "s3_region": target.region,
                "s3_prefer_http2": False,
                "disable_tls": True,
                "aws_access_key_id": target.access_key,
                "aws_secret_access_key": target.secret_key,
            }
    return {
        "type": "plugin",
        "module_path": "nixl_client.connectors.lmcache",
        "class_name": "ObjectCacheL2Adapter",
        "adapter_params": {
            "endpoint": target.url,
            "bucket": target.bucket,
            "transport": "http" if way is L2Way.OURS_HTTP else "auto",
        },
    }


def _target(server: LocalServer) -> S3Target:
    return S3Target(server.url, server.access_key, server.secret_key, BUCKET, "us-east-1")


def _proxy(server: LocalServer) -> Mapping[str, str]:
    """LMCache's adapter for S3 finds a bucket by the name of a host."""
    return _target(server).proxy()


def _timed(layer: CacheLayer, way: L2Way, settings: LMCacheSettings, place: int, round_index: int) -> Json:
    found: Json = layer.ask("timed", bed=way.value, seed=seed_of(settings.seed, L2Way, place, round_index))
    return found


CHART = Chart(Kind.BARS, "operation", "seconds", "ms", "way", scale=1e3, is_log=True)
LMCACHE_CHUNKS = Experiment(
    name="lmcache",
    help="chunks of LMCache's server: our L2 adapter, its own for S3, and its files",
    description="See what an L2 adapter costs LMCache's server. Store, find and load a batch of chunks with ours, with "
    "LMCache's own for S3 through the same gateway, and with its two for files.",
    settings=LMCacheSettings,
    measure=measure_lmcache,
    show=show,
    plot=plot,
)
