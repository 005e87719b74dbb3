"""A section of Markdown for each result. Pure: the JSON of docs/results in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.figures.values import (
    NOT_MEASURED,
    Json,
    gbps,
    ms,
    origin,
    percent,
    significant,
    spread,
    table,
    verdict,
    whole_ms,
)

STATES = {"dram": "the DRAM tier", "page_cache": "the page cache", "cold": "a cold disk", "tcp": "DRAM, UCX over TCP"}
POLICIES = {
    "equal": "Equal",
    "kv-prop": "KV-prop",
    "bw-prop": "BW-prop",
    "stall-opt": "Stall-opt",
    "calibrated": "Calibrated Stall-opt",
    "slack": "**slack**",
}


def _rate(found: Json, key: str) -> str:
    measured = found["measurements"].get(key)
    return "" if measured is None else spread(measured["throughput_bytes_per_s"], gbps)


def _ratio(found: Json, name: str) -> Json:
    details: Json = {**found["ratio_details"], **found["further_ratios"]}
    ratio: Json = details.get(name) or {}
    return ratio


def transports(found: Json) -> str:
    """What each transport carries beside its own limit."""
    rows = [
        ("`shm`", "shm", "memcpy", "memcpy, one thread"),
        ("`ucx`", "ucx", "raw_nixl_write", "raw NIXL write"),
        ("`http`", "http", "raw_socket", "raw socket"),
        ("`http`, 4 connections", "http4", "", ""),
    ]
    body = [
        (
            title,
            _rate(found, f"dram/g16/{name}_layer_major"),
            _rate(found, f"page_cache/g16/{name}_layer_major"),
            _rate(found, f"cold/g16/{name}_layer_major"),
            f"{limit}: {_rate(found, f'dram/{raw}')}; {_rate(found, f'page_cache/{raw}')}" if raw else "",
        )
        for title, name, raw, limit in rows
    ]
    over_tcp = (
        "`ucx` over TCP",
        _rate(found, "tcp/g16/ucx_layer_major"),
        "",
        "",
        f"raw NIXL write over TCP: {_rate(found, 'tcp/g16/raw_nixl_write')}",
    )
    head = ("GB/s", "from the DRAM tier", "from the page cache", "from a cold disk", "limit: DRAM; page cache phase")
    cold = _rate(found, "cold/raw_cold_read")
    return f"{table(head, [*body[:2], over_tcp, *body[2:]])}\n\nRaw direct reads of the same files: {cold} GB/s."


PEERS: Sequence[tuple[str, str]] = (
    ("http_over_mooncake_tcp_layerwise", "Mooncake Store, layer-major, TCP against TCP"),
    ("http4_over_mooncake_tcp_layerwise", "Mooncake Store, layer-major, TCP against TCP, ours over 4 connections"),
    ("ucx_tcp_over_mooncake_tcp_layerwise", "Mooncake Store, layer-major, our `ucx` over TCP against its TCP"),
    ("http_over_lmcache_s3", "LMCache's S3 connector, TCP against TCP"),
    ("http_over_nixl_obj", "NIXL's OBJ plugin, a sample, TCP against TCP"),
    ("http_over_native_range_gets", "obstore, a ranged GET for each slice, a sample, TCP against TCP"),
    ("shm_over_mooncake_shm_chunkwise", "Mooncake Store, chunk-major, shared memory against shared memory"),
    ("shm_over_mooncake_layerwise", "Mooncake Store, layer-major, its best, our `shm`"),
    ("shm_over_mooncake_at_once", "Mooncake Store, all layers at once, its best, our `shm`"),
    ("shm_over_lmcache_s3", "LMCache's S3 connector, our `shm` against its TCP"),
    ("shm_over_nixl_obj", "NIXL's OBJ plugin, our `shm` against its TCP"),
    ("shm_over_native_range_gets", "obstore, our `shm` against its TCP"),
)


def peers(found: Json) -> str:
    """Other software, the same work in the same rounds."""
    rows = []
    for name, title in PEERS:
        ratio = _ratio(found, name)
        if not ratio:
            continue
        target = ratio.get("target")
        goal = "" if target is None else f"{target:g}: {verdict(ratio.get('is_met'))}"
        reason = ratio.get("reason")
        pair = reason or f"`{ratio['ours'].split('/')[-1]}` over `{ratio['theirs'].split('/')[-1]}`"
        rows.append((title, pair, _rate(found, ratio.get("theirs") or ""), spread(ratio, significant), goal))
    return table(("peer", "what over what", "its GB/s", "ours over it", "target"), rows)


def limits(found: Json) -> str:
    """Ratios to the machine's own limits, and of fine to coarse chunks."""
    names = {
        "shm_over_memcpy": "`shm` over memcpy, DRAM",
        "shm_over_memcpy_page_cache": "`shm` over memcpy, page cache",
        "ucx_over_raw_nixl_write": "`ucx` over the raw NIXL write, DRAM",
        "ucx_over_raw_nixl_write_page_cache": "`ucx` over the raw NIXL write, page cache",
        "ucx_tcp_over_raw_nixl_write_tcp": "`ucx` over TCP over the raw NIXL write over TCP",
        "http_over_raw_socket": "`http` over a raw socket, DRAM",
        "http_over_raw_socket_page_cache": "`http` over a raw socket, page cache",
        "http4_over_http": "`http` over 4 connections over one, DRAM",
        "shm_over_raw_cold_read": "`shm` over raw direct reads, cold",
    }
    for state, title in (("dram", "DRAM"), ("page_cache", "page cache"), ("cold", "cold")):
        names |= {
            f"g16_over_g256_{state}_{way}": f"G=16 over G=256, `{way}`, {title}" for way in ("shm", "ucx", "http")
        }
    rows = []
    for name, title in names.items():
        ratio = _ratio(found, name)
        if ratio:
            target = ratio.get("target")
            goal = "" if target is None else f"{target:g}: {verdict(ratio.get('is_met'))}"
            rows.append((title, ratio.get("reason") or spread(ratio, significant), goal))
    return table(("ratio, paired within rounds", "seen", "target"), rows)


