"""The error of a lossy layer: the relative Frobenius norm of keys and of values.

‖decoded - exact‖ / ‖exact‖      0 where both are 0; infinite where only the exact ones are
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kv_codecs.elements import Bytes, Floats, to_floats
from kv_codecs.layer import LayerShape


@dataclass(frozen=True, slots=True)
class Loss:
    """Of keys and values. The error of a chunk is the worst of its layers."""

    keys: float
    values: float

    @property
    def worst(self) -> float:
        """The greater of the two."""
        return max(self.keys, self.values)


def loss(exact: Bytes, decoded: Bytes, shape: LayerShape) -> Loss:
    """Compare S bytes with S bytes."""
    before, after = (
        to_floats(each.reshape(-1).view(np.uint8), shape.element).reshape(2, -1) for each in (exact, decoded)
    )
    return Loss(_relative(before[0], after[0]), _relative(before[1], after[1]))


def _relative(exact: Floats, decoded: Floats) -> float:
    difference = float(np.linalg.norm((decoded - exact).astype(np.float64)))
    size = float(np.linalg.norm(exact.astype(np.float64)))
    if size > 0:
        return difference / size
    return 0.0 if difference == 0 else math.inf
