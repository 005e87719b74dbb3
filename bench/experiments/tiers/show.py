"""Sections and chart of a result of `bench tiers`. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.core.plots import Chart, Kind, draw
from bench.core.show import Column, Form, Json, Section, Table, fixed, table, targets, written

POLICIES = {
    "lru": "LRU",
    "lfu": "LFU",
    "s3-fifo": "S3-FIFO",
    "arc": "ARC",
    "cascade": "CASCADE",
    "reuse-value": "**ours**",
    "optimum": "optimum",
}
RATE = fixed(3)
PERCENT: Form = "{:+.0%}".format
PART: Form = "{:.0%}".format
COUNT: Form = "{:,}".format
RATIO = fixed(2)
MS = fixed(2, 1e3)
MB_PER_S = fixed(0, 1e-6)
GB_PER_S = fixed(2, 1e-9)


def show(result: Json) -> dict[str, Section]:
    """Hit rates by stream, size and policy, the targets, and CASCADE's tables, as far as they were measured."""
    shown = {name.replace("_", "-"): make(result[name]) for name, make in SECTIONS.items() if name in result}
    listed = ({**target, "what": f"{target['what']}, {target['case']}", "case": None} for target in result["targets"])
    return {**shown, "targets": (targets(listed),)} if result["targets"] else shown


def hit_rates(found: Json) -> Section:
    """By stream and size."""
    rows = [{"trace": trace, "size": size, **cell} for trace, cells in found.items() for size, cell in cells.items()]
    known = [name for name in POLICIES if any(name in row["policies"] for row in rows)]
    return (
        "Share of the asked tokens that a cache serves, second half of each stream; sizes are parts of the "
        "stream's unique bytes.",
        table(
            rows,
            "stream = trace | size",
            *(Column(POLICIES[name], f"policies.{name}", RATE) for name in known),
            "ours over the best other = over_best_other:.3",
            Column("gap to the optimum closed", lambda row: written(row["gap_closed"], PERCENT)),
        ),
    )


def table_1(found: Json) -> Section:
    """Per-file against aggregated."""
    steps = {
        "write": "write, not synced",
        "write_synced": "write, synced before it counts",
        "read_cached": "read, page cache",
        "read_cold": "read, cold",
    }
    rows = [
        {
            "size": size,
            "step": text,
            "per_file": each["bytes_per_s"]["per_file"][step],
            "aggregated": each["bytes_per_s"]["aggregated"][step],
            "ratio": each["aggregated_over_per_file"][step],
        }
        for step, text in steps.items()
        for size, each in found["sizes"].items()
    ]
    return (
        f"Table I. {found['block_count']} blocks, {found['at_once']} at a time, in this machine's file system. It is "
        "no Lustre: a file costs microseconds here, and 10 to 50 ms there. Aggregated is our embedded store, with its "
        "index and its checksums, in the same process.",
        table(
            rows,
            "= step | block = size | a file for each, MB/s = per_file:MB/s.0 | "
            "aggregated, MB/s = aggregated:MB/s.0 | aggregated over files = ratio:.2",
        ),
    )


def table_2(found: Json) -> Section:
    """What content addressing saves."""
    rows = [{"workload": name, **each} for name, each in found["workloads"].items()]
    return (
        f"Table II. Blocks of {found['block_tokens']} tokens (of the traces: 512). Named by session, every block is "
        "new; content addressing then keeps each content once. Named by prefix, as every engine does today, nothing is "
        f"left to save. Stored: the first requests, with blocks of {found['stored_block_bytes']} bytes, in a server "
        "that deduplicates.",
        table(
            rows,
            "workload | blocks in all = total_blocks:, | unique = unique_blocks:, | "
            "dedup ratio, counted = dedup_ratio:.2 | requests stored = stored.request_count:, | "
            "named by session: objects = stored.sessions.object_count:, | "
            "ratio on the disk = stored.sessions.dedup_ratio:.2 | "
            "named by prefix: objects = stored.prefixes.object_count:, | "
            "ratio on the disk = stored.prefixes.dedup_ratio:.2",
        ),
    )


