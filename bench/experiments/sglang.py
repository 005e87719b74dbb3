"""`bench sglang`: SGLang's hierarchical cache over our storage back-end, over SGLang's own for SeaweedFS through the
same gateway, and over its files: storing, finding and loading a batch of pages.

SGLang runs in a process of its own without a GPU: its host pools, its factory of back-ends, and the functions that its
controllers' threads call (tests/engines/sglang_host.py). Ways take turns in each round, with pages that nobody has
stored; all pages that come are compared. All stores have what they are asked for in memory: a server's, or the page
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
from bench.beds.kv_peers.install import SGLANG
from bench.core import options
from bench.core.experiment import Experiment, WrongUse, published
from bench.core.plots import Chart, Kind, draw
from bench.core.rounds import Side, Target, interval, paired, sampled
from bench.core.show import Json, Section
from objectcache.calibration.servers import BUCKET, LocalServer

HOST = "tests.engines.sglang_host"
OPERATIONS = ("set", "exists", "get")
EXISTS_MIN, GET_MIN = 10.0, 2.0
ELEMENT_BYTES = 2


class Backend(Enum):
    """A storage back-end of SGLang's."""

    OURS = "objectcache"
    """Loads go by way of memory that the server fills."""
    OURS_HTTP = "objectcache_http"
    """Loads go straight into the host pool, as from a server on another host."""
    SEAWEEDFS = "seaweedfs"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class SGLangSettings:
    """A batch of `pages`, of a model with these layers and heads; `page_bytes` is what follows from them."""

    ways: tuple[Backend, ...] = options.choice("--ways", Backend, tuple(Backend))
    pages: int = options.count("--pages", 32, 4, most=128, text="in a batch")
    page_tokens: int = options.count("--page-tokens", 16, most=1024)
    layers: int = options.count("--layers", 8, 2, most=256)
    heads: int = options.count("--heads", 8, 2, most=256, text="of keys and values")
    head_dim: int = options.count("--head-dim", 128, 64, least=8, most=1024)
    layout: str = options.setting("--layout", "page_first_direct", text="of the host pool")
    runs: int = options.runs(9)
    seed: int = options.seed()
    folder: Path | None = options.folder()

    @property
    def page_bytes(self) -> int:
        """The size of a page, keys and values."""
        return 2 * self.layers * self.page_tokens * self.heads * self.head_dim * ELEMENT_BYTES


def measure_sglang(settings: SGLangSettings, origin: Mapping[str, Any]) -> Json:
    """Measure all ways; a page that did not come right is the result's `problem`. Raises WrongUse, FAILURES."""
    if not SGLANG.is_installed:
        raise WrongUse("SGLang is not installed: make engines")
    with beside_a_server(settings.folder, HOST, SGLANG.python, "SGLang") as (server, layer, files):
        for way in settings.ways:
            backend, extra = _backend(way, server, files / "pages")
            layer.ask(
                "open",
                node=way.value,
                backend=backend,
                options=extra,
                layout=settings.layout,
                pages=3 * settings.pages,
                page_tokens=settings.page_tokens,
                layers=settings.layers,
                heads=settings.heads,
                head_dim=settings.head_dim,
            )
        ways: dict[Backend, Callable[[int], Json]] = {
            way: partial(_timed, layer, way, settings, place) for place, way in enumerate(settings.ways)
        }
        samples = sampled(ways, settings.runs, "sglang", uncounted=2)
    rows = rows_of(samples, OPERATIONS, {"pages": settings.pages, "page_bytes": settings.page_bytes})
    judged = targets_of(seconds_of(samples, OPERATIONS))
    problem = problem_of(samples, "pages")
    return published("sglang", origin, settings, problem, sglang=rows, targets=[target.json() for target in judged])


def targets_of(seconds: Mapping[Backend, Mapping[str, Sequence[float]]]) -> list[Target]:
    """How much sooner ours finds and loads, in the same rounds: the better of our two ways over SGLang's own for an S3
    service.
    """
    ours = [way for way in (Backend.OURS, Backend.OURS_HTTP) if way in seconds]
    found = []
    for operation, limit in (("exists", EXISTS_MIN), ("get", GET_MIN)):
        what = f"{operation}, seaweedfs over ours"
        if not ours or Backend.SEAWEEDFS not in seconds:
            found.append(Target(what, limit, None, Side.AT_LEAST, reason="not all ways were measured"))
            continue
        theirs = seconds[Backend.SEAWEEDFS][operation]
        ratios = [interval(paired(theirs, seconds[way][operation])) for way in ours]
        found.append(Target(what, limit, max(ratios, key=lambda each: each.median), Side.AT_LEAST))
    return found


def show(result: Json) -> dict[str, Section]:
    """One line for each operation and way, and the targets."""
    return {"sglang": section_of(result["sglang"], result["targets"], "back-end", Backend.SEAWEEDFS)}


def plot(result: Json, path: Path) -> None:
    """The time of each operation by back-end."""
    draw(CHART, result["sglang"], "SGLang's storage back-ends; medians, least and greatest", path)


def _timed(layer: CacheLayer, way: Backend, settings: SGLangSettings, place: int, round_index: int) -> Json:
    seed = seed_of(settings.seed, Backend, place, round_index)
    found: Json = layer.ask("timed", node=way.value, seed=seed, count=settings.pages)
    return found


def _backend(way: Backend, server: LocalServer, files: Path) -> tuple[str, Json]:
    """SGLang's name of the back-end, and its extra configuration."""
    match way:
        case Backend.FILE:
            return "file", {"file_storage_path": str(files)}
        case Backend.SEAWEEDFS:
            keys = {"access_key": server.access_key, "secret_key": server.secret_key}
            return "seaweedfs", {"endpoint": server.url, "bucket": BUCKET, **keys}
    return "dynamic", {
        "backend_name": "objectcache",
        "module_path": "nixl_client.connectors.sglang",
        "class_name": "ObjectCacheHiCache",
        "interface_v1": 1,
        "endpoint": server.url,
        "bucket": BUCKET,
        "transport": "http" if way is Backend.OURS_HTTP else "auto",
        "epoch": way.value,
    }


CHART = Chart(Kind.BARS, "operation", "seconds", "ms", "way", scale=1e3, is_log=True)
SGLANG_PAGES = Experiment(
    name="sglang",
    help="pages of SGLang's hierarchical cache: our back-end, its own for S3, and its files",
    description="See what a storage back-end costs SGLang's hierarchical cache. Store, find and load a batch of pages "
    "with ours, with SGLang's own for SeaweedFS through the same gateway, and with its files.",
    settings=SGLangSettings,
    measure=measure_sglang,
    show=show,
    plot=plot,
)
