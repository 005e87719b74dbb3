"""The memory of a server beside its DRAM tier, in pools that are parts of one number. Pure."""

from __future__ import annotations

from descriptors.units import GIB, MIB, format_bytes

MEMORY_BYTES = 2 * GIB
MEMORY_BYTES_MIN = 512 * MIB
"""Staging has a sixteenth of it: the window of one delivery."""
UNITS = 32


def storage_pools(memory_bytes: int) -> dict[str, int]:
    """The pools of a storage server, named as in StorageSettings. Raises ValueError."""
    unit = _unit(memory_bytes)
    return {
        "staging_bytes": 2 * unit,  # and as much again with ucx
        "buffer_bytes": 2 * unit,
        "rdma_buffer_bytes": unit,
        "resolved_bytes_max": unit,
    }


def document_pools(memory_bytes: int) -> dict[str, int]:
    """The pools of a gateway, named as in GatewaySettings. Raises ValueError."""
    unit = _unit(memory_bytes)
    return {"document_bytes": 4 * unit, "document_key_bytes": unit}


def landing_bytes(memory_bytes: int) -> int:
    """The memory that chunks come into from another service. Raises ValueError."""
    return UNITS // 2 * _unit(memory_bytes)


def _unit(memory_bytes: int) -> int:
    if memory_bytes < MEMORY_BYTES_MIN:
        raise ValueError(f"memory_bytes must be at least {format_bytes(MEMORY_BYTES_MIN)}")
    return memory_bytes // UNITS
