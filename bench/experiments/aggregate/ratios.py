"""What throughput is compared with what, and the targets. Pure.

Every figure is one of two measurements of the same rounds: the median of their ratios round by round. Names say both
transports, or name them with the measurements; where several can stand for one side, the one with the highest median
does. Peers that speak TCP are compared with our `http` first.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibration.samples import State, spread

MEMCPY = "memcpy"
RAW_NIXL_WRITE = "raw_nixl_write"
RAW_NIXL_WRITE_LAYER = "raw_nixl_write_of_layers"
RAW_SOCKET = "raw_socket"
RAW_COLD_READ = "raw_cold_read"
LAYER_MAJORS = ("shm_layer_major", "ucx_layer_major", "http_layer_major")
MOONCAKE_TCP_LAYERWISE = ("mooncake_tcp_layer_major", "mooncake_tcp_session_layer_major")
MOONCAKE_LAYERWISE = (*MOONCAKE_TCP_LAYERWISE, "mooncake_shm_layer_major")
MOONCAKE_AT_ONCE = ("mooncake_tcp_at_once_layer_major", "mooncake_shm_at_once_layer_major")
LMCACHE_S3 = ("lmcache_s3_via_ours", "lmcache_s3_via_rgw")
NIXL_OBJ = ("nixl_obj_via_ours", "nixl_obj_via_rgw")
RANGE_GETS = ("native_range_gets_via_ours", "native_range_gets_via_rgw")
HTTP_PARTS = 4
HTTP_PARTS_NAME = f"http{HTTP_PARTS}"
"""Over so many connections."""
RAW_LIMITS = {"shm": MEMCPY, "ucx": RAW_NIXL_WRITE, "http": RAW_SOCKET}
FIRST_LAYER_ALLOWANCE_S = 0.005


@dataclass(frozen=True, slots=True)
class Definition:
    """`ours` over `theirs`, each the fastest of these names in that state, ours at the finest chunks; `target` is the
    least ratio wanted.
    """

    state: State
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """`median`, `least` and `greatest` of the rounds' ratios; None with the `reason` where one side was not measured.
    `ours` and `theirs` are the measurements it is of.
    """

    target: float | None
    median: float | None = None
    least: float | None = None
    greatest: float | None = None
    ours: str | None = None
    theirs: str | None = None
    reason: str | None = None

    @property
    def is_met(self) -> bool | None:
        """None without a target; what was not measured does not meet one."""
        if self.target is None:
            return None
        return self.median is not None and self.median >= self.target

    def json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "is_met": self.is_met}


@dataclass(frozen=True, slots=True)
class FirstLayer:
    """Median seconds until the first layer was there, against 5 ms and one layer at the raw limit's rate."""

    median_s: float
    limit_s: float

    @property
    def is_met(self) -> bool:
        """Whether it came in time."""
        return self.median_s <= self.limit_s


