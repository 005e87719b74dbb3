"""Changes to one entry of etcd that keep what somebody else has changed meanwhile."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Final

from objectcache.adapters.etcd import Etcd, EtcdEntry, EtcdError, entry_in

UPDATES_MAX: Final = 16
"""So often a change is made anew where others were faster."""


async def update(etcd: Etcd, key: str, changed: Callable[[bytes | None], bytes]) -> None:
    """Set a key to what `changed` makes of its value, and of no other value; None: there is no such key. Raises
    EtcdError, also where others change the key all the time, and what `changed` raises.
    """
    there = await _entry_at(etcd, key)
    for _ in range(UPDATES_MAX):
        value = changed(None if there is None else there.value)
        if there is None:
            there = await etcd.create(key, value)
            if there is None:
                return
        elif await etcd.replace(there, value):
            return
        else:
            there = await _entry_at(etcd, key)
    raise EtcdError(f"{key}: others change it all the time")


async def _entry_at(etcd: Etcd, key: str) -> EtcdEntry | None:
    answer = await etcd.call("kv/range", {"key": base64.b64encode(key.encode()).decode()})
    return entry_in(answer)
