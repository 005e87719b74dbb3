"""Sections and chart of a result of `bench tiers`. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.core.plots import Chart, Kind, draw
from bench.core.show import Block, Column, Form, Json, Section, fixed, listed, table, targets, written

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


@dataclass(frozen=True, slots=True)
class Shown:
    """How one of CASCADE's tables is shown: where its rows are, what names them, the text before, and columns. The text
    has fields of the result, and sizes in KiB (`block_kib`) and MB.
    """

    rows: str
    name: str
    text: str
    columns: str

    def section(self, found: Json) -> Section:
        """With what could not be measured, and why."""
        sizes = {name: found.get(f"{name}_bytes", 0) for name in ("block", "capacity", "unique")}
        known = {f"{name}_kib": nbytes // 1024 for name, nbytes in sizes.items()}
        known |= {f"{name}_mb": f"{nbytes / 1e6:.0f}" for name, nbytes in sizes.items()}
        blocks: list[Block] = [
            self.text.format(**{"remote_dram": NO_REMOTE_DRAM, **found, **known}),
            table(listed(found[self.rows], self.name), self.columns),
        ]
        if found.get("absent"):
            rows = [{"what": what, "reason": reason} for what, reason in found["absent"].items()]
            blocks.append(table(rows, "not measured = what | reason"))
        return blocks


NO_REMOTE_DRAM = "The remote DRAM of the paper is not there; the local DRAM tier is left out instead."
TIMES = "TTFT, median, ms = ttft_s:ms.2 | mean, ms = ttft_mean_s:ms.2 | "
FOUND = "hit rate = hit_rate:.3 | get, ms a block = get_s_per_hit_block:ms.2 | dedup ratio = dedup_ratio:.2"
TABLE_2 = Shown(
    "workloads",
    "workload",
    "Table II. Blocks of {block_tokens} tokens (of the traces: 512). Named by session, every block is "
    "new; content addressing then keeps each content once. Named by prefix, as every engine does today, nothing is "
    "left to save. Stored: the first requests, with blocks of {stored_block_bytes} bytes, in a server "
    "that deduplicates.",
    "workload | blocks in all = total_blocks:, | unique = unique_blocks:, | "
    "dedup ratio, counted = dedup_ratio:.2 | requests stored = stored.request_count:, | "
    "named by session: objects = stored.sessions.object_count:, | "
    "ratio on the disk = stored.sessions.dedup_ratio:.2 | "
    "named by prefix: objects = stored.prefixes.object_count:, | "
    "ratio on the disk = stored.prefixes.dedup_ratio:.2",
)
TABLE_3 = Shown(
    "systems",
    "system",
    "Table III, at this machine's scale. {prompt_count} prompts of {shared_tokens} shared tokens"
    " in {session_count} sessions each, {prompt_tokens} tokens a request, blocks of "
    "{block_kib} KiB; nothing is bounded. Finding and getting blocks is measured; computing "
    "the tokens that were not there is played. All stores are given the same names, by prefix: LMCache, too, names "
    "blocks by prefix, not by session as the paper says, so the hit rates are the same. Files, HDF5 and Redis "
    "promise nothing about power cuts; ours syncs each put. A dedup ratio below 1: deleted "
    "blocks of the round before still take space.",
    "system | " + TIMES + "throughput = throughput_over_alone:.2 | " + FOUND,
)
TABLE_4 = Shown(
    "tiers", "tier", "Table IV. {block_count} blocks of {block_kib} KiB.", "tier | GB/s = bytes_per_s:GB/s.2"
)
TABLE_5 = Shown(
    "configurations",
    "name",
    "Table V. The requests of Table III, with a bucket bounded to {capacity_mb} MB of {unique_mb}. {remote_dram} "
    "What leaves depends on times, so hit rates differ from round to round; differences within the "
    "brackets say nothing.",
    "configuration = name | " + TIMES + FOUND,
)
TABLE_6 = Shown(
    "blocks",
    "size",
    "Table VI. One thread. The paper's content address is SHA-256; ours is made of the checksums that are kept "
    "anyway, and equal ids are compared byte by byte.",
    "block = size | MiB = block_bytes:MiB.0 | put over http, ms = seconds.put:ms.2 | "
    "SHA-256, ms = seconds.sha256:ms.2 | of the put = over_put.sha256:.0% | "
    "CRC-32C of 16 KiB blocks, ms = seconds.crc32c_blocks:ms.2 | "
    "of the put = over_put.crc32c_blocks:.0% | content id, ms = seconds.content_id:ms.2",
)
SECTIONS: Mapping[str, Callable[[Json], Section]] = {
    "hit_rates": hit_rates,
    "table_1": table_1,
    "table_2": TABLE_2.section,
    "table_3": TABLE_3.section,
    "table_4": TABLE_4.section,
    "table_5": TABLE_5.section,
    "table_6": TABLE_6.section,
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
    bars = listed(tiers, "tier")
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
