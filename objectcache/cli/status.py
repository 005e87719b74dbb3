"""`objectcache status` and `objectcache top`: what a server has, and what it does now."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from descriptors.headers import STATUS_PATH
from descriptors.units import format_bytes
from objectcache.calibration.text import aligned
from objectcache.cli.config_values import NoServerError
from objectcache.cli.remote import asked, remote_options, told

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Json = Mapping[str, Any]
TOP_S = 2.0
FAILURES_SHOWN = 5


def add_status(commands: Commands, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add both commands."""
    for name, run, what, usage in (
        ("status", run_status, "say what a running server has, and how it does", "%(prog)s [URL] [options]"),
        ("top", run_top, "show what a running server does, every two seconds", "%(prog)s [URL] [options]"),
    ):
        command = commands.add_parser(name, help=what, usage=usage, parents=parents, description=_DESCRIPTIONS[name])
        command.add_argument("url", nargs="?", metavar="URL", help="the same as --endpoint")
        remote_options(command)
        if name == "top":
            command.add_argument("--interval", type=float, default=TOP_S, help=argparse.SUPPRESS)  # for tests
            command.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
        command.set_defaults(command=run)


_DESCRIPTIONS = {
    "status": "Print the version, the data, the caches and what has left them, hit rates, the link and the last "
    "failures of a server, or of all storage servers of a cluster. The key must be one of all buckets.",
    "top": "Print rates since the line before: bytes sent, lookups and hits, and what has left the caches.",
}


def run_status(options: argparse.Namespace) -> int:
    """0: it answers."""
    options.endpoint = options.url or options.endpoint
    with asked(options) as http:
        status = http.request("GET", STATUS_PATH).json()
        told(options.json, status, status_lines(http.account.address.url, status))
    return 0


def run_cluster_status(options: argparse.Namespace) -> int:
    """0: it answers. Raises NoServerError for a server that is in no cluster."""
    options.endpoint = options.url or options.endpoint
    with asked(options) as http:
        status = http.request("GET", STATUS_PATH).json()
        if status.get("cluster") is None:
            raise NoServerError(f"{http.account.address.url} is a gateway of no cluster: see `objectcache status`")
        found = {**status["cluster"], "storage_servers": status["storage_servers"]}
        told(options.json, found, cluster_lines(status))
    return 0


def run_top(options: argparse.Namespace) -> int:
    """0 when it is interrupted, or after --count lines."""
    options.endpoint = options.url or options.endpoint
    with asked(options) as http:
        before: tuple[float, Json] | None = None
        shown = 0
        try:
            while not options.count or shown < options.count:
                now = time.monotonic(), http.request("GET", STATUS_PATH).json()
                if before is not None:
                    rates = rates_between(before[1], now[1], now[0] - before[0])
                    if shown % 20 == 0 and options.json is None:
                        print(TOP_HEAD)
                    told(options.json, rates, [top_line(rates)])
                    sys.stdout.flush()
                    shown += 1
                    if options.count and shown >= options.count:
                        break
                before = now
                time.sleep(options.interval)
        except KeyboardInterrupt:
            return 0
    return 0


def status_lines(url: str, status: Json) -> list[str]:
    """The status for people."""
    gateway, servers = status["gateway"], status["storage_servers"]
    lines = [f"ObjectCache {gateway['version']} at {url}, up {_duration(gateway['uptime_s'])}"]
    if not servers:
        lines.append("  no storage server answers")
    if status.get("cluster") is not None:
        lines += ["", *cluster_lines(status)]
    for server in servers:
        lines += _server_lines(server)
    failures = gateway["failures"]
    if failures:
        rows = [
            [
                _when(each["at"]),
                str(each["status"]),
                each["code"],
                each["operation"],
                each["bucket"],
                each["request_id"],
            ]
            for each in failures[:FAILURES_SHOWN]
        ]
        lines += ["", *aligned(["last failures", "", "error", "operation", "bucket", "request id"], rows)]
    return lines


def cluster_lines(status: Json) -> list[str]:
    """The members of a cluster for people, of which some may not answer."""
    cluster = status["cluster"]
    servers = {server["name"]: server for server in status["storage_servers"]}
    rows = []
    for member in cluster["members"]:
        server = servers.get(member["name"])
        state = "does not answer" if server is None else f"up {_duration(server['uptime_s'])}"
        rows.append(
            [
                member["name"],
                member["endpoint"],
                f"{member['key_share']:.0%}",
                state + ", draining" * member["is_draining"],
                "" if server is None else format_bytes(server["used_bytes"]),
                "" if server is None else server["version"],
            ]
        )
    title = f"cluster {cluster['cluster_id']}, view {cluster['view']}: {len(servers)} of {len(rows)} members answer"
    return [title, *aligned(["member", "address", "keys", "state", "used", "version"], rows)]


