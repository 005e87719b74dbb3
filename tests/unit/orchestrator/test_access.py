"""Callers: under which name the memory of a request counts where there are no tenants."""

from __future__ import annotations

import pytest

from objectcache.adapters.caller import caller_of


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("", ""),
        ("no:address", "no:address"),
    ],
)
def test_a_host_of_ipv6_is_one_caller_whichever_of_its_addresses_it_uses(address: str, caller: str) -> None:
    assert caller_of(address) == caller
