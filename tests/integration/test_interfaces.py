"""Network interfaces by name, and the one that leads to an address."""

from __future__ import annotations

import pytest

from objectcache.adapters.interfaces import UnknownInterfaceError, interface_towards, ucx_devices


def test_interfaces_by_name() -> None:
    assert ucx_devices(["lo"]).split(",")[0] == "lo"
    assert ucx_devices(["mlx5_0:1", "mlx5_0:1"]) == "mlx5_0:1"
    assert interface_towards("127.0.0.1", 9000) == "lo"
    assert interface_towards("::1", 9000) == "lo"
    for wrong in ("", "../net/lo", "nosuch0"):
        with pytest.raises(UnknownInterfaceError):
            ucx_devices([wrong])
