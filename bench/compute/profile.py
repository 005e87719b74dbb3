"""The table `[[compute_profiles]]` of a configuration: what a model's prefill costs on the machine it is for. Pure.

From it a storage server derives a request's compute window when the descriptor brings none. It knows only the cached
tokens h; it takes the context to be h / hit_rate.
"""

from __future__ import annotations

from bench.compute.cost_model import Fit
from bench.compute.shapes import ModelShape

ASSUMED_HIT_RATE = 0.5
SIGNIFICANT_DIGITS = 6
Profile = dict[str, str | int | float]


def compute_profile(model: ModelShape, fit: Fit, hit_rate: float = ASSUMED_HIT_RATE) -> Profile:
    """One table, microseconds over all layers. Raises ValueError for a hit rate that is none."""
    if not 0 < hit_rate < 1:
        raise ValueError(f"a hit rate lies between 0 and 1, not at {hit_rate}")
    return {
        "name": model.name,
        "num_layers": model.num_layers,
        "token_layer_bytes": model.token_layer_bytes,
        "request_us": _rounded(fit.costs.request_us),
        "token_us": _rounded(fit.costs.token_us),
        "token_pair_us": _rounded(fit.costs.token_pair_us),
        "hit_rate": hit_rate,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
