"""Changes of objects upstream, before which copies leave the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from descriptors.objects import CopyRequest, ReadRequest
from storage_server.home.upstream import CachedObjects, UpstreamHome
from tests.support.waiting import until

Change = Callable[[CachedObjects], Awaitable[object]]


@pytest.mark.parametrize(
    "change",
    [
        lambda objects: objects.delete_object("", "bucket", "key"),
        lambda objects: objects.delete_objects("", "bucket", ["key"]),
        lambda objects: objects.copy_object("", CopyRequest(ReadRequest("bucket", "other"), "bucket", "key")),
    ],
    ids=["delete", "delete several", "copy"],
)
async def test_a_change_whose_caller_goes_before_it_is_not_begun(change: Change) -> None:
    """Copies leave the cache first. A coroutine that was made before that would never be awaited."""
    begun, is_removing = list[object](), False

    async def forget_clean(bucket: str, keys: Sequence[str]) -> None:
        nonlocal is_removing
        is_removing = True
        await asyncio.Event().wait()

    def begin(*arguments: object) -> Awaitable[None]:
        begun.append(arguments)
        return asyncio.sleep(0)

    home: Any = SimpleNamespace(
        forget_clean=forget_clean,
        cache=SimpleNamespace(objects=SimpleNamespace(stored=lambda bucket, key: None)),
        write_back=SimpleNamespace(held=lambda *_, **__: nullcontext()),
    )
    home.changing = partial(UpstreamHome.changing, home)
    there: Any = SimpleNamespace(delete_object=begin, delete_objects=begin, copy_object=begin)
    task = asyncio.ensure_future(change(CachedObjects(there, 1 << 30, home)))
    await until(lambda: is_removing)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not begun