_DRAM, _PAGES, _TCP = State.DRAM, State.PAGE_CACHE, State.TCP
TARGETS: Mapping[str, Definition] = {
    "shm_over_memcpy": Definition(_DRAM, ("shm_layer_major",), (MEMCPY,), 0.75),
    "shm_over_memcpy_page_cache": Definition(_PAGES, ("shm_layer_major",), (MEMCPY,), 0.4),
    "ucx_over_raw_nixl_write": Definition(_DRAM, ("ucx_layer_major",), (RAW_NIXL_WRITE,), 0.8),
    "http_over_raw_socket": Definition(_DRAM, ("http_layer_major",), (RAW_SOCKET,), 0.8),
    "http_over_raw_socket_page_cache": Definition(_PAGES, ("http_layer_major",), (RAW_SOCKET,), 0.7),
    "shm_over_raw_cold_read": Definition(State.COLD, ("shm_layer_major",), (RAW_COLD_READ,), 0.8),
    "http_over_mooncake_tcp_layerwise": Definition(_DRAM, ("http_layer_major",), MOONCAKE_TCP_LAYERWISE, 5.0),
    "http4_over_mooncake_tcp_layerwise": Definition(
        _DRAM, (f"{HTTP_PARTS_NAME}_layer_major",), MOONCAKE_TCP_LAYERWISE, 5.0
    ),
    "ucx_tcp_over_mooncake_tcp_layerwise": Definition(_TCP, ("ucx_layer_major",), MOONCAKE_TCP_LAYERWISE, 5.0),
    "shm_over_mooncake_layerwise": Definition(_DRAM, ("shm_layer_major",), MOONCAKE_LAYERWISE, 12.0),
    "shm_over_mooncake_shm_chunkwise": Definition(_DRAM, ("shm_chunk_major",), ("mooncake_shm_chunk_major",), 1.0),
    "http_over_lmcache_s3": Definition(_DRAM, ("http_layer_major",), LMCACHE_S3),
    "shm_over_lmcache_s3": Definition(_DRAM, ("shm_layer_major",), LMCACHE_S3, 20.0),
    "http_over_nixl_obj": Definition(_DRAM, ("http_layer_major",), NIXL_OBJ),
    "http_over_native_range_gets": Definition(_DRAM, ("http_layer_major",), RANGE_GETS),
}
G16_OVER_G256 = "g16_over_g256"
G16_OVER_G256_TARGET = 0.8
FURTHER: Mapping[str, Definition] = {
    "ucx_over_raw_nixl_write_page_cache": Definition(_PAGES, ("ucx_layer_major",), (RAW_NIXL_WRITE,)),
    "ucx_over_raw_nixl_write_of_layers": Definition(_DRAM, ("ucx_layer_major",), (RAW_NIXL_WRITE_LAYER,)),
    "ucx_over_memcpy": Definition(_DRAM, ("ucx_layer_major",), (MEMCPY,)),
    "ucx_tcp_over_raw_nixl_write_tcp": Definition(_TCP, ("ucx_layer_major",), (RAW_NIXL_WRITE,)),
    "ucx_tcp_over_mooncake_tcp_get_into_ranges": Definition(_TCP, ("ucx_layer_major",), ("mooncake_tcp_layer_major",)),
    "ucx_tcp_over_mooncake_tcp_at_once": Definition(_TCP, ("ucx_layer_major",), MOONCAKE_AT_ONCE),
    "shm_over_mooncake_at_once": Definition(_DRAM, ("shm_layer_major",), MOONCAKE_AT_ONCE),
    "http_over_mooncake_tcp_chunkwise": Definition(_DRAM, ("http_chunk_major",), ("mooncake_tcp_chunk_major",)),
    "shm_over_nixl_obj": Definition(_DRAM, ("shm_layer_major",), NIXL_OBJ),
    "shm_over_native_range_gets": Definition(_DRAM, ("shm_layer_major",), RANGE_GETS),
    "http4_over_http": Definition(_DRAM, (f"{HTTP_PARTS_NAME}_layer_major",), ("http_layer_major",)),
}


def judged(measurements: Sequence[Measurement], missing: Mapping[str, str], layer_bytes: int) -> dict[str, Any]:
    """Ratios with targets, others that were measured, and times to the first layer against their limit."""
    grain = grain_ratios(measurements)
    aims = {name: ratio for name, ratio in grain.items() if ratio.target is not None}
    wanted = {**ratios(measurements, missing, TARGETS), **aims}
    others = {**ratios(measurements, missing, FURTHER), **grain}
    return {
        "ratios": {name: ratio.median for name, ratio in wanted.items()},
        "ratio_details": {name: ratio.json() for name, ratio in wanted.items()},
        "further_ratios": {
            name: ratio.json() for name, ratio in others.items() if ratio.median is not None and ratio.target is None
        },
        "first_layers": {
            key: {**asdict(first), "is_met": first.is_met}
            for key, first in first_layers(measurements, layer_bytes).items()
        },
    }


def ratios(
    measurements: Sequence[Measurement], missing: Mapping[str, str], definitions: Mapping[str, Definition]
) -> dict[str, Ratio]:
    """Every defined ratio; `missing` gives the reasons of what could not be measured."""
    return {name: _ratio(definition, measurements, missing) for name, definition in definitions.items()}


def grain_ratios(measurements: Sequence[Measurement]) -> dict[str, Ratio]:
    """Finest over coarsest chunks, by state and transport, and for the fastest transport in DRAM. That one and `shm`
    from a cold disk have a target.
    """
    finest, coarsest = _finest(measurements), max(_grains(measurements), default=None)
    if finest == coarsest:
        return {G16_OVER_G256: Ratio(G16_OVER_G256_TARGET, reason="chunks of one size only")}
    found = {}
    for state in State:
        for name in LAYER_MAJORS:
            ours, theirs = (_find(measurements, state, (name,), grain) for grain in (finest, coarsest))
            if ours is not None and theirs is not None:
                target = G16_OVER_G256_TARGET if (state, name) == (State.COLD, "shm_layer_major") else None
                found[f"{G16_OVER_G256}_{state.value}_{name.split('_')[0]}"] = _compare(ours, theirs, target)
    best = _find(measurements, State.DRAM, LAYER_MAJORS, finest)
    coarse = None if best is None else _find(measurements, State.DRAM, (best.name,), coarsest)
    if best is None or coarse is None:
        return {G16_OVER_G256: Ratio(G16_OVER_G256_TARGET, reason="not measured in DRAM"), **found}
    return {G16_OVER_G256: _compare(best, coarse, G16_OVER_G256_TARGET), **found}


