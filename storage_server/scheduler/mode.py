"""Mode selection: one threshold on the payload (ObjectCache paper, Eq. 2)."""

from __future__ import annotations

from descriptors.descriptor import Delivery
from descriptors.notices import Mode


def choose_mode(delivery: Delivery, payload_bytes: int, theta_bytes: int) -> Mode:
    """What the caller asked for; left to us, chunk-major for W < Theta and layer-major from Theta on."""
    if delivery is Delivery.LAYER_MAJOR:
        return Mode.LAYER_MAJOR
    if delivery is Delivery.CHUNK_MAJOR:
        return Mode.CHUNK_MAJOR
    return Mode.CHUNK_MAJOR if payload_bytes < theta_bytes else Mode.LAYER_MAJOR
