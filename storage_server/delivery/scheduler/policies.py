"""Bandwidth policies: how a link's budget is split among layerwise requests. Pure.

    s_i layer_bytes   c_i compute_s   B budget   r_i rate   r*_i = s_i/c_i zero-stall rate   delta margin   w_i weight

Equal       r_i = B w_i / sum w            KV-prop   r_i ~ w_i s_i            BW-prop   r_i ~ w_i r*_i
Stall-opt   minimises sum w_i s_i/r_i with sum r_i <= B and r_i <= r*_i:  r_i = min(r*_i, k sqrt(w_i s_i))
Calibrated  the same with r*_i + delta in place of r*_i
(ObjectCache paper, Eq. 4 to 7 and section 5.7. With all weights 1 these are Table A9; its Table A4 is not.)

A request that states no compute time is taken to need its equal share. A stated need counts for at most `CLAIM_MAX`
links, and every request gets at least `SHARE_MIN` of its equal share, whatever the others state.

    B = 120, delta = 10, request 1: s = 100, c = 1, r* = 100; request 2: s = 400, c = 8, r* = 50

    Equal 60, 60    KV-prop 24, 96    BW-prop 80, 40    Stall-opt 70, 50    Calibrated 60, 60
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from descriptors.units import bytes_per_s_from_gbps
from storage_server.delivery.scheduler.demand import Demand

Floats = NDArray[np.float64]
MARGIN_BYTES_PER_S = bytes_per_s_from_gbps(5)
SHARE_MIN = 0.01
CLAIM_MAX = 2.0


class Policy(Enum):
    """The policies, by their names in the configuration."""

    EQUAL = "equal"
    KV_PROP = "kv-prop"
    BW_PROP = "bw-prop"
    STALL_OPT = "stall-opt"
    CALIBRATED_STALL_OPT = "calibrated"


def allocate(
    policy: Policy,
    demands: Sequence[Demand],
    budget_bytes_per_s: float,
    margin_bytes_per_s: float = MARGIN_BYTES_PER_S,
) -> Floats:
    """One rate in bytes/s for each demand, in order. Their sum is at most the budget. Raises ValueError on a budget
    that is not above 0 and finite.
    """
    if not 0 < budget_bytes_per_s < np.inf:
        raise ValueError(f"the budget must be above 0 and finite, not {budget_bytes_per_s}")
    if not demands:
        return np.zeros(0)
    weights = np.array([demand.weight for demand in demands])
    limits = np.array(
        [np.inf if demand.rate_max_bytes_per_s is None else demand.rate_max_bytes_per_s for demand in demands]
    )
    shape, caps = _shape_and_caps(policy, demands, budget_bytes_per_s, margin_bytes_per_s)
    floors = np.minimum(SHARE_MIN * budget_bytes_per_s * weights / weights.sum(), limits)
    caps = np.maximum(np.minimum(caps, limits), floors)
    priorities = np.array([demand.priority for demand in demands])
    rates = np.zeros(len(demands))
    left = budget_bytes_per_s
    for priority in sorted(set(priorities.tolist()), reverse=True):
        here, below = priorities == priority, priorities < priority
        rates[here] = water_fill(shape[here], caps[here], floors[here], left - floors[below].sum())
        left -= rates[here].sum()
    return rates


def zero_stall_rates(demands: Sequence[Demand], budget_bytes_per_s: float) -> Floats:
    """r* of each demand in bytes/s: at most `CLAIM_MAX` budgets, and the equal share where no compute time is known."""
    weights = np.array([demand.weight for demand in demands])
    claim_max = CLAIM_MAX * budget_bytes_per_s
    known = []
    for demand, share in zip(demands, (budget_bytes_per_s * weights / weights.sum()).tolist(), strict=True):
        compute_s = demand.stated_compute_s
        if compute_s is None:
            known.append(share)
        elif compute_s * claim_max <= demand.layer_bytes:
            known.append(claim_max)
        else:
            known.append(demand.layer_bytes / compute_s)
    return np.array(known, dtype=np.float64)


def _shape_and_caps(policy: Policy, demands: Sequence[Demand], budget: float, margin: float) -> tuple[Floats, Floats]:
    """The values that the rates are in proportion to, and the upper bounds of the rates."""
    weights = np.array([demand.weight for demand in demands])
    sizes = np.array([max(demand.layer_bytes, 1) for demand in demands], dtype=np.float64)
    unlimited = np.full(len(demands), np.inf)
    match policy:
        case Policy.EQUAL:
            return weights, unlimited
        case Policy.KV_PROP:
            return weights * sizes, unlimited
        case Policy.BW_PROP:
            return weights * zero_stall_rates(demands, budget), unlimited
        case Policy.STALL_OPT:
            return np.sqrt(weights * sizes), zero_stall_rates(demands, budget)
        case Policy.CALIBRATED_STALL_OPT:
            return np.sqrt(weights * sizes), zero_stall_rates(demands, budget) + margin


def water_fill(shape: Floats, caps: Floats, floors: Floats, budget: float) -> Floats:
    """r_i = k shape_i, kept between floor_i and cap_i, with the largest k whose sum is within `budget`. Where the
    floors alone exceed the budget, the budget is split in proportion to them.
    """
    if caps.sum() <= budget:
        return caps.copy()
    if floors.sum() >= budget:
        return floors * float(budget / floors.sum())
    # The sum is piecewise linear and rises with k. It has a corner where a rate leaves its floor or meets its cap.
    leaves, meets = floors / shape, caps / shape
    corners = np.unique(np.concatenate([leaves, meets[np.isfinite(meets)]]))
    first, last = 0, len(corners)
    while first < last:
        middle = (first + last) // 2
        if np.clip(corners[middle] * shape, floors, caps).sum() <= budget:
            first = middle + 1
        else:
            last = middle
    corner = corners[first - 1] if first else 0.0
    rising = (leaves <= corner) & (meets > corner)
    still = np.where(meets <= corner, caps, floors)[~rising].sum()
    k = (budget - still) / shape[rising].sum() if rising.any() else corner
    filled: Floats = np.clip(k * shape, floors, caps)
    return filled
