"""Memory that a server may fill, and the register of it, which threads share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nixl_client.transports import shared_memory
from nixl_client.transports.buffers import as_buffer

NBYTES = 1 << 20


@pytest.fixture
def finalizers(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The finalizers of memory that is allocated, which only the test calls: an interpreter calls them after the
    memory was unmapped, and other threads run in between.
    """
    late: list[Callable[[], None]] = []

    def finalize(_: object, call: Callable[..., None], *arguments: Any) -> None:
        late.append(partial(call, *arguments))

    monkeypatch.setattr(shared_memory, "weakref", SimpleNamespace(ref=weakref.ref, finalize=finalize))
    return late


def allocated_between(start: int, end: int) -> list[npt.NDArray[np.uint8]]:
    """Allocations, the last of which lies between these addresses, where memory was unmapped just now."""
    arrays = []
    for _ in range(256):
        arrays.append(shared_memory.allocate(NBYTES))
        if start <= as_buffer(arrays[-1]).memory.address < end:
            return arrays
    pytest.skip("the system gave no memory where some was unmapped")


@pytest.mark.parametrize("former_bytes", [NBYTES, 2 * NBYTES])
def test_memory_is_known_whatever_lay_there_before(former_bytes: int, finalizers: list[Callable[[], None]]) -> None:
    """Fetches failed, and buffers lost their registration, where another thread let memory go."""
    former = shared_memory.allocate(former_bytes)
    start = as_buffer(former).memory.address
    del former
    arrays = allocated_between(start, start + former_bytes)
    memory = as_buffer(arrays[-1]).memory

    def found() -> bool:
        shared = shared_memory.find(memory)
        return shared is not None and shared.buffer.memory == memory

    assert found()
    finalizers.pop(0)()
    assert found()
    del arrays
    assert shared_memory.find(memory) is None
    for finalize in finalizers:
        finalize()
