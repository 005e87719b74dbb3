"""What throughput is compared with what, the targets, and how a result is shown. Pure but for the chart's file.

Every figure is one of two measurements of the same rounds: the median of their ratios round by round. Names say both
transports, or name them with the measurements; where several can stand for one side, the one with the highest median
does. Peers that speak TCP are compared with our `http` first.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.core.plots import Chart, Kind, draw
from bench.core.show import Column, Json, Section, Table, at, gbps, ms, significant, size, table, verdict, written
from objectcache.calibration.samples import State, spread

MEMCPY = "memcpy"
RAW_NIXL_WRITE = "raw_nixl_write"
RAW_NIXL_WRITE_LAYER = "raw_nixl_write_of_layers"
RAW_SOCKET = "raw_socket"
RAW_COLD_READ = "raw_cold_read"
LAYER_MAJORS = ("shm_layer_major", "ucx_layer_major", "http_layer_major")
DIRECT = "shm_direct"
"""Over shm, from a server that reads past the page cache (`cold_reads`)."""
MAPPED = "ucx_mapped"
"""Over ucx, from a server whose ucx process may read the DRAM tier (`ucx_maps_dram`)."""
COLD_LAYER_MAJORS = ("shm_layer_major", f"{DIRECT}_layer_major")
"""Those that have targets from a cold disk."""
MOONCAKE_TCP_LAYERWISE = ("mooncake_tcp_layer_major", "mooncake_tcp_session_layer_major")
MOONCAKE_LAYERWISE = (*MOONCAKE_TCP_LAYERWISE, "mooncake_shm_layer_major")
MOONCAKE_AT_ONCE = ("mooncake_tcp_at_once_layer_major", "mooncake_shm_at_once_layer_major")
LMCACHE_S3 = ("lmcache_s3_via_ours", "lmcache_s3_via_rgw")
NIXL_OBJ = ("nixl_obj_via_ours", "nixl_obj_via_rgw")
RANGE_GETS = ("native_range_gets_via_ours", "native_range_gets_via_rgw")
HTTP_PARTS = 4
HTTP_PARTS_NAME = f"http{HTTP_PARTS}"
"""Over so many connections."""
RAW_LIMITS = {"shm": MEMCPY, "ucx": RAW_NIXL_WRITE, "http": RAW_SOCKET, HTTP_PARTS_NAME: RAW_SOCKET}
"""By transport; the limit of each from a cold disk is the disk."""
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
    """Median seconds until the first layer was there, against 5 ms and one layer at the raw limit's rate. `phases_s`
    are the medians of its parts: the phases of the storage server until it had handed the layer over, and the rest,
    which are client, gateway and the way between them. Empty where the server did not tell them apart.
    """

    median_s: float
    limit_s: float
    phases_s: Mapping[str, float]

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
    "shm_direct_over_raw_cold_read": Definition(State.COLD, (f"{DIRECT}_layer_major",), (RAW_COLD_READ,), 0.8),
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
    "ucx_mapped_over_raw_nixl_write": Definition(_DRAM, (f"{MAPPED}_layer_major",), (RAW_NIXL_WRITE,)),
    "ucx_mapped_over_ucx": Definition(_DRAM, (f"{MAPPED}_layer_major",), ("ucx_layer_major",)),
    "ucx_over_raw_nixl_write_of_layers": Definition(_DRAM, ("ucx_layer_major",), (RAW_NIXL_WRITE_LAYER,)),
    "ucx_over_memcpy": Definition(_DRAM, ("ucx_layer_major",), (MEMCPY,)),
    "ucx_tcp_over_raw_nixl_write_tcp": Definition(_TCP, ("ucx_layer_major",), (RAW_NIXL_WRITE,)),
    "ucx_tcp_over_mooncake_tcp_get_into_ranges": Definition(_TCP, ("ucx_layer_major",), ("mooncake_tcp_layer_major",)),
    "ucx_tcp_over_mooncake_tcp_at_once": Definition(_TCP, ("ucx_layer_major",), MOONCAKE_AT_ONCE),
    "shm_over_mooncake_at_once": Definition(_DRAM, ("shm_layer_major",), MOONCAKE_AT_ONCE),
    "http_over_mooncake_tcp_chunkwise": Definition(_DRAM, ("http_chunk_major",), ("mooncake_tcp_chunk_major",)),
    "shm_over_nixl_obj": Definition(_DRAM, ("shm_layer_major",), NIXL_OBJ),
    "shm_over_native_range_gets": Definition(_DRAM, ("shm_layer_major",), RANGE_GETS),
    "shm_direct_over_shm_cold": Definition(State.COLD, (f"{DIRECT}_layer_major",), ("shm_layer_major",)),
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
        for name in dict.fromkeys((*LAYER_MAJORS, *COLD_LAYER_MAJORS)):
            ours, theirs = (_find(measurements, state, (name,), grain) for grain in (finest, coarsest))
            if ours is not None and theirs is not None:
                target = G16_OVER_G256_TARGET if state is State.COLD and name in COLD_LAYER_MAJORS else None
                key = f"{G16_OVER_G256}_{state.value}_{name.removesuffix('_layer_major')}"
                found[key] = _compare(ours, theirs, target)
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
        if raw is None or not each.name.endswith("_layer_major") or not each.first_layers_s():
            continue
        raw = RAW_COLD_READ if each.state is State.COLD else raw
        limit = _find(measurements, each.state, (raw,), each.chunk_tokens)
        if limit is not None:
            limit_s = FIRST_LAYER_ALLOWANCE_S + layer_bytes / limit.median_bytes_per_s
            found[each.key] = FirstLayer(statistics.median(each.first_layers_s()), limit_s, _phases_s(each))
    return found


def _phases_s(measurement: Measurement) -> dict[str, float]:
    told = [sample for sample in measurement.samples if sample.phases_s]
    parts = {
        phase: statistics.median(sample.phases_s[phase] for sample in told)
        for phase in (told[0].phases_s if told else ())
    }
    if told:
        rest = [(sample.first_layer_s or 0.0) - sum(sample.phases_s.values()) for sample in told]
        parts["rest"] = statistics.median(rest)
    return parts


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
    """One run: seconds until every byte was there, and until the first layer was, where that is a meaningful time.
    `phases_s` are the seconds that the storage server spent in each phase until then.
    """

    duration_s: float
    first_layer_s: float | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)


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
        """The times to the first layer of the runs that have one."""
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


STATES = {"dram": "the DRAM tier", "page_cache": "the page cache", "cold": "a cold disk", "tcp": "DRAM, UCX over TCP"}
TRANSPORTS = (
    ("`shm`", "shm", "dram", "memcpy, one thread", "memcpy"),
    ("`ucx`", "ucx", "dram", "raw NIXL write", "raw_nixl_write"),
    ("`ucx` over TCP", "ucx", "tcp", "raw NIXL write over TCP", "raw_nixl_write"),
    ("`http`", "http", "dram", "raw socket", "raw_socket"),
    ("`http`, 4 connections", "http4", "dram", "", ""),
)
PEERS = {
    "http_over_mooncake_tcp_chunkwise": "Mooncake Store, chunk-major, TCP against TCP",
    "http_over_mooncake_tcp_layerwise": "Mooncake Store, layer-major, TCP against TCP",
    "http4_over_mooncake_tcp_layerwise": "Mooncake Store, layer-major, TCP against TCP, ours over 4 connections",
    "ucx_tcp_over_mooncake_tcp_layerwise": "Mooncake Store, layer-major, our `ucx` over TCP against its TCP",
    "http_over_lmcache_s3": "LMCache's S3 connector, TCP against TCP",
    "http_over_nixl_obj": "NIXL's OBJ plugin, a sample, TCP against TCP",
    "http_over_native_range_gets": "obstore, a ranged GET for each slice, a sample, TCP against TCP",
    "shm_over_mooncake_shm_chunkwise": "Mooncake Store, chunk-major, shared memory against shared memory",
    "shm_over_mooncake_layerwise": "Mooncake Store, layer-major, its best, our `shm`",
    "shm_over_mooncake_at_once": "Mooncake Store, all layers at once, its best, our `shm`",
    "shm_over_lmcache_s3": "LMCache's S3 connector, our `shm` against its TCP",
    "shm_over_nixl_obj": "NIXL's OBJ plugin, our `shm` against its TCP",
    "shm_over_native_range_gets": "obstore, our `shm` against its TCP",
}
LIMITS = {
    "shm_over_memcpy": "`shm` over memcpy, DRAM",
    "shm_over_memcpy_page_cache": "`shm` over memcpy, page cache",
    "ucx_over_raw_nixl_write": "`ucx` over the raw NIXL write, DRAM",
    "ucx_mapped_over_raw_nixl_write": "`ucx` over the raw NIXL write, DRAM, `ucx_maps_dram = true`",
    "ucx_mapped_over_ucx": "`ucx`, DRAM, `ucx_maps_dram` true over false",
    "ucx_over_raw_nixl_write_page_cache": "`ucx` over the raw NIXL write, page cache",
    "ucx_tcp_over_raw_nixl_write_tcp": "`ucx` over TCP over the raw NIXL write over TCP",
    "http_over_raw_socket": "`http` over a raw socket, DRAM",
    "http_over_raw_socket_page_cache": "`http` over a raw socket, page cache",
    "http4_over_http": "`http` over 4 connections over one, DRAM",
    "shm_over_raw_cold_read": "`shm` over raw direct reads, cold",
    "shm_direct_over_raw_cold_read": '`shm` over raw direct reads, cold, `cold_reads = "direct"`',
    "shm_direct_over_shm_cold": '`shm`, cold, `cold_reads = "direct"` over "cached"',
    **{
        f"g16_over_g256_{state}_{transport}": f"G=16 over G=256, `{transport}`, {title}"
        for state, title in (("dram", "DRAM"), ("page_cache", "page cache"), ("cold", "cold"))
        for transport in ("shm", "ucx", "http")
    },
    f"g16_over_g256_cold_{DIRECT}": 'G=16 over G=256, `shm`, cold, `cold_reads = "direct"`',
}
SIDES = ("ours", "theirs")
PHASES = ("plan", "wait", "gather", "transfer", "rest")
GOAL = Column("target", lambda row: "" if row.get("target") is None else f"{row['target']:g}: {_met(row)}")


def show(result: Json) -> dict[str, Section]:
    """Everything measured, each transport beside its limit, other software, ratios, first layers."""
    grain = f"g{min(result['settings']['grains'])}"
    remarks = [f"{state}: {remark}" for state, remark in result["remarks"].items()]
    remarks += [f"{name} did not run: {reason}" for name, reason in result["peers_missing"].items()]
    peaks = result["server_peak_rss_bytes"]
    remarks += [
        f"server's peak memory, {phase}: {'unknown' if peak is None else size(peak)}" for phase, peak in peaks.items()
    ]
    others = [name for name in _shown_ratios(result) if name not in {**PEERS, **LIMITS}]
    return {
        "measurements": (
            *remarks,
            table(
                result["measurements"].items(),
                Column("measured, GB/s", lambda row: row[0]),
                Column("", lambda row: row[1]["throughput_bytes_per_s"], gbps),
                Column("ms", lambda row: row[1]["duration_s"]["median"], ms),
                Column("first layer, ms", lambda row: at(row[1], "first_layer_s.median"), ms),
                Column("samples", lambda row: row[1]["sample_count"]),
                Column("", lambda row: row[1]["note"]),
            ),
        ),
        "transports": (
            _transports(result, grain),
            f"Raw direct reads of the same files: {_rate(result, 'cold/raw_cold_read')} GB/s.",
        ),
        "peers": (_peers(result),),
        "limits": (_limits(result, LIMITS),),
        "measured-limits": (_limits(result, {name: LIMITS[name] for name in LIMITS if _is_measured(result, name)}),),
        "other-ratios": (_limits(result, {name: name.replace("_", " ") for name in others}),),
        "first-layers": (_first_layers(result),),
    }


def ratio_of(result: Json, name: str) -> Json:
    """A ratio with or without a target; empty where it was not asked for."""
    found: Json = _shown_ratios(result).get(name, {})
    return found


def _shown_ratios(result: Json) -> dict[str, Json]:
    return {**result["ratio_details"], **result["further_ratios"]}


def _is_measured(result: Json, name: str) -> bool:
    return _shown_ratios(result).get(name, {}).get("median") is not None


def _met(row: Json) -> str:
    return verdict(row.get("is_met"))


def _rate(result: Json, key: str) -> str:
    return written(at(result["measurements"].get(key), "throughput_bytes_per_s"), gbps)


def _transports(result: Json, grain: str) -> Table:
    rows = []
    for title, name, dram, limit, raw in TRANSPORTS:
        states = (dram, "page_cache", "cold") if dram == "dram" else (dram, "", "")
        found = (_rate(result, f"{state}/{raw}") or _rate(result, f"{state}/{grain}/{raw}") for state in states[:2])
        limits = "; ".join(filter(None, found))
        rates = [_rate(result, f"{state}/{grain}/{name}_layer_major") for state in states]
        rows.append([title, *rates, f"{limit}: {limits}" if limit else ""])
    head = ("GB/s", "from the DRAM tier", "from the page cache", "from a cold disk", "limit: DRAM; page cache phase")
    return Table(head, rows)


def _peers(result: Json) -> Table:
    found = [(title, ratio) for name, title in PEERS.items() if (ratio := ratio_of(result, name))]
    return table(
        [{"title": title, **ratio} for title, ratio in found],
        "peer = title",
        Column("what over what", lambda row: row.get("reason") or " over ".join(_last(row[side]) for side in SIDES)),
        Column("its GB/s", lambda row: _rate(result, row.get("theirs") or "")),
        Column("ours over it", lambda row: row, significant),
        GOAL,
    )


def _last(key: str) -> str:
    return f"`{key.split('/')[-1]}`"


def _limits(result: Json, titles: Mapping[str, str]) -> Table:
    rows = [{"title": title, **ratio} for name, title in titles.items() if (ratio := ratio_of(result, name))]
    seen = Column("seen", lambda row: row.get("reason") or row)
    return table(rows, "ratio, paired within rounds = title", seen, GOAL)


def _first_layers(result: Json) -> Table:
    def rows() -> Iterable[Json]:
        for key, first in result["first_layers"].items():
            state, grain, name = key.split("/")
            yield {
                "state": STATES[state],
                "grain": f"G={grain[1:]}",
                "name": name.removesuffix("_layer_major"),
                "phases_s": {},
                **first,
            }

    return table(
        rows(),
        Column("", "name", "`{}`".format),
        "from = state | chunks = grain | first layer, ms = median_s:ms | at most = limit_s:ms | = is_met:verdict",
        *(Column(phase, f"phases_s.{phase}", ms) for phase in PHASES),
    )


def plot(result: Json, path: Path) -> None:
    """Throughputs, a panel for each state. Blue: ours, grey: raw limits, orange: peers."""
    draw(CHART, list(result["measurements"].values()), "aggregate; medians, least and greatest", path)


def _color(row: Any) -> str:
    if row["name"].startswith(("shm_", "ucx_", "http")):
        return "tab:blue"
    return "tab:gray" if row["name"] == "memcpy" or row["name"].startswith("raw_") else "tab:orange"


CHART = Chart(
    Kind.LYING,
    lambda row: " ".join(filter(None, (row["chunk_tokens"] and f"g{row['chunk_tokens']}", row["name"]))),
    "throughput_bytes_per_s",
    "GB/s. Blue: ours, grey: raw limits, orange: peers",
    row=lambda row: row["state"].replace("_", " "),
    scale=1e-9,
    color=_color,
)
