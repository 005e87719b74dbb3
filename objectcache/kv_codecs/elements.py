"""Elements of KV as float32, and back: float16, bfloat16 and float32, little-endian."""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Element(Enum):
    """The types of elements. The value is what an encoded layer's head has."""

    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3

    @property
    def nbytes(self) -> int:
        """Bytes of one."""
        return 4 if self is Element.FLOAT32 else 2


def to_floats(data: Bytes, element: Element) -> Floats:
    """The elements of these bytes."""
    if element is Element.FLOAT32:
        return data.view("<f4").astype(np.float32, copy=False)
    if element is Element.FLOAT16:
        return data.view("<f2").astype(np.float32)
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def from_floats(values: Floats, element: Element, out: Bytes) -> None:
    """Write the elements as bytes; the nearest value, and of two that are as near the even one."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if element is Element.FLOAT32:
        out.view("<f4")[:] = flat
    elif element is Element.FLOAT16:
        with np.errstate(over="ignore"):
            out.view("<f2")[:] = flat
    else:
        bits = flat.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        out.view("<u2")[:] = np.where(np.isnan(flat), 0x7FC0, rounded)