def first_layers(found: Json) -> str:
    """Every cell's time to its first layer, beside 5 ms and the layer's own transfer."""
    rows = []
    for key, first in found["first_layers"].items():
        state, grain, name = key.split("/")
        way = name.removesuffix("_layer_major")
        cells = (f"`{way}`", STATES[state], grain.upper().replace("G", "G="))
        rows.append((*cells, ms(first["median_s"]), ms(first["limit_s"]), verdict(first["is_met"])))
    return table(("", "from", "chunks", "first layer, ms", "at most", ""), rows)


def _cells(found: Json, part: str) -> dict[tuple[str, str], Json]:
    return {(cell["workload"], cell["variant"]): cell for cell in found[part]["cells"]}


def shared_link(live: Json) -> str:
    """Workloads A, B and C on the server."""
    cells = _cells(live, "live")
    names = sorted({name for name, _ in cells})
    variants = dict.fromkeys(variant for _, variant in cells)
    has_both = "added_ttft_over_no_limit_s" in next(iter(cells.values()))
    rows = []
    for variant in variants:
        policy, _, shares = variant.partition("/")
        row = [POLICIES.get(policy, policy) + (", freed bandwidth shared again" if shares else "")]
        for name in names:
            cell = cells[name, variant]
            text = spread(cell["added_ttft_s"], whole_ms)
            if has_both:
                text += f"; over no limit {whole_ms(cell['added_ttft_over_no_limit_s']['median'])}"
            row.append(text)
        rows.append(row)
    targets = [
        (
            target["what"].replace("_", " "),
            f"{target['least']:.2f}",
            _number(target["value"]),
            verdict(target["is_met"]),
        )
        for target in live["live"]["targets"]
    ]
    pace = live["live"]["pace_error"]
    lines = [
        table(("added TTFT of all requests, ms", *names), rows),
        table(("target", "at least", "seen", ""), targets),
        f"Held rates are {pace['median']:.2%} off (median), {pace['max']:.2%} at most.",
    ]
    repeated = live["live"].get("repeated_runs")
    if repeated is not None:
        lines.append(f"{repeated} runs were repeated, since their requests fell into several epochs.")
    return "\n\n".join(lines)


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else significant(value)


