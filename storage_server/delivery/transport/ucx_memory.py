"""All memory that the ucx process maps: a staging pool of its own, wiped between access keys, and the DRAM tier where
that was asked for. A ucx peer can reach no other memory of the server.
"""

from __future__ import annotations

from descriptors.units import MIB
from objectcache.adapters.memory_area import SharedArea
from storage_server.delivery.gather.staging import StagingPool, stride_of
from storage_server.settings import StorageSettings

WHOLE_SLOT_BYTES = MIB


class UcxMemory:
    """`staging` is for payloads, `whole` for objects that are staged whole; `whole` is None where there are none."""

    def __init__(self, settings: StorageSettings) -> None:
        slot_count = settings.staging_bytes // settings.aggregation_bytes
        whole_count = settings.rdma_buffer_bytes // WHOLE_SLOT_BYTES
        staging_bytes = slot_count * stride_of(settings.aggregation_bytes)
        area = SharedArea(staging_bytes + whole_count * WHOLE_SLOT_BYTES)
        self.areas = [area]
        self.staging = StagingPool(settings.aggregation_bytes, slot_count, area, wipes=True)
        self.whole: StagingPool | None = None
        if whole_count:
            self.whole = StagingPool(WHOLE_SLOT_BYTES, whole_count, area, staging_bytes, wipes=True)

    def dram_area(self, nbytes: int) -> SharedArea:
        """Memory for the DRAM tier, which the ucx process can read."""
        area = SharedArea(nbytes, is_read_only=True)
        self.areas.append(area)
        return area

    def close(self) -> None:
        """Close the descriptors. No further process can be given the memory."""
        for area in self.areas:
            area.close()
