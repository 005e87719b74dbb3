"""Asking members: one after the other until one answers, or all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from descriptors.cluster import Member
from descriptors.errors import ObjectCacheError
from gateway.cluster.members import Members, nobody
from gateway.storage_client import RemoteStorage, StaleViewError, StorageUnreachableError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Told(Generic[_T]):
    """The answers of members, by id: of those that carried a call out, those that refused it, and those that could
    not be reached.
    """

    good: Mapping[str, _T]
    refused: Mapping[str, ObjectCacheError]
    unreached: tuple[str, ...]


async def asked_in_turn(
    members: Members,
    ordered: Iterable[Member],
    ask: Callable[[RemoteStorage], Awaitable[_T]],
    may_ask_again: Callable[[StorageUnreachableError], bool] = lambda lost: True,
) -> _T:
    """The answer of the first member that gives one. Raises what it refuses with, StorageUnreachableError where the
    last one cannot be reached or `may_ask_again` forbids to ask another, and ServerError(SlowDown) where there is none.
    """
    lost: StorageUnreachableError | None = None
    for member in ordered:
        storage = await members.storage(member)
        try:
            async with members.watching(member):
                answer = await ask(storage)
        except StorageUnreachableError as error:
            members.failed(member)
            if not may_ask_again(error):
                raise
            lost = error
            continue
        members.succeeded(member)
        return answer
    raise lost or nobody()


async def asked_at_once(
    members: Members,
    asked: Sequence[Member],
    ask: Callable[[RemoteStorage, Member], Coroutine[Any, Any, _T]],
    wait_s: float | None,
) -> Told[_T]:
    """The answers of all. A member that takes longer than `wait_s` counts as not reached; with None, one that is not
    there. One that knows a later view is asked again under that.
    """

    async def tell(member: Member) -> _T:
        storage = await members.storage(member)
        if wait_s is None:
            return await members.watched(member, ask(storage, member))
        async with asyncio.timeout(wait_s):
            return await ask(storage, member)

    async def tell_again(member: Member) -> _T:
        return await members.in_latest_view(lambda: tell(member))

    answers = await asyncio.gather(*map(tell_again, asked), return_exceptions=True)
    good: dict[str, _T] = {}
    refused: dict[str, ObjectCacheError] = {}
    unreached: list[str] = []
    for member, answer in zip(asked, answers, strict=True):
        if isinstance(answer, StorageUnreachableError | StaleViewError | TimeoutError | ConnectionError):
            unreached.append(member.id)
        elif isinstance(answer, ObjectCacheError):
            refused[member.id] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            good[member.id] = answer
    return Told(good, refused, tuple(unreached))