def simulated(found: Json) -> str:
    """The model beside the paper, and random workloads."""
    simulation, summary = found["simulation"], found["random"]["summary"]
    error, added = simulation["model_error"], simulation.get("model_error_of_added_ttft")
    lines = [
        f"The model is {error['median']:.1%} (median) and {error['max']:.1%} (at most) from the paper's measured TTFTs"
        + (f"; from its *added* TTFTs {added['median']:.0%} and {added['max']:.0%}." if added else "."),
        table(
            (f"{summary['count']:,} random workloads, simulated", ""),
            [
                ("held Calibrated over slack, added TTFT, mean", significant(summary["mean_calibrated_over_slack"])),
                ("slack over held Calibrated, 99th percentile", significant(summary["p99_slack_over_calibrated"])),
                ("slack over held Calibrated, greatest", significant(summary["max_slack_over_calibrated"])),
                ("worst TTFT over that under Equal", significant(summary["worst_delay_over_equal"])),
                ("part of slack's gain lost with every c wrong by up to 30 %", f"{summary['lost_gain']:.1%}"),
                ("worst TTFT over that under Equal, c wrong", significant(summary["wrong_worst_delay_over_equal"])),
            ],
        ),
    ]
    return "\n\n".join(lines)


def ttft(found: Json) -> str:
    """Over a payload that lies in the client's memory in order of layers."""
    systems = {"s3_agg_lw": "S3Agg-LW (one request, layer by layer)", "s3_batch_cw": "S3Batch-CW (whole chunks)"}
    cases = [(context, rate) for context in ("4K", "64K") for rate in (0.5, 0.875)]
    rows = []
    for figure, suffix in (("13", ""), ("14", ", link capped")):
        cells = {
            (cell["context"], cell["hit_rate"], cell["system"]): cell
            for cell in found["figures"].get(figure, ())
            if cell["chunk_tokens"] == 64
        }
        for system, title in systems.items():
            row = [cells.get((context, rate, system)) for context, rate in cases]
            if any(row):
                texts = ["" if cell is None else percent(cell["ratio"]["median"] - 1) for cell in row]
                rows.append((f"{title}{suffix}", *texts))
    head = ("TTFT over opt-local-LW, G=64", *(f"{context}, {rate:.1%}" for context, rate in cases))
    targets = [
        (target["what"], significant(target["limit"]), _number(target["value"]), verdict(target["is_met"]))
        for target in found["targets"]
    ]
    return f"{table(head, rows)}\n\n{table(('target', 'at most', 'seen', ''), targets)}"


ENGINE_WAYS = {
    "recompute": "recompute",
    "objectcache_layerwise": "**ObjectCache layerwise**",
    "objectcache_chunkwise": "chunkwise",
    "lmcache_cpu": "LMCache, its own memory",
    "lmcache_s3": "LMCache over S3 (our gateway)",
    "example_connector": "ExampleConnector",
    "example_connector_told": "the same, told the prefixes",
    "own_blocks": "own blocks: the floor",
}


def engine(found: Json) -> str:
    """vLLM's TTFT."""
    cells = {(cell["context_tokens"], cell["hit_rate"], cell["way"]): cell for cell in found["measurements"]}
    ways = [way for way in ENGINE_WAYS if any(key[2] == way for key in cells)]
    parts = []
    for rate in sorted({key[1] for key in cells}, reverse=True):
        rows: list[Sequence[str]] = []
        for context in sorted({key[0] for key in cells}):
            texts = [_seconds(cells.get((context, rate, way))) for way in ways]
            rows.append((f"{context // 1024}K", *texts))
        parts.append(table((f"TTFT in s, {rate:.1%} stored", *(ENGINE_WAYS[way] for way in ways)), rows))
    targets = [
        (target["what"], target["case"] or "", f"{target['limit']:g}", spread(target["value"], significant),
         verdict(target["is_met"]))
        for target in found["targets"]
    ]  # fmt: skip
    parts.append(table(("target, at 87.5 %", "worst case", "at least", "seen", ""), targets))
    return "\n\n".join(parts)


def advised(found: Json) -> str:
    """What is advised beside loading all and computing all, over paced links."""
    seen = found["advised"]
    rows = [
        (
            f"{link['factor']:g} ({link['link_bytes_per_s'] / 1e6:.1f} MB/s)",
            *(spread(_spread_of(link["ttfts_s"].get(way)), significant) for way in ADVISED_WAYS),
            spread(link["advised_over_best"], significant),
        )
        for link in seen["links"]
    ]
    head = (
        f"TTFT in s, {seen['case']} stored; link, of the break-even", "recompute", "load all", "advised",
        f"advised over the better: at most {seen['limit']:g}",
    )  # fmt: skip
    return f"{table(head, rows)}\n\nTarget: {verdict(seen['is_met'])}."


ADVISED_WAYS = ("recompute", "objectcache_layerwise", "objectcache_advised")


