"""The section, the targets and the remarks of the live part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.core.rounds import Side, Target
from bench.core.show import Section, table
from objectcache.calibration.samples import Spread

REMARK = (
    "Live: SmolLM2-135M-Instruct over texts of the documentation of Python, with four facts put into each; it answers "
    "in bfloat16 on one core, and what a form loses is scored in float32. The servers are in the process of the "
    "model; only their disk is played, by sleeping. Contexts are drawn by Zipf's law. All ways take turns in each "
    "round. What comes is compared with what the codec makes of the exact chunk, or of the forms before. TTFT at a "
    "load: requests come by Poisson, at that part of what exact chunks can serve, and wait for those before; that "
    "wait is computed from the times that were measured. The best codec alone has the same policy and price of "
    "quality, and is chosen afterwards."
)


def live_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    """All ways, and all codecs together beside the best one alone."""
    found = [
        {**row, **{f"load_{each['load'] * 100:.0f}": each["ttft_s"] for each in row["ttft_with_arrivals"]}}
        for row in rows
    ]
    loads = " | ".join(
        f"at {each['load']:.0%} load = load_{each['load'] * 100:.0f}:ms" for each in rows[0]["ttft_with_arrivals"]
    )
    return (
        table(
            found, "memory = memory_share:.0% | alpha s = alpha_s | way = way | TTFT ms = ttft_s:ms",
            "p50 = ttft_p50_s:ms | p90 = ttft_p90_s:ms | same tokens = same:.4 | KL = kl:.4 | facts = facts_right:.3",
            f"DRAM hits = dram_hit_rate:.2 | {loads}",
        ),
        table(
            [row for row in rows if "gain_s" in row],
            "memory = memory_share:.0% | alpha s = alpha_s | best codec alone = best_single",
            "its TTFT ms = single_ttft_s:ms | its quality = single_quality:.4 | all three: TTFT ms = mean_ttft_s:ms",
            "quality = quality:.4 | gain over it ms, 95 % = gain_s:ms",
            "exact over all three, TTFT = exact_over_ttft:.2 | gain over exact ms, 95 % = gain_over_exact_s:ms",
        ),
    )  # fmt: skip


def live_targets(rows: Sequence[Mapping[str, Any]]) -> Iterator[Target]:
    """A gain over exact chunks counts by the lower end of its interval. Memory takes one codec, so against the best one
    alone nothing is to be gained, and by the upper end nothing may be lost.
    """
    for row in rows:
        if "gain_s" not in row:
            continue
        case = f"memory for {row['memory_share']:.0%}, alpha {row['alpha_s']:g} s"
        _, high = _ends(row["gain_s"])
        yield Target("live: upper end of the gain over the best codec alone, s", 0.0, high, case=case)
        low, _ = _ends(row["gain_over_exact_s"])
        yield Target("live: lower end of the gain over exact chunks, s", 0.0, low, Side.MORE_THAN, case=case)


def _ends(gain: Spread | Mapping[str, float]) -> tuple[float, float]:
    """The ends of a gain as measured, or as read from a result."""
    return (gain.min, gain.max) if isinstance(gain, Spread) else (gain["min"], gain["max"])
