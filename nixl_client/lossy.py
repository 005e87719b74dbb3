"""How much loss a reader takes: none, codecs with a bound of the error, or whatever the server finds of use."""

from __future__ import annotations

from enum import Enum

from descriptors.descriptor import ELEMENT_BYTES, Accept
from objectcache.kv_codecs.layer import Codec

BOUNDED = (Codec.KIVI8.value, Codec.FP8.value, Codec.K8V4.value, Codec.KIVI4.value)
ADAPTIVE = (*BOUNDED, Codec.K4V3.value, Codec.KIVI3.value, Codec.K4V2.value)
"""No codec here drops tokens: an engine's blocks have room for every one, and its attention reads them all. None has
keys of 2 bits, behind which models lose facts that stand in their contexts (docs/design/compression.md).
"""
MAX_ERROR = 0.12
"""Values of 4 bits err by at most 0.11 on the models of docs/design/compression.md, values of 3 and 2 bits by more."""


class Lossy(Enum):
    """The readers' choice. Without a loss is the default."""

    OFF = "off"
    BOUNDED = "bounded"
    ADAPTIVE = "adaptive"


def accept_of(
    lossy: Lossy, dtype: object, max_error: float = MAX_ERROR, max_loss: float | None = None
) -> Accept | None:
    """The value for `accept` of a descriptor, for KV whose elements have this dtype of torch or numpy; None for exact
    chunks only. `max_error` counts with BOUNDED, `max_loss` with both. Raises ValueError for elements that no codec
    takes.
    """
    if lossy is Lossy.OFF:
        return None
    element = str(dtype).removeprefix("torch.")
    if element not in ELEMENT_BYTES:
        raise ValueError(f"lossy: {element} cannot be encoded: only {', '.join(ELEMENT_BYTES)}")
    if lossy is Lossy.BOUNDED:
        return Accept(BOUNDED, element, max_error, max_loss)
    return Accept(ADAPTIVE, element, max_loss=max_loss)
