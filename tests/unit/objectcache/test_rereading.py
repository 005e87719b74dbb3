"""Files that are read again while a server runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from objectcache.cli.rereading import Rereading
from tests.support.waiting import until

Added = Callable[[list[str]], None]


def added(what: str) -> Added:
    return lambda server: server.append(what)


async def test_a_file_that_hangs_stops_nothing_and_is_read_once_more() -> None:
    """A FIFO in the place of a certificate's key stopped the event loop for good, and SIGTERM was not heard."""
    goes_on, begun = threading.Event(), threading.Semaphore(0)

    def read() -> Added:
        begun.release()
        goes_on.wait(60)
        return added("read")

    server: list[str] = []
    rereading = Rereading(server, {"a file that hangs": read})
    for _ in range(3):
        rereading.again()
    await until(lambda: begun.acquire(blocking=False))
    assert server == []
    goes_on.set()
    await until(lambda: server == ["read", "read"])
    rereading.again()
    await until(lambda: len(server) == 3)


async def test_what_cannot_be_read_or_used_keeps_nothing_else_from_it(caplog: pytest.LogCaptureFixture) -> None:
    def unread() -> Added:
        raise OSError("no such file")

    def unusable() -> Added:
        def refuse(_: list[str]) -> None:
            raise ValueError("no sense")

        return refuse

    server: list[str] = []
    reads = {"keys": unread, "shares": unusable, "certificates": lambda: added("certificates")}
    Rereading(server, reads).again()
    await until(lambda: server == ["certificates"])
    assert "keys stay as they were: no such file" in caplog.text
    assert "shares stay as they were: no sense" in caplog.text
