"""The proxy's bounds, and which requests change adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from descriptors.storage_api import Patience
from nixl_client.connectors.llama_cpp import sidecar
from nixl_client.connectors.llama_cpp.sidecar import LlamaSidecar
from objectcache.adapters.reading_pace import ReadingPace


def proxy() -> LlamaSidecar:
    return LlamaSidecar("http://a", Path("/slots"), cast(Any, None), cast(Any, None))


async def read(made: LlamaSidecar, remote: str, *pieces: bytes, ends: bool = True) -> bytes | web.Response:
    """The body of a request, which is not given back."""

    async def come() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        if not ends:
            await asyncio.Event().wait()

    return await made._body(cast(Any, SimpleNamespace(remote=remote, content=SimpleNamespace(iter_any=come))), [0])


async def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "BODY_S", 0.01)
    refusal = await read(proxy(), "a", b"{", ends=False)
    assert isinstance(refusal, web.Response)
    assert refusal.status == 408
    assert b"in time" in cast(bytes, refusal.body)


async def test_bodies_of_one_host_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "BODIES_BYTES_MAX", 400)
    made = proxy()
    assert await read(made, "a", b"1" * 60, b"2" * 40) == b"1" * 60 + b"2" * 40
    refusal = await read(made, "a", b"3")
    assert isinstance(refusal, web.Response)
    assert (refusal.status, refusal.headers["Retry-After"]) == (503, "1")
    assert await read(made, "b", b"4" * 100) == b"4" * 100


async def test_addresses_of_one_network_are_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of IPv6 has as many addresses as it likes."""
    monkeypatch.setattr(sidecar, "BODIES_BYTES_MAX", 400)
    made = proxy()
    assert await read(made, "fd00::1", b"1" * 100) == b"1" * 100
    assert isinstance(await read(made, "fd00::2", b"1"), web.Response)
    assert await read(made, "fd00:0:0:1::1", b"1" * 100) == b"1" * 100


async def test_a_client_that_holds_a_slot_and_reads_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "PATIENCE", Patience(0.01, 1.0))
    http = make_mocked_request("POST", "/completion")
    pace = ReadingPace(sidecar.PATIENCE)

    async def writes() -> None:
        await asyncio.sleep(0)

    await sidecar._taken(http, writes(), 10, pace)
    with pytest.raises(ConnectionResetError, match="slowly"):
        await sidecar._taken(http, asyncio.ensure_future(asyncio.Event().wait()), 10, pace)  # type: ignore[arg-type]
    assert cast(Mock, http.transport).abort.called


@pytest.mark.parametrize(
    ("method", "path", "body", "counted"),
    [
        ("POST", "/lora-adapters", b"[]", [1, 2]),
        ("POST", "/lora%2Dadapters?x", b"[]", [1, 2]),
        ("POST", "/infill", b'{"lora": []}', [1, 2]),
        ("POST", "/infill", b'{"\\u006cora": []}', [1, 2]),
        ("GET", "/lora-adapters", b"", [0, 0]),
        ("POST", "/tokenize", b"{}", [0, 0]),
    ],
)
async def test_changes_of_adapters_count_when_they_begin_and_when_they_end(
    method: str, path: str, body: bytes, counted: list[int]
) -> None:
    """A change that has begun may not have taken effect when the server is asked for its adapters."""
    changes: list[None] = []
    seen: list[int] = []

    @contextlib.asynccontextmanager
    async def passed_on(*_: Any) -> AsyncIterator[Any]:
        seen.append(len(changes))

        async def come() -> AsyncIterator[bytes]:
            yield b"{}"

        yield SimpleNamespace(status=200, headers={}, content_length=2, content=SimpleNamespace(iter_any=come))

    cache = SimpleNamespace(adapters_change=lambda: changes.append(None))
    server = SimpleNamespace(passed_on=passed_on)
    http = make_mocked_request(method, path)
    await proxy()._answered(http, body, cast(Any, server), cast(Any, cache))
    assert [*seen, len(changes)] == counted


class SeenServer:
    """Notes what comes, and answers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes]] = []

    @contextlib.asynccontextmanager
    async def passed_on(self, _method: str, path: str, _headers: Any, body: bytes) -> AsyncIterator[Any]:
        self.seen.append((path, body))

        async def come() -> AsyncIterator[bytes]:
            yield b"{}"

        yield SimpleNamespace(status=200, headers={}, content_length=2, content=SimpleNamespace(iter_any=come))


async def answered(server: SeenServer, method: str, path: str, body: bytes) -> int:
    http = make_mocked_request(method, path)
    cache = cast(Any, SimpleNamespace(adapters_change=lambda: None, forget=lambda: None))
    return (await proxy()._answered(http, body, cast(Any, server), cache)).status


async def test_no_client_saves_or_restores_a_slot() -> None:
    """A file of another model's KV would be stored under this one's names, and each name is one more file."""
    server = SeenServer()
    for path in ("/slots/0?action=restore", "/slots/1?action=save", "/sl%6Fts/1?action=save"):
        assert await answered(server, "POST", path, b'{"filename": "a"}') == 403
    assert server.seen == []


async def test_no_request_of_a_client_has_kv_shifted() -> None:
    server = SeenServer()
    await answered(server, "POST", "/infill", b'{"n_cache_reuse": 1, "id_slot": 0}')
    assert server.seen == [("/infill", b'{"n_cache_reuse": 1, "id_slot": 0,"n_cache_reuse":0}')]
