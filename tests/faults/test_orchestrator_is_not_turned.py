"""Clients that use the orchestrator against other clients, or against engines that are well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

from bench.beds.canned_engines import CannedEngine, CannedSettings
from descriptors.errors import CallerError, ErrorCode
from objectcache.adapters.limited_server import Connection
from objectcache.adapters.loop_share import LoopShare
from objectcache.orchestrator import passing_on
from objectcache.orchestrator.passing_on import EVENT_STREAM, WHOLE_BYTES_MAX
from objectcache.orchestrator.readers import Readers
from objectcache.orchestrator.response_cache import Kept
from objectcache.orchestrator.rules.admission import AdmissionSettings, Tenant
from objectcache.orchestrator.rules.observed_costs import TOKEN_US_DEFAULT
from objectcache.orchestrator.rules.openai_requests import RequestKind
from objectcache.orchestrator.rules.reading import Order, ReadBody
from objectcache.orchestrator.settings import EngineSettings
from tests.support.orchestrators import QUICK, Bed, canned, orchestrated
from tests.support.waiting import LIMIT_S, until

PROMPT = list(range(1, 257))
OTHER = list(range(1000, 1256))
FAST = CannedSettings(token_us=20.0, output_s=0.0)
HEAD_END = b"\r\n\r\n"


@asynccontextmanager
async def slow_reader(bed: Bed, path: str, document: Any) -> AsyncIterator[None]:
    """A client that has sent a request and reads none of its answer."""
    place, body = urlsplit(bed.url), json.dumps(document).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((place.hostname, place.port))
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        yield


@pytest.fixture
def small_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes megabytes for a connection, so those of a test are given less."""
    made = Connection.connection_made

    def with_little(connection: Connection, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", with_little)


@asynccontextmanager
async def raw_engine(answer: bytes, may_end: asyncio.Event | None = None) -> AsyncIterator[str]:
    """An engine that is well by its probes. It answers a request with these bytes before it has read the body, and
    ends the connection, where `may_end` is given only when that is set.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(HEAD_END):
                if head.startswith(b"POST"):
                    writer.write(answer)
                    await writer.drain()
                    if may_end is not None:
                        await may_end.wait()
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort() if not answer else writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def beside(bed: Bed, url: str) -> Any:
    """The engine at this address, once it takes requests."""
    engine = bed.orchestrator.engines[url]
    await until(lambda: engine.status().value == "up")
    return engine


@pytest.mark.slow
@pytest.mark.usefixtures("small_connections")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_its_answer_keeps_no_memory_for_its_body(stream: bool) -> None:
    """Eight answers that were read at 4 KiB a minute kept 128 MiB of bodies, and all others got 503."""
    document = {
        "model": "canned", "prompt": "a" * 100_000, "max_tokens": 3_000 if stream else 100_000, "stream": stream,
    }  # fmt: skip
    async with canned(1, replace(FAST, token_us=0.0)) as engines, orchestrated(engines) as bed:
        async with slow_reader(bed, "/v1/completions", document):
            await until(lambda: bed.orchestrator.answers.held_bytes > 0)
            assert bed.orchestrator.bodies.held_bytes == 0
        await until(lambda: bed.orchestrator.answers.held_bytes == 0)


@pytest.mark.slow
async def test_a_body_counts_until_an_engine_has_it_also_where_the_engine_answers_before() -> None:
    """Sixty streams of an engine that did not read kept 720 MB of bodies, which counted nowhere."""
    asked, reads = asyncio.Event(), asyncio.Event()
    body = json.dumps({"model": "m", "prompt": "a" * 15_000_000, "stream": True}).encode()  # the kernel takes less

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while b"/v1/completions" not in await reader.readuntil(HEAD_END):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            begun = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(begun + b"9\r\ndata: a\n\n\r\n")
            asked.set()
            await reads.wait()
            await reader.readexactly(len(body))
            writer.write(b"0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with orchestrated([], replace(QUICK, engines=(EngineSettings(url),))) as bed:
            asking = asyncio.create_task(bed.http.post(f"{bed.url}/v1/completions", data=BytesIO(body)))
            await asked.wait()
            for _ in range(20):
                await bed.ask("GET", "/health")
            assert not asking.done()
            assert bed.orchestrator.bodies.held_bytes >= len(body)
            reads.set()
            async with await asking as answer:
                assert await answer.read() == b"data: a\n\n"
                await until(lambda: bed.orchestrator.bodies.held_bytes == 0)


async def test_clients_without_keys_have_their_memory_by_address() -> None:
    """All of them were one tenant, so one address could take all that one tenant may have."""
    async with canned(1, FAST) as engines, orchestrated(engines, replace(QUICK, bodies_bytes_max=1 << 16)) as bed:
        place = urlsplit(bed.url)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 32768\r\n\r\n"
        with socket.socket() as hostile:
            hostile.bind(("127.0.0.7", 0))
            hostile.connect((place.hostname, place.port))
            hostile.sendall(head + b" " * 32_000)
            await until(lambda: bed.orchestrator.bodies.held_bytes >= 32_000)
            assert (await bed.complete(PROMPT)).status == 200
            quota = await bed.ask("PUT", f"/_orchestrator/pins/{'0' * 32}", {"engine": engines[0].url})
            assert quota.status == 200


async def test_clients_without_keys_have_large_bodies_read_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were one tenant: eight bodies of 15 MiB that take long to read kept everybody's larger bodies out for
    a minute.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # so there are two processes, of which an address has one
    long_prompt = list(range(10_000))
    async with canned(1, replace(FAST, token_us=0.0)) as engines, orchestrated(engines) as bed:
        readers = bed.orchestrator.readers
        async with readers.turn("127.0.0.1"):  # as while a large body of this address is read
            busy_count = readers.busy_count
            same = asyncio.create_task(bed.complete(long_prompt))
            await until(lambda: readers.busy_count > busy_count)
            connector = aiohttp.TCPConnector(local_addr=("127.0.0.7", 0))
            async with aiohttp.ClientSession(connector=connector) as http:
                asked = {"model": "canned", "prompt": long_prompt, "max_tokens": 4}
                async with http.post(f"{bed.url}/v1/completions", json=asked) as answer:
                    assert answer.status == 200
            assert not same.done()
        assert (await same).status == 200


@pytest.mark.parametrize(("tenants", "caller"), [({"sk-b": Tenant("b")}, "b"), ({}, "127.0.0.1")])
async def test_what_a_request_takes_of_the_loop_counts_for_its_caller(
    tenants: dict[str, Tenant], caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four thousand small bodies of one tenant kept the next one's request waiting for half a minute, twice."""
    async with canned(1, FAST) as engines, orchestrated(engines, replace(QUICK, tenants=tenants)) as bed:
        share, callers = bed.orchestrator.deciding, []
        turn_of = share.turn

        def turn(caller: str = "") -> AbstractAsyncContextManager[None]:
            callers.append(caller)
            return turn_of(caller)

        monkeypatch.setattr(share, "turn", turn)
        answer = await bed.complete("a text", headers={"Authorization": "Bearer sk-b"})
        assert answer.status == 200
        assert callers == 4 * [caller]  # its body, its look for an engine, its tokens and its decision


@pytest.mark.usefixtures("small_connections")
async def test_answers_that_are_read_slowly_take_no_connection_of_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took all connections to engines, whose probes then failed."""
    monkeypatch.setattr("objectcache.orchestrator.service.CONNECTIONS_MAX", 1)
    monkeypatch.setattr("objectcache.orchestrator.relay.AHEAD_BYTES_MAX", 1)
    document = {"model": "canned", "prompt": PROMPT, "max_tokens": 3_000, "stream": True}
    async with canned(1, replace(FAST, output_s=0.001)) as engines, orchestrated(engines) as bed:
        engine = bed.orchestrator.engines[engines[0].url]
        async with slow_reader(bed, "/v1/completions", document):
            await until(lambda: bool(engines[0].requests))
            before = engine.liveness.up_since_s
            engines[0].fails_with = 503  # probes see this only where they get through
            await until(lambda: engine.status().value == "ejected")
            engines[0].fails_with = None
            await until(lambda: engine.status().value == "up")
            assert engine.liveness.up_since_s > before


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs"])
async def test_a_template_of_a_client_ejects_no_engine(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client chooses how long a template takes, and how many tokens it gives."""
    monkeypatch.setattr("objectcache.orchestrator.tokens.TOKENIZE_S", 0.05)
    monkeypatch.setattr("objectcache.orchestrator.tokens.PAUSE_S", 0.0)
    monkeypatch.setattr("objectcache.orchestrator.tokens.PAUSE_S_MAX", 0.0)
    failures: list[str] = []
    async with canned(1, replace(FAST, tokenize_hangs=True)) as engines, orchestrated(engines) as bed:
        engine = bed.orchestrator.engines[engines[0].url]
        monkeypatch.setattr(engine, "failed", failures.append)
        said = {field: "{% for i in range(10**9) %}{% endfor %}" if field == "chat_template" else {"a": 1}}
        chat = {"model": "canned", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert (await bed.ask("POST", "/v1/chat/completions", {**chat, **said})).status == 200
        assert failures == []
        assert (await bed.ask("POST", "/v1/chat/completions", chat)).status == 200
        assert len(failures) == 1


async def test_a_large_body_that_an_engine_does_not_take_ejects_it_not() -> None:
    """A proxy in front of an engine may refuse a body by its length and end the connection."""
    async with raw_engine(b"") as url:
        settings = replace(QUICK, engines=(EngineSettings(url),))
        async with orchestrated([], settings, is_waiting=False) as bed:
            engine = await beside(bed, url)
            failures: list[str] = []
            engine.failed = lambda problem, **_: failures.append(problem)
            answer = await bed.complete(list(range(100_000)))
            assert answer.status == 502
            assert failures == []
            assert (await bed.complete(PROMPT)).status == 502
            assert len(failures) == 1


@pytest.mark.parametrize("media_type", [EVENT_STREAM, "application/json"])
async def test_an_engine_that_announces_a_length_is_at_work_until_so_many_bytes_have_come(media_type: str) -> None:
    """It was done at its head, so it looked idle, got ever more requests, and held all connections to engines."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {media_type}\r\nContent-Length: {WHOLE_BYTES_MAX + 3}\r\n\r\n"
    answer, may_end = head.encode() + b" " * (WHOLE_BYTES_MAX + 2), asyncio.Event()
    async with (
        raw_engine(answer, may_end) as url,
        orchestrated([], replace(QUICK, engines=(EngineSettings(url),))) as bed,
        bed.http.post(f"{bed.url}/v1/completions", json={"model": "canned", "prompt": PROMPT}) as begun,
    ):
        await begun.content.readexactly(WHOLE_BYTES_MAX + 2)
        assert bed.orchestrator.engines[url].books.active_count == 1
        assert bed.orchestrator.gate.admission.active_count == 1
        may_end.set()


async def test_a_host_that_has_vanished_costs_a_retry_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was no stream got 504 after 5 s, which told its client to ask for a stream."""
    posted = aiohttp.ClientSession.post
    async with canned(2, FAST) as engines, orchestrated(engines) as bed:
        first = (await bed.complete(PROMPT)).engine

        def post(session: aiohttp.ClientSession, url: str, **options: Any) -> Any:
            if url == f"{first}/v1/completions":
                raise aiohttp.ConnectionTimeoutError("no connection")
            return posted(session, url, **options)

        monkeypatch.setattr(aiohttp.ClientSession, "post", post)
        again = await bed.complete(PROMPT)
        assert (again.status, again.engine) == (200, next(each.url for each in engines if each.url != first))


async def test_an_answer_that_only_ends_with_its_connection_is_not_kept() -> None:
    """Whether its engine was killed in its middle cannot be told."""
    answer = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{"choices": [{"text": "a"'
    async with raw_engine(answer) as url:
        settings = replace(QUICK, engines=(EngineSettings(url),), response_cache_bytes=1 << 20)
        async with orchestrated([], settings, is_waiting=False) as bed:
            engine = await beside(bed, url)
            engine.models = {"canned": {"id": "canned", "root": "a"}}
            for _ in range(2):
                assert (await bed.complete(PROMPT, temperature=0)).engine == url
            assert bed.orchestrator.responses.used_bytes == 0


async def test_a_replay_counts_as_an_answer_that_its_client_has_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays that were read slowly kept answers which the cache had dropped, a gigabyte beside a bound of 64 MiB."""
    async with canned(1, FAST) as engines, orchestrated(engines, replace(QUICK, response_cache_bytes=1 << 20)) as bed:
        answers = bed.orchestrator.answers
        assert (await bed.complete(PROMPT, temperature=0)).engine == engines[0].url
        assert (await bed.complete(PROMPT, temperature=0)).engine == "response cache"
        assert answers.held_bytes == 0
        take = answers.take

        def refuse(tenant: str, nbytes: int) -> None:
            monkeypatch.setattr(answers, "take", take)
            raise CallerError(ErrorCode.SLOW_DOWN, "no memory")

        monkeypatch.setattr(answers, "take", refuse)
        assert (await bed.complete(PROMPT, temperature=0)).engine == engines[0].url


@pytest.mark.usefixtures("small_connections")
async def test_a_client_that_does_not_read_a_replay_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("objectcache.orchestrator.answering.BLOCKED_S", 0.05)
    monkeypatch.setattr("objectcache.orchestrator.answering.TAKEN_BYTES_PER_S", 1 << 30)
    document = {"model": "canned", "prompt": PROMPT, "temperature": 0}
    kept = Kept("application/json", (bytes(500_000),), math.inf, 500_000)
    async with canned(1, FAST) as engines, orchestrated(engines, replace(QUICK, response_cache_bytes=1 << 20)) as bed:
        monkeypatch.setattr(bed.orchestrator.responses, "find", lambda *_: kept)
        async with slow_reader(bed, "/v1/completions", document):
            await until(lambda: any("too slowly" in each.note for each in bed.orchestrator.receipts.last(9)))
        assert bed.orchestrator.answers.held_bytes == 0


async def test_the_tokens_that_an_engine_counts_have_no_other_engine_refuse_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was told 400, that it is too large for any engine."""
    async with canned(1, replace(FAST, blocks_max=64)) as engines, orchestrated(engines) as bed:
        engine = bed.orchestrator.engines[engines[0].url]
        await until(lambda: engine.report.kv_tokens == 64 * 16)
        refused = await bed.complete(list(range(2000)))
        assert (refused.status, b"KV" in refused.body) == (400, True)

        async def lie(*_: object) -> Any:
            return np.arange(4000, dtype=np.uint32)

        monkeypatch.setattr(bed.orchestrator.tokens, "of", lie)
        assert (await bed.complete("a few words")).status == 200


async def test_headers_that_are_no_text_are_left_out() -> None:
    """They were answered 500, with a traceback in the log for each request."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Disposition: a\xe9\r\nX-Request-Id: a\x01\r\n"
    head += b"Content-Length: 2\r\n\r\n"
    async with (
        raw_engine(head + b"{}") as url,
        orchestrated([], replace(QUICK, engines=(EngineSettings(url),)), is_waiting=False) as bed,
    ):
        await beside(bed, url)
        assert (await bed.complete(PROMPT)).status == 200
        place, body = urlsplit(bed.url), json.dumps({"model": "canned", "prompt": PROMPT}).encode()
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        said = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\nAuthorization: Bearer "
        writer.write(said.encode() + b"\xff\xfe" + HEAD_END + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_requests_for_one_model_are_not_woken_by_an_engine_of_another() -> None:
    async with (
        canned(1, FAST) as engines,
        canned(1, replace(FAST, model="lost")) as others,
        orchestrated([*engines, *others]) as bed,
    ):
        known, roster = bed.orchestrator.engines, bed.orchestrator.roster
        await until(lambda: all(each.models for each in known.values()))
        port = int(others[0].url.rsplit(":", 1)[1])
        await others[0].stop()
        await until(lambda: known[others[0].url].status().value != "up")
        looks: list[str] = []
        may_come = roster.may_come
        roster.may_come = lambda model: looks.append(model) or may_come(model)  # type: ignore[func-returns-value, method-assign]
        waiting = asyncio.create_task(bed.ask("POST", "/v1/completions", {"model": "lost", "prompt": PROMPT}))
        await until(lambda: bed.orchestrator.gate.without_engine_count == 1)
        before = looks.count("lost")
        for wanted in (True, False):
            await bed.orchestrator.fleet.drain(engines[0].url, is_wanted=wanted)
        assert (await bed.complete(OTHER)).status == 200
        assert looks.count("lost") == before
        again = CannedEngine(replace(FAST, model="lost"))
        await again.start(port)
        try:
            assert (await waiting).status == 200
        finally:
            await again.stop()


@pytest.mark.slow
async def test_a_client_that_hangs_up_ends_no_reading_process() -> None:
    """All others waited for a new process each time."""
    body = json.dumps({"model": "canned", "prompt": "a" * 200_000, "max_tokens": 1}).encode()
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        place, readers = urlsplit(bed.url), bed.orchestrator.readers
        head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await bed.ask("POST", "/v1/completions", data=body, headers={"Content-Type": "application/json"})
        started, read, begun = readers.started_count, readers.read, asyncio.Event()

        async def begun_to_read(raw: bytes, order: Order, caller: str = "") -> ReadBody:
            begun.set()
            return await read(raw, order, caller)

        readers.read = begun_to_read  # type: ignore[method-assign]
        for _ in range(20):
            begun.clear()
            _, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(head + body)
            await writer.drain()
            await begun.wait()
            writer.transport.abort()
            await until(lambda: readers.busy_count == 0)
        assert readers.started_count <= started + 1
        assert readers.failure_count == 0


async def test_prompts_that_are_only_made_tokens_of_shape_no_decision() -> None:
    """With "stream": true an answer that computes nothing counted as a fast prefill, and all went to one engine."""
    async with canned(1, replace(FAST, publishes=False)) as engines, orchestrated(engines) as bed:
        engine = bed.orchestrator.engines[engines[0].url]
        for at in range(12):
            asked = {"model": "canned", "prompt": " ".join(map(str, [at, *PROMPT])), "stream": True}
            assert (await bed.ask("POST", "/tokenize", asked)).status == 200
        assert engine.observed.costs.token_us == TOKEN_US_DEFAULT
        for held in (False, True):
            answer = await bed.complete([0, *PROMPT])
            receipt_id = answer.headers["x-objectcache-request-id"]
            receipt = (await bed.ask("GET", f"/_orchestrator/receipts/{receipt_id}")).json()
            assert (receipt["predictions"][0]["held_tokens"] > 0) == held


async def test_a_template_of_a_client_turns_no_engines_tokens_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("objectcache.orchestrator.tokens.TOKENIZE_S", 0.05)
    async with canned(1, replace(FAST, tokenize_hangs=True)) as engines, orchestrated(engines) as bed:
        chat = {"model": "canned", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        slow = {**chat, "chat_template": "{% for i in range(10**9) %}{% endfor %}"}
        assert (await bed.ask("POST", "/v1/chat/completions", slow)).status == 200
        engines[0].settings.tokenize_hangs = False
        answer = await bed.ask("POST", "/v1/chat/completions", chat)
        receipt_id = answer.headers["x-objectcache-request-id"]
        receipt = (await bed.ask("GET", f"/_orchestrator/receipts/{receipt_id}")).json()
        assert receipt["prompt_tokens"], "no pause was made for the template"


async def test_work_in_the_background_is_refused() -> None:
    """It passed admission by: the engine answers at once, and works for nobody."""
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        answer = await bed.ask("POST", "/v1/responses", {"model": "canned", "input": "Hello", "background": True})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "background")


async def test_small_bodies_are_read_in_turns() -> None:
    """Four hundred that ended in one pass of the loop stopped it for a second and a half."""

    class CountedShare(LoopShare):
        count = 0

        @asynccontextmanager
        async def turn(self, caller: str = "") -> AsyncIterator[None]:
            self.count += 1
            async with super().turn(caller):
                yield

    share = CountedShare()
    readers = Readers(share=share)
    raw = b'{"model": "m", "prompt": [1, 2]}'
    assert (await readers.read(raw, Order(RequestKind.COMPLETIONS, {}))).asked.model == "m"
    assert await readers.edited("", raw, ["prompt"], {}) == b'{"model": "m"}'
    assert (await readers.answered_tokens("", b'{"tokens": [1, 2]}')).tolist() == [1, 2]
    assert await readers.handed_over("", b'{"kv_transfer_params": {"a": 1}}') == b'{"a": 1}'
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    assert await readers.fields("", "multipart/form-data; boundary=b", form) == [("model", b"m")]
    assert share.count > 4


async def test_requests_that_wait_for_the_only_engine_go_to_one_that_comes() -> None:
    """They waited for the one that answers nothing until they were refused, while the other one was idle."""
    places = AdmissionSettings(active_max=4, queue_max=16, deadline_s=LIMIT_S)
    silent = replace(FAST, model="x", token_us=1e9)
    async with (
        canned(1, silent) as first,
        canned(1, FAST) as others,
        canned(1, replace(FAST, model="x")) as later,
        orchestrated([*first, *others], replace(QUICK, admission=places)) as bed,
    ):
        admission = bed.orchestrator.gate.admission
        await until(lambda: all(engine.models for engine in bed.orchestrator.engines.values()))
        crowd = [
            asyncio.create_task(bed.ask("POST", "/v1/completions", {"model": "x", "prompt": PROMPT})) for _ in range(5)
        ]
        await until(lambda: (admission.active_count, admission.waiting_count) == (2, 3))
        await bed.ask("POST", "/_orchestrator/engines", {"url": later[0].url})
        await until(lambda: sum(task.done() for task in crowd) == 3)
        assert {task.result().engine for task in crowd if task.done()} == {later[0].url}
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


@pytest.mark.parametrize("reason", ["model", "response"])
async def test_an_engine_that_answers_nothing_keeps_nobody_from_the_others(reason: str) -> None:
    """Requests that only it could answer, for its model or since it has the earlier response, had all places for ten
    minutes. It is well by its probes.
    """
    places = AdmissionSettings(active_max=4, queue_max=16)
    asked: dict[str, Any] = {"model": "x", "input": "hello"}
    async with (
        canned(1, replace(FAST, model="x")) as silent,
        canned(1, replace(FAST, model="y" if reason == "model" else "x")) as well,
        orchestrated([*silent, *well], replace(QUICK, admission=places)) as bed,
    ):
        engines = bed.orchestrator.engines.values()
        await until(lambda: all(engine.models for engine in engines))
        if reason == "response":
            await bed.ask("POST", f"/_orchestrator/engines/{well[0].url}/drain")
            asked["previous_response_id"] = (await bed.ask("POST", "/v1/responses", asked)).json()["id"]
            await bed.ask("POST", f"/_orchestrator/engines/{well[0].url}/undrain")
            await until(lambda: all(engine.status().value == "up" for engine in engines))
        silent[0].settings.token_us = 1e9
        crowd = [asyncio.create_task(bed.ask("POST", "/v1/responses", asked)) for _ in range(8)]
        await until(lambda: bed.orchestrator.gate.admission.waiting_count >= 4)
        answer = await bed.ask("POST", "/v1/completions", {"model": well[0].settings.model, "prompt": PROMPT})
        assert (answer.status, answer.engine) == (200, well[0].url)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        admission = bed.orchestrator.gate.admission
        await until(lambda: admission.active_count == admission.waiting_count == 0)


async def test_a_header_of_an_engine_that_cannot_be_written_is_left_out() -> None:
    """The answer was an error of ours, with a length and in chunks, so that the next one began in the middle."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {EVENT_STREAM}\r\nRetry-After: \x7f\r\nContent-Length: 8\r\n\r\n"
    async with raw_engine(head.encode() + b"data: 1\n") as url:
        bed_made = orchestrated([], replace(QUICK, engines=(EngineSettings(url),)))
        async with bed_made as bed:
            answer = await bed.complete([1, 2, 3], stream=True)
            assert "retry-after" not in answer.headers
            assert answer.status == 200
            assert answer.body == b"data: 1\n"


async def test_an_answer_that_cannot_be_begun_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal behind it would have a length, and be in chunks."""
    monkeypatch.setattr(passing_on, "REQUEST_HEADER", "a\x7f")
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await bed.complete([1, 2, 3], stream=True)


@pytest.mark.parametrize("status", ["404 Not Found", "503 Service Unavailable", ""])
async def test_requests_that_another_engine_refuses_leave_half_of_the_places_to_others(status: str) -> None:
    """Each was sent on to the engine that was left, which answers nothing: it had all places for ten minutes."""
    said = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode() if status else b""
    places = AdmissionSettings(active_max=4, queue_max=16)
    async with (
        canned(1, replace(FAST, model="x", token_us=1e9)) as silent,
        canned(1, replace(FAST, model="y")) as well,
        raw_engine(said) as refusing,
    ):
        settings = replace(QUICK, admission=places, engines=(EngineSettings(refusing),), poll_s=30.0)
        async with orchestrated([*silent, *well], settings) as bed:
            await until(lambda: all(bed.orchestrator.engines[each.url].models for each in (*silent, *well)))
            asked = {"model": "x", "prompt": PROMPT, "stream": True}
            crowd = [asyncio.create_task(bed.ask("POST", "/v1/completions", asked)) for _ in range(8)]
            admission = bed.orchestrator.gate.admission
            await until(lambda: admission.waiting_count >= 4)
            answer = await bed.ask("POST", "/v1/completions", {"model": "y", "prompt": PROMPT})
            assert (answer.status, answer.engine) == (200, well[0].url)
            assert bed.orchestrator.engines[silent[0].url].books.active_count == 2
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
            await until(lambda: admission.active_count == admission.waiting_count == 0)


@pytest.mark.parametrize("is_begun", [False, True])
async def test_requests_at_which_every_engine_hangs_up_leave_one_engine_for_others(is_begun: bool) -> None:
    """Twenty of them a second had all engines ejected for 30 s, although all were well by their probes."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    said = head + b"a\r\ndata: {}\n\n\r\n" if is_begun else b""
    async with raw_engine(said) as url, raw_engine(said) as other:
        settings = replace(QUICK, engines=(EngineSettings(url), EngineSettings(other)), poll_s=30.0)
        async with orchestrated([], settings) as bed:
            for _ in range(12):
                await bed.complete([1, 2, 3], stream=True)
            states = sorted(engine.status().value for engine in bed.orchestrator.engines.values())
            assert states == ["ejected", "up"]
