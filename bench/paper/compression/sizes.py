"""The sizes of the models that are trained here, and where their weights are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True, slots=True)
class Size:
    """A size of the model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


SIZES = {"small": Size(4, 128, 4, 2, 64), "smaller": Size(3, 96, 3, 1, 64)}
