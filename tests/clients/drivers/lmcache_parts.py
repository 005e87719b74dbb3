"""What both LMCache drivers need: the package loaded quietly, and memory objects."""

from __future__ import annotations

import ctypes
import os
from importlib.metadata import version

os.environ["LMCACHE_TRACK_USAGE"] = "false"

import torch
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

VERSION = version("lmcache")
ALLOCATOR = AdHocMemoryAllocator("cpu")


def allocate(size: int) -> MemoryObj:
    """A memory object of `size` bytes."""
    made = ALLOCATOR.allocate(torch.Size([1, 1, size, 1]), torch.uint8, MemoryFormat.KV_2LTD)
    assert made is not None
    return made


def fill(memory: MemoryObj, data: bytes) -> MemoryObj:
    """Copy the data to the memory's start."""
    assert len(data) <= memory.get_size(), (len(data), memory.get_size())
    ctypes.memmove(memory.data_ptr, data, len(data))
    return memory


def read(memory: MemoryObj) -> bytes:
    """What the memory holds."""
    return ctypes.string_at(memory.data_ptr, memory.get_size())
