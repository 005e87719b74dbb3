"""Which order a delivery goes in."""

from __future__ import annotations

from descriptors.descriptor import Delivery
from descriptors.notices import Mode
from storage_server.delivery.scheduler.mode import choose_mode


def test_theta_decides_only_when_the_caller_does_not() -> None:
    """Eq. 2: chunk-major below Theta, layer-major from Theta on."""
    assert choose_mode(Delivery.AUTO, 99, 100) is Mode.CHUNK_MAJOR
    assert choose_mode(Delivery.AUTO, 100, 100) is Mode.LAYER_MAJOR
    assert choose_mode(Delivery.LAYER_MAJOR, 1, 100) is Mode.LAYER_MAJOR
    assert choose_mode(Delivery.CHUNK_MAJOR, 1000, 100) is Mode.CHUNK_MAJOR
