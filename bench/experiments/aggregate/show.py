"""Sections and chart of a result of `bench aggregate`. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.core.plots import Chart, Kind, draw
from bench.core.show import Column, Json, Section, Table, at, gbps, ms, significant, size, table, verdict, written

STATES = {"dram": "the DRAM tier", "page_cache": "the page cache", "cold": "a cold disk", "tcp": "DRAM, UCX over TCP"}
TRANSPORTS = (
    ("`shm`", "shm", "dram", "memcpy, one thread", "memcpy"),
    ("`ucx`", "ucx", "dram", "raw NIXL write", "raw_nixl_write"),
    ("`ucx` over TCP", "ucx", "tcp", "raw NIXL write over TCP", "raw_nixl_write"),
    ("`http`", "http", "dram", "raw socket", "raw_socket"),
    ("`http`, 4 connections", "http4", "dram", "", ""),
)
PEERS = {
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
    "ucx_over_raw_nixl_write_page_cache": "`ucx` over the raw NIXL write, page cache",
    "ucx_tcp_over_raw_nixl_write_tcp": "`ucx` over TCP over the raw NIXL write over TCP",
    "http_over_raw_socket": "`http` over a raw socket, DRAM",
    "http_over_raw_socket_page_cache": "`http` over a raw socket, page cache",
    "http4_over_http": "`http` over 4 connections over one, DRAM",
    "shm_over_raw_cold_read": "`shm` over raw direct reads, cold",
    **{
        f"g16_over_g256_{state}_{transport}": f"G=16 over G=256, `{transport}`, {title}"
        for state, title in (("dram", "DRAM"), ("page_cache", "page cache"), ("cold", "cold"))
        for transport in ("shm", "ucx", "http")
    },
}
SIDES = ("ours", "theirs")
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
    others = [name for name in _ratios(result) if name not in {**PEERS, **LIMITS}]
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
        "other-ratios": (_limits(result, {name: name.replace("_", " ") for name in others}),),
        "first-layers": (_first_layers(result),),
    }


def ratio_of(result: Json, name: str) -> Json:
    """A ratio with or without a target; empty where it was not asked for."""
    found: Json = _ratios(result).get(name, {})
    return found


def _ratios(result: Json) -> dict[str, Json]:
    return {**result["ratio_details"], **result["further_ratios"]}


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
                **first,
            }

    return table(
        rows(),
        Column("", "name", "`{}`".format),
        "from = state | chunks = grain | first layer, ms = median_s:ms | at most = limit_s:ms | = is_met:verdict",
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
