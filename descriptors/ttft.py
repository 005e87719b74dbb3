"""The TTFT model of layerwise delivery (ObjectCache paper, Eq. 3) and its chunkwise counterpart.

X_l transfer time of layer l   C_l compute time of layer l   L layers

TTFT_layerwise = X_0 + sum_{l=0}^{L-2} max(X_{l+1}, C_l) + C_{L-1}
TTFT_chunkwise = sum X_l + sum C_l          (nothing starts before everything is there)
"""

from __future__ import annotations

from collections.abc import Sequence


def ttft_layerwise_s(transfer_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """Eq. 3 in seconds; both sequences have one entry per layer. Raises ValueError on different or zero lengths."""
    _check(transfer_s, compute_s)
    overlapped = sum(max(x, c) for x, c in zip(transfer_s[1:], compute_s[:-1], strict=True))
    return transfer_s[0] + overlapped + compute_s[-1]


def ttft_chunkwise_s(transfer_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """Load everything, then compute everything, in seconds."""
    _check(transfer_s, compute_s)
    return sum(transfer_s) + sum(compute_s)


def stall_s(layer_bytes: float, rate_bytes_per_s: float, compute_s: float) -> float:
    """Eq. 4: the part of a layer's transfer that its compute window does not hide, in seconds."""
    return max(0.0, layer_bytes / rate_bytes_per_s - compute_s)


def zero_stall_rate_bytes_per_s(layer_bytes: float, compute_s: float) -> float:
    """r* = s/c, the rate beyond which more bandwidth saves nothing."""
    return layer_bytes / compute_s


def _check(transfer_s: Sequence[float], compute_s: Sequence[float]) -> None:
    if len(transfer_s) != len(compute_s) or not transfer_s:
        raise ValueError(f"need one entry per layer in both: {len(transfer_s)} and {len(compute_s)}")