def _spread_of(values: Sequence[float] | None) -> Json | None:
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _seconds(cell: Any) -> str:
    return "" if cell is None else significant(cell["ttft_s"]["median"])


S3_SIZES = {"4kib": "4 KiB", "64kib": "64 KiB", "2mib": "2 MiB", "32mib": "32 MiB"}


def plain_s3(found: Json) -> str:
    """PUT and GET beside Ceph RGW, and lists."""
    rows = []
    for size, title in S3_SIZES.items():
        for operation in ("put", "get"):
            row = [f"{operation.upper()} {title}"]
            for in_flight in (8, 32):
                name = f"{operation}_{size}_x{in_flight}"
                ours = found["measurements"].get(name, {}).get("ours")
                row.append("" if ours is None else f"{ours['requests_per_s']['median']:,.0f}")
                row.append(spread(found["ratio_spreads"].get(f"{name}_ours_over_rgw"), significant))
            rows.append(row)
    head = ("", "requests/s, 8 in flight", "over RGW", "requests/s, 32 in flight", "over RGW")
    further = {
        "get_32mib_over_raw_socket": "GETs of 32 MiB over a raw socket, as obstore receives them",
        "get_32mib_received_over_raw_socket": "the same, received as the raw socket's bytes are",
        "get_32mib_canned_over_raw_socket": "obstore's GETs of canned answers from memory over a raw socket",
        "list_ours_over_rgw": "lists of all keys over RGW's",
    }
    ratios = [(title, spread(found["ratio_spreads"].get(name), significant)) for name, title in further.items()]
    return f"{table(head, rows)}\n\n{table(('ratio', 'seen'), ratios)}"


def ladder(found: Json) -> str:
    """The five paths, slices of 64 KiB."""
    cells = [
        cell for cell in found["figures"]["11"]["cells"] if cell["operation"] == "GET" and cell["block_bytes"] == 65536
    ]
    rows = [(cell["path"], str(cell["in_flight"]), spread(cell["throughput_bytes_per_s"], gbps)) for cell in cells]
    samples = sorted({cell["sample_count"] for cell in cells})
    return f"{table(('GET, 64 KiB slices', 'in flight', 'GB/s'), rows)}\n\nSamples of a cell: {samples[0]}."


def theta(found: Json) -> str:
    """The threshold between the two orders."""
    one = found["theta"]
    rows = [
        (each["name"], percent(each["mean_change"]), percent(each["worst_change"])) for each in found["sensitivity"]
    ]
    text = (
        f"Θ is {one['theta_bytes'] / 2**20:.0f} MiB here, {one['low_bytes'] / 2**20:.0f} to "
        f"{one['high_bytes'] / 2**20:.0f} in {one['confidence']:.0%} of resampled rounds."
    )
    return f"{text}\n\n{table(('with', 'TTFT, mean of all cases', 'worst case'), rows)}"


def crash(found: Json) -> str:
    """What the harness did."""
    return (
        f"{found['rounds']} rounds in {found['seconds']:.0f} s (seed {found['seed']}): {found['kills']} kills, "
        f"{found['kills_while_starting']} of them while the server started; {found['acknowledged']:,} changes were "
        f"acknowledged, {found['in_doubt']:,} in doubt"
        + (f", {found['compactions']:,} compactions ran meanwhile. " if "compactions" in found else ". ")
        + ("Everything acknowledged was there." if found["failure"] is None else f"**Failed**: {found['failure']}")
    )


def demo(found: Json) -> str:
    """TTFT of the question."""
    ttfts = found["ttft"]
    return (
        f"A question of {found['question_tokens']} tokens after {found['document_tokens']:,} cached ones, over "
        f"`{found['transport']}`: TTFT {ms(ttfts['layer_major']['median_s'])} ms layer-major, "
        f"{ms(ttfts['chunk_major']['median_s'])} ms chunk-major (medians of {ttfts['layer_major']['count']}), "
        f"{ms(ttfts['recompute']['median_s'])} ms recomputed (median of {ttfts['recompute']['count']}); Eq. 3 predicts "
        f"{ms(found['eq3_ttft_s'])} ms."
    )


def commits(found: Json) -> str:
    """Which commit each result is of; results of several commits are not to be compared with each other."""
    return table(
        ("result", "measured at"), [(f"[{name}](results/{name}.json)", origin(one)) for name, one in found.items()]
    )
