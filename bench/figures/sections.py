"""Sections of the documents that no experiment shows: of commands beside `bench`, and of all results together. Pure."""

from __future__ import annotations

from bench.core.show import (
    NOT_MEASURED,
    Column,
    Json,
    Table,
    as_markdown,
    ms,
    percent,
    table,
    verdict,
    written,
)
from bench.experiments.aggregate.show import GOAL, ratio_of


def theta(found: Json) -> str:
    """The threshold between the two orders."""
    one = found["theta"]
    text = (
        f"Θ is {one['theta_bytes'] / 2**20:.0f} MiB here, {one['low_bytes'] / 2**20:.0f} to "
        f"{one['high_bytes'] / 2**20:.0f} in {one['confidence']:.0%} of resampled rounds."
    )
    changes = (
        Column("TTFT, mean of all cases", "mean_change", percent),
        Column("worst case", "worst_change", percent),
    )
    return as_markdown([text, table(found["sensitivity"], "with = name", *changes)])


def crash(found: Json) -> str:
    """What the harness did."""
    return (
        f"{found['rounds']} rounds in {found['seconds']:.0f} s (seed {found['seed']}): {found['kills']} kills, "
        f"{found['kills_while_starting']} of them while the server started; {found['acknowledged']:,} changes were "
        f"acknowledged, {found['in_doubt']:,} in doubt"
        + (f", {found['compactions']:,} compactions" if "compactions" in found else "")
        + (f" and {found['deduplications']:,} deduplications" if "deduplications" in found else "")
        + (" ran meanwhile. " if "compactions" in found else ". ")
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


HEADLINE_RATIOS = {
    "http_over_raw_socket": "One request for 512 chunks, from DRAM: our `http` over a raw socket",
    "shm_over_memcpy": "the same: our `shm` over memcpy by one thread",
    "http_over_mooncake_tcp_layerwise": "Mooncake Store layer by layer, TCP against TCP: our rate over its rate",
}
HEADLINE_ENGINES = {
    "recompute over ObjectCache": "vLLM, 87.5 % stored: TTFT of recomputing over ours",
    "ExampleConnector, told the prefixes, over ObjectCache": "the same: TTFT of vLLM's ExampleConnector, given a list "
    "of the stored prefixes, over ours",
}


def headline(results: Json) -> str:
    """The six figures of README: like against like, with what is missed among them."""
    rows = []
    for name, title in HEADLINE_RATIOS.items():
        ratio = ratio_of(results["aggregate"], name)
        rows.append((title, ratio.get("reason") or written(ratio), GOAL.of(ratio)))
    for target in results["engine"]["targets"]:
        if target["what"] in HEADLINE_ENGINES:
            title = f"{HEADLINE_ENGINES[target['what']]}; worst at {target['case']}"
            rows.append((title, written(target["value"]) or NOT_MEASURED, _goal(target["limit"], target)))
    shared = [
        target
        for target in results["scheduler-live"]["live"]["targets"]
        if target["what"].endswith(": added_ttft_calibrated_over_slack")
    ]
    least = min(shared, key=lambda target: target["value"])
    title = "A shared link: added TTFT of the paper's policy over that of `slack`; worst of three workloads"
    rows.append((title, written(least["value"]), _goal(least["least"], least)))
    return as_markdown([Table(("", "seen", "at least"), rows), crash(results["crash"])])


def _goal(limit: float, target: Json) -> str:
    return f"{limit:g}: {verdict(target['is_met'])}"


def commits(found: Json) -> str:
    """Which commit each result is of; results of several commits are not to be compared with each other."""
    rows = found.items()
    commit = Column("measured at", lambda row: _commit(row[1].get("commit")))
    return table(rows, Column("result", lambda row: f"[{row[0]}](results/{row[0]}.json)"), commit).markdown()


def _commit(commit: str | None) -> str:
    return f"commit `{commit[:7]}`" if commit else "no commit named"
