"""Spans of memory as NIXL names them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """A span of memory: `device` is cpu or cuda:N."""

    address: int
    nbytes: int
    device: str = "cpu"

    @property
    def nixl_type(self) -> str:
        """NIXL's name for this kind of memory."""
        return "VRAM" if self.device.startswith("cuda") else "DRAM"

    @property
    def device_index(self) -> int:
        """N of cuda:N, 0 for cpu."""
        return int(self.device.partition(":")[2] or 0)
