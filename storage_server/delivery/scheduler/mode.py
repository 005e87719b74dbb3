"""Mode selection: one threshold on the delivery bytes (ObjectCache paper, Eq. 2).

Example: with Theta = 100 MB a delivery of 60 MB goes chunk-major, and one of 100 MB layer-major.
"""

from __future__ import annotations

from descriptors.descriptor import Delivery
from descriptors.notices import Mode


def choose_mode(delivery: Delivery, delivery_bytes: int, theta_bytes: int) -> Mode:
    """The mode that the caller asked for. If the caller left the choice: chunk-major for W < Theta,
    else layer-major.
    """
    if delivery is Delivery.LAYER_MAJOR:
        return Mode.LAYER_MAJOR
    if delivery is Delivery.CHUNK_MAJOR:
        return Mode.CHUNK_MAJOR
    return Mode.CHUNK_MAJOR if delivery_bytes < theta_bytes else Mode.LAYER_MAJOR