def first_layers(measurements: Sequence[Measurement], layer_bytes: int) -> dict[str, FirstLayer]:
    """For each of our layer-major measurements with its raw limit in the same rounds, by key."""
    found = {}
    for each in measurements:
        raw = RAW_LIMITS.get(each.name.split("_")[0])
        limit = None if raw is None else _find(measurements, each.state, (raw,), each.chunk_tokens)
        if each.name in LAYER_MAJORS and limit is not None and each.first_layers_s():
            limit_s = FIRST_LAYER_ALLOWANCE_S + layer_bytes / limit.median_bytes_per_s
            found[each.key] = FirstLayer(statistics.median(each.first_layers_s()), limit_s)
    return found


def _ratio(definition: Definition, measurements: Sequence[Measurement], missing: Mapping[str, str]) -> Ratio:
    finest = _finest(measurements)
    ours = _find(measurements, definition.state, definition.ours, finest)
    theirs = _find(measurements, definition.state, definition.theirs, finest)
    if ours is None:
        return Ratio(definition.target, reason=f"{' and '.join(definition.ours)}: not measured")
    if theirs is None:
        return Ratio(definition.target, reason=_why(definition.theirs, missing))
    return _compare(ours, theirs, definition.target)


def _grains(measurements: Iterable[Measurement]) -> set[int]:
    return {each.chunk_tokens for each in measurements if each.chunk_tokens is not None}


def _finest(measurements: Iterable[Measurement]) -> int | None:
    return min(_grains(measurements), default=None)


def _find(
    measurements: Iterable[Measurement], state: State, names: Sequence[str], chunk_tokens: int | None
) -> Measurement | None:
    """The fastest of these that was measured, with such chunks or beside all."""
    able = [
        each
        for each in measurements
        if each.state is state and each.name in names and each.samples and each.chunk_tokens in (None, chunk_tokens)
    ]
    return max(able, key=lambda each: each.median_bytes_per_s, default=None)


def _compare(ours: Measurement, theirs: Measurement, target: float | None) -> Ratio:
    rates = zip(ours.rates_bytes_per_s(), theirs.rates_bytes_per_s(), strict=True)
    paired = [mine / other for mine, other in rates]
    return Ratio(target, statistics.median(paired), min(paired), max(paired), ours.key, theirs.key)


def _why(names: Sequence[str], missing: Mapping[str, str]) -> str:
    """Reasons are kept by peer or by configuration, whose name starts with the peer's."""
    reasons = {f"{name}: {reason}" for name, reason in missing.items() for wanted in names if wanted.startswith(name)}
    return "; ".join(sorted(reasons)) or "not measured"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: seconds until every byte was there, and until the first layer was, where that is a meaningful time."""

    duration_s: float
    first_layer_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """Counted runs of one thing, each of `nbytes`, one for every round; `note` says what is not obvious about it.

    `chunk_tokens` is None for what does not depend on the chunks' size and was measured beside all of them.
    """

    name: str
    state: State
    chunk_tokens: int | None
    nbytes: int
    samples: tuple[Sample, ...]
    note: str = ""

    @property
    def key(self) -> str:
        """Tells it from all others of a report."""
        grain = "" if self.chunk_tokens is None else f"g{self.chunk_tokens}/"
        return f"{self.state.value}/{grain}{self.name}"

    def rates_bytes_per_s(self) -> list[float]:
        """Throughput of each run."""
        return [self.nbytes / sample.duration_s for sample in self.samples]

    @property
    def median_bytes_per_s(self) -> float:
        """Raises StatisticsError without a sample."""
        return statistics.median(self.rates_bytes_per_s())

    def first_layers_s(self) -> list[float]:
        """Of the runs that have one."""
        return [sample.first_layer_s for sample in self.samples if sample.first_layer_s is not None]

    def json(self) -> dict[str, Any]:
        """Plain values, raw samples included."""
        first_layers_s = self.first_layers_s()
        return {
            "name": self.name,
            "state": self.state.value,
            "chunk_tokens": self.chunk_tokens,
            "nbytes": self.nbytes,
            "note": self.note,
            "sample_count": len(self.samples),
            "throughput_bytes_per_s": asdict(spread(self.rates_bytes_per_s())),
            "duration_s": asdict(spread([sample.duration_s for sample in self.samples])),
            "first_layer_s": asdict(spread(first_layers_s)) if first_layers_s else None,
            "samples": [asdict(sample) for sample in self.samples],
        }
