"""What the ucx process is given: memory, variables, interfaces."""

from __future__ import annotations

import asyncio
import mmap

import pytest

from objectcache.adapters.memory_area import SharedArea
from storage_server.delivery.gather.staging import StagingPool
from storage_server.delivery.transport.ucx_child import ucx_environment


def test_a_slot_is_wiped_when_it_passes_to_another_key() -> None:
    """A peer of one key may read all of staging; what another key was sent does not lie about in it."""
    pool = StagingPool(4096, 2, SharedArea(8192), key_slots_max=2, wipes=True)

    async def use(key: str, content: bytes) -> tuple[bytes, int]:
        slot = await pool.window(key, 1).take()
        found = bytes(slot.view)
        slot.view[:] = content * 4096
        slot.release()
        return found, slot.address

    async def trial() -> None:
        _, first = await use("a", b"a")
        assert await use("a", b"a") == (b"a" * 4096, first), "the same key's own is not wiped"
        _, second = await use("b", b"b")
        assert second != first
        assert await use("a", b"a") == (b"a" * 4096, first)
        found, where = await use("c", b"c")
        assert (found, where in (first, second)) == (bytes(4096), True)

    asyncio.run(trial())


def test_a_read_only_area_cannot_be_mapped_for_writing_again() -> None:
    area = SharedArea(8192, is_read_only=True)
    area.map[:4] = b"ours"
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(area.fd, 8192, mmap.MAP_SHARED)
    with mmap.mmap(area.fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
        assert seen[:4] == b"ours"
    area.close()


def test_a_process_with_an_agent_knows_only_what_it_needs() -> None:
    environment = {
        "AWS_SECRET_ACCESS_KEY": "s",
        "PATH": "/bin",
        "UCX_TLS": "tcp",
        "OBJECTCACHE_PEER": "x",
        "PYTHONSTARTUP": "x",
        "UCX_NET_DEVICES": "all",
    }
    kept = ucx_environment(environment, "lo")
    assert set(kept) == {"PATH", "UCX_TLS", "UCX_NET_DEVICES", "PYTHONPATH"}
    assert kept["UCX_NET_DEVICES"] == "lo"
