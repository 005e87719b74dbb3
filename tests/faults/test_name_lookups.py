"""A name server that does not answer keeps no connection waiting, but those to the names that it was asked for."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from descriptors.errors import ServerError
from objectcache.adapters import name_lookups
from objectcache.adapters.name_lookups import NAMES_MAX, NameForThreads, NameLookups, ServerLoop
from storage_server.home.fetch.bulk_reads import BulkReads, Into
from storage_server.settings import UpstreamSettings
from tests.support.waiting import until

HUNG = ".hung.example"


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Names that end in HUNG are not found before the event."""
    answers = threading.Event()
    real = socket.getaddrinfo

    def played(host: Any, port: Any, family: int = 0, kind: int = 0, protocol: int = 0, flags: int = 0) -> Any:
        if str(host).endswith(HUNG) and not flags & socket.AI_NUMERICHOST:
            answers.wait(60)
            return real("127.0.0.1", port, family, kind, protocol)
        return real(host, port, family, kind, protocol, flags)

    monkeypatch.setattr(socket, "getaddrinfo", played)
    yield answers
    answers.set()


def run(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=ServerLoop) as runner:
        runner.run(story)


async def _answer(_: web.BaseRequest) -> web.Response:
    return web.Response(text="here")


def test_an_address_is_reached_while_names_are_looked_up(name_server: threading.Event) -> None:
    """Uvloop asks for the address of each connection where it looks names up: two slow names stopped all of them."""

    async def story() -> None:
        runner = web.ServerRunner(web.Server(_answer))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as http:
            slow = [asyncio.create_task(http.get(f"http://engine{at}{HUNG}:{port}/")) for at in range(8)]
            async with asyncio.timeout(30), http.get(f"http://127.0.0.1:{port}/") as answer:
                assert await answer.text() == "here"
            assert not any(each.done() for each in slow)
            name_server.set()
            for each in slow:
                assert (await each).status == 200
        await runner.cleanup()

    run(story())


def test_a_loop_ends_while_names_are_looked_up(name_server: threading.Event) -> None:
    """A stop does not wait for a name server, either."""

    async def story() -> None:
        lookups = NameLookups(NAMES_MAX)
        hung = asyncio.create_task(lookups.find(f"engine{HUNG}", 80))
        await asyncio.sleep(0)  # it begins
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung

    run(story())
    assert not name_server.is_set()


def test_so_many_names_are_looked_up_at_once_and_numbers_in_between(name_server: threading.Event) -> None:
    """A thread keeps its place until it ends, also where nobody waits for it any more."""

    async def story() -> None:
        lookups = NameLookups(1)
        first = asyncio.create_task(lookups.find(f"first{HUNG}", 80))
        await asyncio.sleep(0)  # it begins
        first.cancel()
        second = asyncio.create_task(lookups.find(f"second{HUNG}", 80))
        assert (await lookups.find("127.0.0.1", 80, kind=socket.SOCK_STREAM))[0][4] == ("127.0.0.1", 80)
        assert not second.done()
        name_server.set()
        assert (await second)[0][4] == ("127.0.0.1", 80)

    run(story())


@pytest.mark.parametrize("name", ["a..example", "a" * 64 + ".example", "\ud800"])
def test_a_text_that_no_name_can_be_is_not_found(name: str) -> None:
    """Callers know errors of the operating system. An address in etcd may be any text."""

    async def story() -> None:
        with pytest.raises(socket.gaierror, match="is no name"):
            await asyncio.get_running_loop().getaddrinfo(name, 80)

    run(story())


def test_a_name_is_waited_for_shortly(name_server: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to a service upstream had no answer for as long as its name was looked up."""
    monkeypatch.setattr(name_lookups, "NAME_WAIT_S", 0.05)

    async def story() -> None:
        lookups = NameLookups(1)
        async with asyncio.timeout(30):
            for _ in range(2):  # the second one has no place
                with pytest.raises(OSError, match="no name server has answered"):
                    await lookups.find(f"store{HUNG}", 80)
        assert not name_server.is_set()

    run(story())


def test_a_name_that_hangs_takes_one_place(name_server: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookups, "NAME_WAIT_S", 0.01)

    async def story() -> None:
        lookups = NameLookups(2)
        for _ in range(5):
            with pytest.raises(OSError, match="no name server has answered"):
                await lookups.find(f"store{HUNG}", 80)
        monkeypatch.setattr(name_lookups, "NAME_WAIT_S", 60.0)
        assert (await lookups.find("localhost", 80, kind=socket.SOCK_STREAM))[0][4][1] == 80

    run(story())


def test_lookups_that_nobody_waits_for_any_more_leave_the_line(
    name_server: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may name hosts would keep others' names waiting behind many that hang."""
    monkeypatch.setattr(name_lookups, "NAME_WAIT_S", 0.01)

    async def story() -> None:
        lookups = NameLookups(1)
        for number in range(20):
            with pytest.raises(OSError, match="no name server has answered"):
                await lookups.find(f"store{number}{HUNG}", 80)
        monkeypatch.setattr(name_lookups, "NAME_WAIT_S", 60.0)
        waiting = asyncio.create_task(lookups.find("localhost", 80, kind=socket.SOCK_STREAM))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert len(asyncio.all_tasks()) <= 4  # this one, the one that waits, its lookup, and the first lookup
        name_server.set()
        assert (await waiting)[0][4][1] == 80

    run(story())


def test_threads_that_wait_for_one_name_share_its_lookup(name_server: threading.Event) -> None:
    name = NameForThreads(f"store{HUNG}", 80)
    for _ in range(3):
        with pytest.raises(OSError, match="no name server has answered"):
            name.addresses(0.01)
    assert sum(thread.name == "objectcache-name" for thread in threading.enumerate()) == 1
    name_server.set()
    assert name.addresses(30)[0][4] == ("127.0.0.1", 80)
    name.close()
    with pytest.raises(OSError, match="no name server has answered"):
        name.addresses(30)


def test_bulk_reads_end_while_the_name_of_their_service_is_looked_up(name_server: threading.Event) -> None:
    """The stop of a server waited for as long as the lookup did."""

    async def story() -> None:
        reads = BulkReads(UpstreamSettings(f"http://store{HUNG}:80", "key", "secret"))
        view = memoryview(bytearray(10))
        reading = reads.read("/bucket/key", {}, Into(view, 10, 10, lambda _: None))
        async with asyncio.timeout(30):
            await until(lambda: any(thread.name == "objectcache-name" for thread in threading.enumerate()))
            await asyncio.to_thread(reads.close)
            with pytest.raises(ServerError, match="no name server has answered"):
                await reading.head
        assert not name_server.is_set()

    run(story())
