"""Reads of copies in the cache. A copy whose bytes are damaged is noted, so that the next read asks upstream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from descriptors.errors import ErrorCode, ServerError
from descriptors.storage_api import ObjectRead, Piece, Pump, SendSome


def healing(read: ObjectRead, note_damage: Callable[[], None]) -> ObjectRead:
    """The same read; `note_damage` is called where its bytes fail their checksum. The caller is then told to try
    again.
    """
    pump = None if read.pump is None else _HealingPump(read.pump, note_damage)
    return ObjectRead(read.head, _healing_body(read.body, note_damage), pump)


async def _healing_body(body: AsyncIterator[Piece], note_damage: Callable[[], None]) -> AsyncIterator[Piece]:
    with _noting(note_damage):
        async for piece in body:
            yield piece


class _HealingPump:
    """Implements descriptors.storage_api.Pump."""

    def __init__(self, pump: Pump, note_damage: Callable[[], None]) -> None:
        self._pump = pump
        self._note_damage = note_damage

    async def prime(self) -> None:
        with _noting(self._note_damage):
            await self._pump.prime()

    async def send(self, send_some: SendSome, fd: int) -> bool:
        with _noting(self._note_damage):
            return await self._pump.send(send_some, fd)


@contextmanager
def _noting(note_damage: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        if error.code is not ErrorCode.INTERNAL_ERROR or error.retryable:
            raise
        note_damage()
        problem = "the copy in the cache is damaged; the next read asks upstream"
        raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True) from error