def table_3(found: Json) -> Section:
    """Every store behind the same adapter."""
    rows = [{"system": name, **row} for name, row in found["systems"].items()]
    return (
        f"Table III, at this machine's scale. {found['prompt_count']} prompts of {found['shared_tokens']} shared tokens"
        f" in {found['session_count']} sessions each, {found['prompt_tokens']} tokens a request, blocks of "
        f"{found['block_bytes'] // 1024} KiB; nothing is bounded. Finding and getting blocks is measured; computing "
        "the tokens that were not there is played. All stores are given the same names, by prefix: LMCache, too, names "
        "blocks by prefix, not by session as the paper says, so the hit rates are the same. Files, HDF5 and Redis "
        "promise nothing about power cuts; ours syncs each put. A dedup ratio below 1: deleted "
        "blocks of the round before still take space.",
        table(
            rows,
            "system | TTFT, median, ms = ttft_s:ms.2 | mean, ms = ttft_mean_s:ms.2 | "
            "throughput = throughput_over_alone:.2 | hit rate = hit_rate:.3 | "
            "get, ms a block = get_s_per_hit_block:ms.2 | dedup ratio = dedup_ratio:.2",
        ),
        _absent(found),
    )


def table_4(found: Json) -> Section:
    """What each tier gives."""
    rows = [{"tier": name, **each} for name, each in found["tiers"].items()]
    return (
        f"Table IV. {found['block_count']} blocks of {found['block_bytes'] // 1024} KiB.",
        table(rows, "tier | GB/s = bytes_per_s:GB/s.2"),
        _absent(found),
    )


def table_5(found: Json) -> Section:
    """Ours with parts left out."""
    rows = [{"name": name, **row} for name, row in found["configurations"].items()]
    return (
        f"Table V. The requests of Table III, with a bucket bounded to {found['capacity_bytes'] / 1e6:.0f} MB of "
        f"{found['unique_bytes'] / 1e6:.0f}. The remote DRAM of the paper is not there; the local DRAM tier is left "
        "out instead. What leaves depends on times, so hit rates differ from round to round; differences within the "
        "brackets say nothing.",
        table(
            rows,
            "configuration = name | TTFT, median, ms = ttft_s:ms.2 | mean, ms = ttft_mean_s:ms.2 | "
            "hit rate = hit_rate:.3 | get, ms a block = get_s_per_hit_block:ms.2 | "
            "dedup ratio = dedup_ratio:.2",
        ),
    )


def table_6(found: Json) -> Section:
    """What hashing costs."""
    rows = [{"size": size, **each} for size, each in found["blocks"].items()]
    return (
        "Table VI. One thread. The paper's content address is SHA-256; ours is made of the checksums that are kept "
        "anyway, and equal ids are compared byte by byte.",
        table(
            rows,
            "block = size | MiB = block_bytes:MiB.0 | put over http, ms = seconds.put:ms.2 | "
            "SHA-256, ms = seconds.sha256:ms.2 | of the put = over_put.sha256:.0% | "
            "CRC-32C of 16 KiB blocks, ms = seconds.crc32c_blocks:ms.2 | "
            "of the put = over_put.crc32c_blocks:.0% | content id, ms = seconds.content_id:ms.2",
        ),
    )


def _absent(found: Json) -> Table:
    rows = [{"what": what, "reason": reason} for what, reason in found["absent"].items()]
    return table(rows, "not measured = what | reason")


SECTIONS: Mapping[str, Callable[[Json], Section]] = {
    "hit_rates": hit_rates,
    "table_1": table_1,
    "table_2": table_2,
    "table_3": table_3,
    "table_4": table_4,
    "table_5": table_5,
    "table_6": table_6,
}


def plot(result: Json, folder: Path) -> None:
    """Hit rates over sizes, a panel for each stream and a line for each policy; and a bar for each tier."""
    rows = [
        {"trace": trace, "percent": int(size.split()[0]), "policy": name, "hit_rate": rate}
        for trace, cells in result.get("hit_rates", {}).items()
        for size, cell in cells.items()
        for name, rate in cell["policies"].items()
    ]
    draw(HIT_RATES, rows, "tiers; share of the asked tokens that a cache serves", folder / "tiers.png")
    tiers = result.get("table_4", {"tiers": {}})["tiers"]
    bars = [{"tier": name, **each} for name, each in tiers.items()]
    draw(BANDWIDTH, bars, "what each tier gives; median and extremes", folder / "tiers-bandwidth.png")


BANDWIDTH = Chart(Kind.LYING, "tier", "bytes_per_s", "GB/s", scale=1e-9)
HIT_RATES = Chart(
    Kind.LINES,
    "percent",
    lambda row: dict.fromkeys(("median", "min", "max"), row["hit_rate"]),
    "hit rate",
    lambda row: POLICIES[row["policy"]].replace("**", ""),
    column="trace",
    across_title="cache, percent of the unique bytes",
)
