"""The error of a lossy layer: the relative Frobenius norm of keys and of values.

‖decoded - exact‖ / ‖exact‖      0 where both are 0; infinite where only the exact ones are
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from objectcache.adapters import native
from objectcache.kv_codecs.elements import Bytes
from objectcache.kv_codecs.layer import LayerShape


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of keys and of values. The error of a chunk is the worst of its layers."""

    keys: float
    values: float

    @property
    def worst(self) -> float:
        """The greater of the two."""
        return max(self.keys, self.values)


def loss(exact: Bytes, decoded: Bytes, shape: LayerShape) -> Loss:
    """Compare S bytes with S bytes."""
    before, after = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (exact, decoded))
    half = shape.nbytes // 2
    return Loss(
        _relative(*native.squares(before[:half].data, after[:half].data, shape.element.value)),
        _relative(*native.squares(before[half:].data, after[half:].data, shape.element.value)),
    )


def _relative(whole: float, lost: float) -> float:
    if math.isnan(whole) or math.isnan(lost):
        return math.nan
    if whole > 0:
        return math.sqrt(lost / whole) if math.isfinite(whole) else math.nan
    return 0.0 if lost == 0 else math.inf
