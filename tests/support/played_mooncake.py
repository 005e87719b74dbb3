"""Mooncake Store's client, played in this process: the calls that are used, and ways in which they go wrong."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NOT_FOUND, TRANSFER_FAIL, NO_MASTER, NO_ROOM = -704, -800, -900, -200


class PlayedMooncake:
    """`fails` is the code of every call, if there is one; `corrupts` changes a byte of what is read; while `held`,
    reads and writes wait.
    """

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.fails = 0
        self.corrupts = False
        self.capacity_bytes = 1 << 30
        self._free = threading.Event()
        self._free.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Calls wait until the block ends."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def register_buffer(self, address: int, nbytes: int) -> int:
        return self.fails

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        (key,), (places,), (lengths,) = keys, addresses, sizes
        assert self._free.wait(30)
        if self.fails:
            return [self.fails]
        if key not in self.stored:
            return [NOT_FOUND]
        data = bytearray(self.stored[key])
        if len(data) != sum(lengths):
            return [TRANSFER_FAIL]
        if self.corrupts:
            data[-1] ^= 1
        at = 0
        for address, nbytes in zip(places, lengths, strict=True):
            ctypes.memmove(address, bytes(data[at : at + nbytes]), nbytes)
            at += nbytes
        return [len(data)]

    def get_size(self, key: str) -> int:
        return self.fails or (len(self.stored[key]) if key in self.stored else NOT_FOUND)

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        (key,), (places,), (lengths,) = keys, addresses, sizes
        assert self._free.wait(30)
        if self.fails:
            return [self.fails]
        data = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in zip(places, lengths, strict=True))
        if sum(map(len, self.stored.values())) + len(data) > self.capacity_bytes:
            return [NO_ROOM]
        self.stored.setdefault(key, data)  # a key that is there keeps what it has
        return [0]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        if self.fails:
            return [self.fails] * len(keys)
        return [0 if self.stored.pop(key, None) is not None else NOT_FOUND for key in keys]

    def close(self) -> int:
        return 0
