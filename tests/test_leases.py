"""Leases of a lookup."""

from __future__ import annotations

from storage_server.leases import LeaseTable


def test_leases_run_out_and_are_bounded() -> None:
    leases = LeaseTable(keys_max=3)
    leases.grant("b", ["x", "y"], 0.0, 10.0)
    leases.grant("b", ["x"], 1.0, 2.0)
    assert leases.is_leased("b", "x", 9.0)
    assert not leases.is_leased("b", "x", 10.0)
    assert not leases.is_leased("other", "x", 1.0)
    leases.grant("b", ["p", "q", "r"], 5.0, 100.0)
    assert [leases.is_leased("b", key, 6.0) for key in "xypqr"] == [False, False, True, True, True]
