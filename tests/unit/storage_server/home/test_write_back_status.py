"""The status of dirty chunks is kept as they come and go: at a million of them nobody walks them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ObjectInfo
from storage_server.home.write_back import WriteBack

NOTHING: Any = None


class Unwalked(dict[Any, Any]):
    """Dirty chunks that are looked at one by one, and never all."""

    def values(self) -> Any:
        yield next(iter(super().values()))
        pytest.fail("all dirty chunks were walked")


async def test_the_oldest_and_the_refused_are_known_without_a_walk() -> None:
    waiting = WriteBack(NOTHING, NOTHING, NOTHING, NOTHING, 1, accepts=True)
    now_s = time.time()
    for number, key in enumerate(("a", "b", "c", "a")):
        waiting._note("bucket", ObjectInfo(key, 1, "e", now_s - 1000 + 100 * number), number)
    waiting._dirty = Unwalked(waiting._dirty)
    for _ in range(2):
        waiting._failed(("bucket", "b"), CallerError(ErrorCode.ACCESS_DENIED, "no", field="key"))
    status = waiting.status
    assert (status.dirty_chunks, status.refused_chunks) == (3, 1)
    assert 900 <= status.oldest_s < 1000
    waiting._note("bucket", ObjectInfo("b", 1, "e", now_s), 4)
    assert waiting.status.refused_chunks == 0
    assert 800 <= waiting.status.oldest_s < 900
    await waiting.close()