def _server_lines(server: Json) -> list[str]:
    bound, free = server["bound_bytes"], format_bytes(server["free_bytes"])
    room = (
        f"{format_bytes(server['used_bytes'])} of {format_bytes(bound)}"
        if bound
        else (f"{format_bytes(server['used_bytes'])}, no bound")
    )
    transports = ["shm"] * server["has_shm"] + ["ucx"] * server["has_ucx"] + ["http"]
    scheduler = server["scheduler"]
    rate = scheduler["link_bytes_per_s"]
    active = scheduler["layerwise_active"] + scheduler["chunkwise_active"]
    waiting = scheduler["layerwise_waiting"] + scheduler["chunkwise_waiting"]
    link = "not paced" if rate is None else f"{rate * 1e-9:.3g} GB/s, {active} deliveries, {waiting} wait"
    rows = [
        ("data", f"{room}; {free} free on its file system"),
        ("home", server["upstream"] or "here"),
        ("memory", f"{format_bytes(server['dram_used_bytes'])} of {format_bytes(server['dram_bytes'])}, "
                   f"{_share(server['dram_hit_count'], server['dram_missed_count'])} of the chunks read came from it"),
        *([("compression", server["compression"])] if server.get("compression") else []),
        ("lookups", f"{server['lookup_count']:,}: {server['matched_chunk_count']:,} of {server['asked_chunk_count']:,}"
                    " chunks were there"),
        ("sent", ", ".join(f"{format_bytes(sent)} over {name}" for name, sent in sorted(server["sent_bytes"].items()))
                 or "nothing"),
        ("transports", ", ".join(transports)),
        ("link", link),
    ]  # fmt: skip
    title = [f"storage server {server['name']} ({server['version']}, up {_duration(server['uptime_s'])})"]
    lines = (title if server["name"] else []) + [f"  {name:<12}{text}" for name, text in rows]
    if not server["caches"]:
        return [*lines, f"  {'caches':<12}none: nothing is ever evicted"]
    caches = [
        [
            each["bucket"] or "all buckets",
            f"{each['object_count']:,}",
            format_bytes(each["used_bytes"]),
            "as the directory" if each["capacity_bytes"] is None else format_bytes(each["capacity_bytes"]),
            f"{each['evicted_count']:,}",
            "" if each["eviction_age_s"] is None else _duration(each["eviction_age_s"]),
        ]
        for each in server["caches"]
    ]
    return [*lines, "", *aligned(["  cache", "objects", "used", "capacity", "evicted", "unused for"],
                                 [[f"  {row[0]}", *row[1:]] for row in caches])]  # fmt: skip


TOP_HEAD = "    sent/s   lookups/s   asked/s  matched  from memory  active  waiting  evicted/s      used"


def rates_between(before: Json, now: Json, seconds: float) -> dict[str, float]:
    """The rates between two answers, over all storage servers. Counts of one that has started anew begin
    at 0.
    """

    def per_s(count: Callable[[Json], int]) -> float:
        return max(0, count(now) - count(before)) / seconds

    def each(name: str) -> float:
        return per_s(lambda status: _sum(status, name))

    hits, missed, asked_chunks = each("dram_hit_count"), each("dram_missed_count"), each("asked_chunk_count")
    flows = [server["scheduler"] for server in now["storage_servers"]]
    return {
        "sent_bytes_per_s": per_s(_sent_bytes),
        "lookups_per_s": each("lookup_count"),
        "asked_chunks_per_s": asked_chunks,
        "matched_share": each("matched_chunk_count") / asked_chunks if asked_chunks else 0.0,
        "memory_share": hits / (hits + missed) if hits + missed else 0.0,
        "active": float(sum(flow["layerwise_active"] + flow["chunkwise_active"] for flow in flows)),
        "waiting": float(sum(flow["layerwise_waiting"] + flow["chunkwise_waiting"] for flow in flows)),
        "evicted_per_s": per_s(_evicted_count),
        "used_bytes": float(_sum(now, "used_bytes")),
    }


def top_line(rates: Mapping[str, float]) -> str:
    """One line under TOP_HEAD."""
    return (
        f"{format_bytes(int(rates['sent_bytes_per_s'])):>10}{rates['lookups_per_s']:>12.1f}"
        f"{rates['asked_chunks_per_s']:>10.0f}{rates['matched_share']:>9.0%}{rates['memory_share']:>13.0%}"
        f"{rates['active']:>8.0f}{rates['waiting']:>9.0f}{rates['evicted_per_s']:>11.1f}"
        f"{format_bytes(int(rates['used_bytes'])):>10}"
    )


def _sent_bytes(status: Json) -> int:
    return sum(sum(server["sent_bytes"].values()) for server in status["storage_servers"])


def _evicted_count(status: Json) -> int:
    return sum(cache["evicted_count"] for server in status["storage_servers"] for cache in server["caches"])


def _sum(status: Json, name: str) -> int:
    return sum(int(each[name]) for each in status["storage_servers"])


def _share(hits: int, misses: int) -> str:
    return "none" if not hits + misses else f"{hits / (hits + misses):.0%}"


def _duration(seconds: float) -> str:
    for unit_s, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {name}"
    return f"{seconds:.0f} s"


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M:%S")
