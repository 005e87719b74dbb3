"""The orchestrator beside failing engines, hostile clients, lost events and wrong tokens."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import prometheus_client
import pytest
from aiohttp import web
from prometheus_client import Metric

from bench.beds.canned_engines import CannedEngine, CannedSettings
from objectcache.adapters.limited_server import Connection
from objectcache.orchestrator.metadata_file import MetadataError
from objectcache.orchestrator.rules.admission import AdmissionSettings, Tenant
from objectcache.orchestrator.rules.liveness import EngineStatus
from objectcache.orchestrator.rules.observed_costs import EXACT, TOKEN_US_DEFAULT
from objectcache.orchestrator.settings import EngineSettings, Role
from objectcache.orchestrator.token_checks import UNMATCHED_MAX
from tests.support.orchestrators import QUICK, canned, orchestrated, words
from tests.support.waiting import LIMIT_S, settled, until

PROMPT = list(range(1, 257))
OTHER = list(range(1000, 1256))
FAST = CannedSettings(token_us=20.0, output_s=0.001)
SILENT = CannedSettings(token_us=1e6)
"""The probes of such an engine are well, and it answers no long prompt while a test runs."""


async def test_an_engine_that_fails_before_its_first_byte_costs_a_retry_elsewhere() -> None:
    async with canned(3, FAST) as engines, orchestrated(engines) as bed:
        first = await bed.complete(PROMPT)
        bed.engine_at(first.engine).fails_with = 500
        again = await bed.complete([*PROMPT, 1], stream=True)
        assert again.status == 200
        assert again.engine != first.engine
        receipt_id = again.headers["x-objectcache-request-id"]
        receipt = (await bed.ask("GET", f"/_orchestrator/receipts/{receipt_id}")).json()
        assert [each.get("status") for each in receipt["attempts"]][:1] == [500]
        for engine in engines:
            engine.fails_with = 500
        answer = await bed.complete(OTHER)
        assert answer.status in (500, 502, 503)


@pytest.mark.slow
async def test_a_killed_engine_is_left_and_comes_back() -> None:
    async with canned(2, FAST) as engines, orchestrated(engines) as bed:
        port = int(engines[0].url.rsplit(":", 1)[1])
        await engines[0].stop()
        answers = [await bed.complete([at, *PROMPT]) for at in range(6)]
        assert {answer.status for answer in answers} == {200}
        assert {answer.engine for answer in answers} == {engines[1].url}
        await until(lambda: bed.orchestrator.engines[engines[0].url].status().value != "up")
        await engines[0].start(port)
        await until(lambda: bed.orchestrator.engines[engines[0].url].status().value == "up")


async def test_an_engine_that_dies_in_mid_stream_ends_in_an_honest_error() -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        engines[0].cuts_after = 2
        answer = await bed.complete(PROMPT, stream=True)
        assert answer.status == 200
        assert answer.words() == words(PROMPT)[:2]
        last = answer.body.decode().strip().rsplit("\n\n", 1)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_lost"
        assert b"[DONE]" not in answer.body


async def test_an_engine_that_hangs_is_left_by_those_that_wait_for_it() -> None:
    async with canned(2, FAST) as engines, orchestrated(engines) as bed:
        first = await bed.complete(PROMPT)
        hung = bed.engine_at(first.engine)
        hung.is_hung.set()
        again = await bed.complete([*PROMPT, 1], stream=True)
        assert again.status == 200
        assert again.engine != first.engine
        assert again.words() == words([*PROMPT, 1])


@pytest.mark.parametrize("status", [401, 404])
async def test_an_engine_that_refuses_what_another_answers_gets_no_more_of_it(status: int) -> None:
    """It refuses at once, so it would look idle and draw everything. Not for a key, which may be the client's own. An
    adapter may have been unloaded there, so it takes requests for other models until it has said its models again.
    """
    async with canned(2, FAST) as engines, orchestrated(engines, replace(QUICK, poll_s=30.0)) as bed:
        broken = engines[0]
        broken.answers_with = status
        await until(lambda: bool(bed.orchestrator.engines[broken.url].models))
        for at in range(24):
            answer = await bed.complete([at * 1000 + each for each in PROMPT])
            assert (answer.status, answer.engine) == (200, engines[1].url)
        assert bed.orchestrator.engines[broken.url].status() is EngineStatus.UP
        assert bed.orchestrator.engines[broken.url].serves("canned") is (status != 404)
        assert bed.orchestrator.engines[broken.url].books.correction == EXACT
        engines[1].answers_with = status
        assert (await bed.complete([*PROMPT, 99])).status == status


async def test_a_refusal_says_nothing_of_the_time_of_a_prefill() -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        engines[0].answers_with = 400
        for at in range(12):
            assert (await bed.complete([*PROMPT, at])).status == 400
        engine = bed.orchestrator.engines[engines[0].url]
        assert engine.observed.costs.token_us == TOKEN_US_DEFAULT
        assert engine.status() is EngineStatus.UP


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/completions"])
async def test_a_stream_that_has_begun_does_not_make_its_engine_look_silent(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines with streams of /v1/messages seemed to answer nothing, so that all others waited at one engine."""
    monkeypatch.setattr("objectcache.orchestrator.rules.books.OVERDUE_S", 0.0)
    may_end = asyncio.Event()

    async def begun(_: CannedEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await may_end.wait()
        return response

    for name in ("_echo", "_generate"):
        monkeypatch.setattr(CannedEngine, name, begun)
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        body = {"model": "canned", "prompt": [1], "messages": [], "stream": True}
        async with bed.http.post(f"{bed.url}{path}", json=body) as answer:
            assert await answer.content.readany()
            books = bed.orchestrator.engines[engines[0].url].books
            assert books.active_count == 1
            assert books.load(time.monotonic() + 60.0).queue_s == 0.0
            may_end.set()


async def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    slow = replace(FAST, output_s=0.05)
    async with canned(1, slow) as engines, orchestrated(engines) as bed:
        body = {"model": "canned", "prompt": PROMPT, "stream": True, "max_tokens": 1000}
        async with bed.http.post(f"{bed.url}/v1/completions", json=body) as answer:
            assert await answer.content.readany()
            assert bed.orchestrator.gate.admission.active_count == 1
        await until(lambda: engines[0].cancelled_count == 1)
        await until(lambda: bed.orchestrator.gate.admission.active_count == 0)
        engine = bed.orchestrator.engines[engines[0].url]
        assert engine.books.active_count == 0


async def test_engines_get_no_header_of_a_client_that_they_obey() -> None:
    """vLLM takes a priority from `X-Vllm-Priority`, in place of the body's field that is left out here."""
    settings = replace(QUICK, tenants={"key": Tenant("search")})
    given = {
        "X-Vllm-Priority": "-1000",
        "X-Data-Parallel-Rank": "3",
        "Cookie": "a=b",
        "traceparent": "00-1",
        "X-Any": "1",
    }
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        answer = await bed.complete(PROMPT, headers={**given, "Authorization": "Bearer key"})
        assert answer.status == 200
        got = {name.lower() for name in engines[0].headers[-1]}
        assert "traceparent" in got
        assert got.isdisjoint({"x-vllm-priority", "x-data-parallel-rank", "cookie", "x-any"})
        assert "authorization" not in got, "the key is a tenant's here, and the engine could use it"


async def test_a_form_has_no_field_that_directs_an_engine() -> None:
    settings = replace(QUICK, tenants={"key": Tenant("search")})
    bearer = {"Authorization": "Bearer key"}
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        for name in ("vllm_xargs", "priority", "kv_transfer_params"):
            form = aiohttp.FormData({"model": "canned", name: "{}"}, default_to_multipart=True)
            refused = await bed.ask("POST", "/v1/audio/transcriptions", data=form, headers=bearer)
            assert (refused.status, refused.json()["error"]["param"]) == (400, name)
        form = aiohttp.FormData({"model": "canned"}, default_to_multipart=True)
        assert (await bed.ask("POST", "/v1/messages", data=form, headers=bearer)).status == 415


async def test_a_client_cannot_direct_the_engines_transfers() -> None:
    """`kv_transfer_params` could name another engine's blocks, which may be another tenant's."""
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        params = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "10.0.0.1"}
        answer = await bed.complete(PROMPT, kv_transfer_params=params, headers={"X-Data-Parallel-Rank": "3"})
        assert answer.status == 200
        assert "kv_transfer_params" not in engines[0].requests[-1]
        assert "x-data-parallel-rank" not in {name.lower() for name in engines[0].headers[-1]}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "canned", "prompt": [1, 2, 3], "cache_salt": "\\ud800"}',
        b'{"model": "canned", "prompt": [1, 2, -3]}',
        b'{"model": "canned", "prompt": [1, 2, 99999999999]}',
        b'{"model": "canned", "prompt": [1, 2, 3], "user": "\\ud800", "max_tokens": 2}',
    ],
)
async def test_one_clients_poison_harms_nobody_else(body: bytes, tmp_path: Path) -> None:
    """The store is asked on, what changes is written down, and no engine is ejected."""
    async with canned(1, FAST) as engines, orchestrated(engines, replace(QUICK, data=tmp_path)) as bed:
        for _ in range(5):
            answer = await bed.ask("POST", "/v1/completions", data=body)
            assert answer.status in (200, 400)
        assert (await bed.complete(PROMPT, user="after")).status == 200
        assert bed.orchestrator.engines[engines[0].url].status().value == "up"
    async with orchestrated([], replace(QUICK, data=tmp_path), is_waiting=False) as bed:
        assert bed.orchestrator.sessions.engine("after") == engines[0].url


async def test_errors_of_one_clients_requests_eject_no_engine_and_cut_no_stream() -> None:
    slow = replace(FAST, output_s=0.02)
    async with canned(2, slow) as engines, orchestrated(engines) as bed:
        running = asyncio.create_task(bed.complete(PROMPT, stream=True, max_tokens=50))
        await until(lambda: any(engine.requests for engine in engines))
        for engine in engines:
            engine.answers_with = 500
        for at in range(5):
            assert (await bed.complete([at, *OTHER])).status == 500
        for engine in engines:
            engine.answers_with = None
        answer = await running
        assert len(answer.words()) == 50
        assert all(engine.status().value == "up" for engine in bed.orchestrator.engines.values())


@pytest.mark.parametrize("proxied", [{}, {"X-Forwarded-For": "10.0.0.1"}, {"Host": "rebound.example:8080"}])
async def test_a_client_of_this_host_is_no_operator_without_the_token(proxied: dict[str, str]) -> None:
    """A bare `proxy_pass` brings the whole world from this host, and a page that is open on it could join an engine."""
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        document = {"url": "http://evil.example:80"}
        for method, path in (("POST", "engines"), ("GET", "status"), ("DELETE", f"engines/{engines[0].url}")):
            answer = await bed.ask(method, f"/_orchestrator/{path}", document, headers=proxied)
            assert answer.status == 401
        assert list(bed.orchestrator.engines) == [engines[0].url]


async def test_an_engine_that_was_restarted_meanwhile_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    """Its batches have the same numbers, and other times."""
    settings = replace(QUICK, data=tmp_path)
    async with canned(1, FAST) as engines:
        port = int(engines[0].url.rsplit(":", 1)[1])
        async with orchestrated(engines, settings) as bed:
            await bed.complete(PROMPT)
            await bed.complete(OTHER)
            await until(lambda: bed.orchestrator.index.held_count(engines[0].url) == 32)
        await engines[0].stop()
    async with canned(0) as _:
        again = CannedEngine(FAST)
        await again.start(port)
        try:
            for at in range(3):
                await again.publish(
                    [{"type": "BlockStored", "block_hashes": [at], "parent_block_hash": None, "medium": "GPU",
                      "token_ids": [at] * 16, "block_size": 16}]
                )  # fmt: skip
            async with orchestrated([again], settings) as bed:
                await until(lambda: bed.orchestrator.index.held_count(again.url) == 3)
                assert bed.orchestrator.engines[again.url].blocks.feeds[again.url].status.value == "live"
        finally:
            await again.stop()


@pytest.mark.parametrize("has_replay", [True, False])
async def test_a_gap_in_the_events_is_replayed_or_known(has_replay: bool) -> None:
    async with canned(1, FAST) as engines:
        engine = engines[0]
        own = EngineSettings(engine.url, events=engine.events, replay=engine.replay if has_replay else None)
        settings = replace(QUICK, engines=(own,))
        async with orchestrated([], settings) as bed:
            bed.engines = engines
            await bed.complete(PROMPT)
            index, name = bed.orchestrator.index, engine.url
            await until(lambda: index.held_count(name) == 16)
            engine.sent_batches.append(engine.sent_batches[-1])  # a batch that got lost on its way
            await bed.complete(OTHER)
            await until(lambda: index.held_count(name) == 32)
            feed = bed.orchestrator.engines[name].blocks.feeds[name]
            assert feed.gap_count == 1
            assert feed.status.value == ("live" if has_replay else "degraded")
            await engine.publish([{"type": "AllBlocksCleared"}], number=0)  # a repetition, or a new start
            await until(lambda: index.held_count(name) == 0)


async def test_batches_of_garbage_do_not_end_the_feed() -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        engine, index = engines[0], bed.orchestrator.index
        await bed.complete(PROMPT)
        await until(lambda: index.held_count(engine.url) == 16)
        for frames in (
            [b"x"],
            [b"", b"short", b""],
            [b"", b"\0" * 8, b"\xc1"],
            [b"", b"\xff" * 8, b"\x93\x01\x90\x00"],
        ):
            await engine.send(frames)
        await engine.publish([{"type": "BlockStored", "block_hashes": ["no"]}])
        await engine.publish([{"type": "AllBlocksCleared"}])
        await until(lambda: index.held_count(engine.url) == 0)
        assert (await bed.complete(PROMPT)).status == 200


@pytest.mark.parametrize("shift", [0, 1])
async def test_tokens_that_are_not_the_engines_are_told_loudly(
    shift: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise every prompt would be a silent miss."""
    monkeypatch.setattr("objectcache.orchestrator.token_checks.UNMATCHED_CHECK_S", 0.1)
    async with canned(1, replace(FAST, tokenize_shift=shift)) as engines, orchestrated(engines) as bed:
        for number in range(UNMATCHED_MAX):
            await bed.complete(f"{number} is the number of this prompt, which has some blocks")
        engine = bed.orchestrator.engines[engines[0].url]
        await until(lambda: not bed.orchestrator.token_checks.count)
        assert engine.unmatched_count == (UNMATCHED_MAX if shift else 0)
        assert ("the tokens that requests are routed by are not" in caplog.text) is bool(shift)


async def test_an_engine_that_gives_no_tokens_is_not_asked_by_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt waited for it, until its time was over."""
    monkeypatch.setattr("objectcache.orchestrator.tokens.TOKENIZE_S", 0.1)
    monkeypatch.setattr("objectcache.orchestrator.tokens.PAUSE_S", 600.0)
    monkeypatch.setattr("objectcache.orchestrator.tokens.PAUSE_S_MAX", 600.0)
    async with canned(1, replace(FAST, tokenize_hangs=True)) as engines, orchestrated(engines) as bed:
        for number in range(5):
            assert (await bed.complete(f"{number} is the number of this prompt")).status == 200
        assert engines[0].tokenize_count == 1


async def test_long_prompts_eject_no_engine_by_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some dozens of one tenant's at once, which no tokenizer could do in time, took all engines from everybody."""
    monkeypatch.setattr("objectcache.orchestrator.tokens.TOKENIZE_S", 0.05)
    monkeypatch.setattr("objectcache.orchestrator.tokens.TOKENIZE_S_FOR_MIB", 0.0)
    monkeypatch.setattr("objectcache.orchestrator.tokens.PAUSE_S", 0.001)
    monkeypatch.setattr("objectcache.orchestrator.tokens.PAUSE_S_MAX", 0.001)
    monkeypatch.setattr("objectcache.orchestrator.tokens.BLAMED_BYTES_MAX", 500)
    async with canned(1, replace(FAST, tokenize_hangs=True)) as engines, orchestrated(engines) as bed:
        engine = bed.orchestrator.engines[engines[0].url]
        answers = [await bed.complete(f"{number}" + "x" * 1000) for number in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        assert engine.liveness.status(time.monotonic()) is EngineStatus.UP
        assert engines[0].tokenize_count == 6


async def test_a_tokenizer_has_a_bounded_number_of_bytes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it may be one tenant's; a prompt beyond it goes to an engine without its tokens."""
    monkeypatch.setattr("objectcache.orchestrator.tokens.AT_ONCE_BYTES_MAX", 2_500)
    monkeypatch.setattr("objectcache.orchestrator.tokens.TOKENIZE_S", 0.5)
    settings = replace(QUICK, tenants={"key-a": Tenant("a"), "key-b": Tenant("b")})
    async with canned(1, replace(FAST, tokenize_hangs=True)) as engines, orchestrated(engines, settings) as bed:

        async def ask(tenant: str, number: int) -> int:
            headers = {"Authorization": f"Bearer key-{tenant}"}
            return (await bed.complete(f"{number}" + "x" * 1000, headers=headers)).status

        first = asyncio.create_task(ask("a", 0))
        await until(lambda: engines[0].tokenize_count == 1)
        assert await ask("a", 1) == 200
        assert engines[0].tokenize_count == 1
        other = asyncio.create_task(ask("b", 2))
        await until(lambda: engines[0].tokenize_count == 2)
        assert await ask("b", 3) == 200
        assert engines[0].tokenize_count == 2
        assert await asyncio.gather(first, other) == [200, 200]


async def test_metrics_are_made_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask. To list the descriptors of thousands of connections for each answer stopped the event loop."""
    monkeypatch.setattr("objectcache.orchestrator.service.METRICS_EVERY_S", 3600.0, raising=False)
    threads: list[int] = []

    class Counted(prometheus_client.ProcessCollector):
        def collect(self) -> Iterable[Metric]:
            threads.append(threading.get_ident())
            return super().collect()

    monkeypatch.setattr(prometheus_client, "ProcessCollector", Counted)
    async with orchestrated([]) as bed:
        answers = await asyncio.gather(*(bed.ask("GET", "/metrics") for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert all(b"process_open_fds" in answer.body for answer in answers)
        assert len(set(threads)) == 1
        assert threading.get_ident() not in threads
        made = len(threads)
        await bed.ask("GET", "/metrics")
        assert len(threads) == made


async def test_a_media_type_takes_no_time() -> None:
    """aiohttp reads it in a time that grows with the square of its semicolons: 3 s for one request of 16 kB."""
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        before_s = time.thread_time()
        headers = {"Content-Type": "a/b" + ";" * 7_000}
        answer = await bed.ask("POST", "/v1/rerank", data=b'{"model": "canned"}', headers=headers)
        assert answer.status < 500
        assert time.thread_time() - before_s < 0.5


async def test_long_answers_say_nothing_about_their_engine() -> None:
    """Three answers of a tenant that were no streams ejected a healthy engine, with the requests of everybody else."""
    settings = replace(QUICK, first_byte_timeout_s=0.2)
    async with canned(1, replace(FAST, output_s=5.0)) as engines, orchestrated(engines, settings) as bed:
        answers = await asyncio.gather(*(bed.complete(f"{number} is a prompt") for number in range(4)))
        assert [answer.status for answer in answers] == [504] * 4
        assert b"ask for a stream" in answers[0].body
        engine = bed.orchestrator.engines[engines[0].url]
        assert engine.liveness.status(time.monotonic()) is EngineStatus.UP
        assert engine.books.load(time.monotonic()).active_count == 0


async def test_what_is_made_of_a_body_counts_like_the_body() -> None:
    """The prompt is there once more for the engine's tokenizer, which nothing counted."""
    prompt = "\U0001f600" * 5_000  # 20 kB here, and 20 kB for the tokenizer
    body = json.dumps({"model": "canned", "prompt": prompt, "max_tokens": 4}, ensure_ascii=False).encode()
    async with canned(1, FAST) as engines:
        for kilobytes, status in ((35, 503), (200, 200)):
            settings = replace(QUICK, bodies_bytes_max=2 * kilobytes * 1000)
            async with orchestrated(engines, settings) as bed:
                for _ in range(3):  # what was counted is given back
                    answer = await bed.ask("POST", "/v1/completions", data=body)
                    assert answer.status == status
                    assert (b"use all the memory" in answer.body) == (status == 503)


async def test_no_tenant_takes_the_name_of_anothers_request() -> None:
    """A finished request's receipt stays its own; the tenant itself may give a name again."""
    settings = replace(QUICK, tenants={"key-a": Tenant("a"), "key-b": Tenant("b")})
    name = "0123456789abcdef"
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        for tenant, is_taken in (("a", False), ("b", True), ("a", False)):
            headers = {"Authorization": f"Bearer key-{tenant}", "X-Request-Id": name}
            answer = await bed.complete(PROMPT, headers=headers)
            assert answer.status == 200
            assert (answer.headers["x-objectcache-request-id"] != name) == is_taken
            receipt = (await bed.ask("GET", f"/_orchestrator/receipts/{name}")).json()
            assert receipt["tenant"] == "a"


async def test_requests_for_an_engine_that_is_gone_keep_no_place_from_others() -> None:
    """A thousand requests for a model whose engine was down kept everybody out beside an idle engine."""
    tenants = {"key-of-a-tenant": Tenant("a"), "key-of-another": Tenant("b")}
    settings = replace(QUICK, tenants=tenants, admission=AdmissionSettings(active_max=2, queue_max=8))
    lost = {"model": "lost", "prompt": PROMPT, "max_tokens": 4}
    a, b = ({"Authorization": f"Bearer {key}"} for key in tenants)
    async with (
        canned(1, FAST) as engines,
        canned(1, replace(FAST, model="lost")) as others,
        orchestrated([*engines, *others], settings) as bed,
    ):
        engine, gate = bed.orchestrator.engines[others[0].url], bed.orchestrator.gate
        await until(lambda: all(each.models for each in bed.orchestrator.engines.values()))
        port = int(others[0].url.rsplit(":", 1)[1])
        await others[0].stop()
        await until(lambda: engine.status().value != "up")
        waiting = [asyncio.create_task(bed.ask("POST", "/v1/completions", lost, headers=a)) for _ in range(4)]
        await until(lambda: gate.without_engine_count == 4)
        refused = await bed.ask("POST", "/v1/completions", lost, headers=a)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert gate.admission.active_count == 0
        assert (await bed.complete(PROMPT, headers=b)).status == 200
        again = CannedEngine(replace(FAST, model="lost"))
        await again.start(port)
        try:
            assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
        finally:
            await again.stop()
        assert gate.without_engine_count == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_keeps_no_place(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes megabytes for a connection, so connections of this test are given less."""
    made = Connection.connection_made

    def with_little(connection: Connection, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", with_little)
    settings = replace(QUICK, admission=AdmissionSettings(active_max=1))
    document = {"model": "canned", "prompt": PROMPT, "max_tokens": 3_000 if stream else 180_000, "stream": stream}
    body = json.dumps(document).encode()
    async with canned(1, replace(FAST, output_s=0.0)) as engines, orchestrated(engines, settings) as bed:
        admission, place = bed.orchestrator.gate.admission, urlsplit(bed.url)
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with slow:
            slow.connect((place.hostname, place.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body)
            await until(lambda: bool(engines[0].requests))
            assert (await bed.complete(OTHER)).status == 200
            assert admission.active_count == 0
            assert bed.orchestrator.answers.held_bytes > 0
        await until(lambda: bed.orchestrator.answers.held_bytes == 0)


async def test_the_parameters_of_a_prefill_are_good_for_one_attempt() -> None:
    """A prefill engine frees its blocks after one read: a second decode engine would read another prompt's KV there."""
    async with canned(3, FAST) as engines, canned(1, replace(FAST, transfer_params={"block": 7})) as prefills:
        prefill = EngineSettings(prefills[0].url, role=Role.PREFILL)
        async with orchestrated(engines, replace(QUICK, engines=(prefill,), prefill_tokens_min=64)) as bed:
            for engine in engines:
                engine.answers_with = 500
            assert (await bed.complete(PROMPT)).status == 500
            sent = [request.get("kv_transfer_params") for engine in engines for request in engine.requests]
            assert len(sent) == 3
            assert [params for params in sent if params] == [{"block": 7}]


async def test_a_prefill_engine_that_answers_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probes are well. A prompt waited ten minutes for it beside an engine that could have computed it."""
    monkeypatch.setattr("objectcache.orchestrator.prefill.ANSWER_S_MIN", 0.01)
    async with canned(1, FAST) as engines, canned(1, SILENT) as prefills:
        prefill = EngineSettings(prefills[0].url, role=Role.PREFILL)
        settings = replace(QUICK, engines=(prefill,), prefill_tokens_min=64, first_byte_timeout_s=600.0)
        async with orchestrated(engines, settings) as bed:
            answer = await bed.complete(PROMPT)
            assert (answer.status, answer.engine) == (200, engines[0].url)
            assert len(prefills[0].requests) == 1
            assert bed.orchestrator.engines[prefills[0].url].books.active_count == 0


async def test_a_prefill_engine_is_not_waited_for_as_long_as_it_says_itself() -> None:
    """It claimed seconds for each token, and every long prompt waited ten minutes for it."""
    labels = {
        "deployment": "m", "dtype": "bf16", "block_tokens": "16", "tp_size": "1", "pp_size": "1", "num_layers": "2",
        "chunk_tokens": "256", "layer_chunk_bytes": "4096", "endpoint": "http://127.0.0.1:9", "bucket": "b",
    }  # fmt: skip
    claims = replace(SILENT, deployment=labels, costs={"token_us": 1e6})
    async with canned(1, FAST) as engines, canned(1, claims) as prefills:
        prefill = EngineSettings(prefills[0].url, role=Role.PREFILL)
        async with orchestrated(engines, replace(QUICK, engines=(prefill,), prefill_tokens_min=64)) as bed:
            await until(lambda: bed.orchestrator.engines[prefills[0].url].prefill.token_us == 1e6)
            assert (await bed.complete(PROMPT)).status == 200
            assert not prefills[0].requests


async def test_prefill_engines_that_answer_nothing_leave_half_of_the_places_to_others() -> None:
    """Long prompts of one tenant waited for them until nobody got a place, however short the prompt was."""
    places = AdmissionSettings(active_max=4, deadline_s=1.0)
    async with canned(1, FAST) as engines, canned(2, SILENT) as prefills:
        roles = tuple(EngineSettings(each.url, role=Role.PREFILL) for each in prefills)
        settings = replace(QUICK, engines=roles, prefill_tokens_min=64, admission=places)
        async with orchestrated(engines, settings) as bed:
            waiting = [asyncio.create_task(bed.complete([at, *PROMPT])) for at in range(4)]
            await until(lambda: sum(task.done() for task in waiting) == 2)
            assert (await bed.complete([1, 2, 3])).status == 200
            assert sum(len(each.requests) for each in prefills) == 2
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_silent_prefill_engine_gets_no_further_prompts() -> None:
    """Its silence would be a part of the next prediction, and each prompt would wait three times as long."""
    async with canned(1, FAST) as engines, canned(1, SILENT) as prefills:
        prefill = EngineSettings(prefills[0].url, role=Role.PREFILL)
        async with orchestrated(engines, replace(QUICK, engines=(prefill,), prefill_tokens_min=64)) as bed:
            waiting = asyncio.create_task(bed.complete(PROMPT))
            books = bed.orchestrator.engines[prefills[0].url].books
            await until(lambda: books.overdue_s(time.monotonic()) > 0)
            assert (await bed.complete(OTHER)).status == 200
            assert len(prefills[0].requests) == 1
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("padding", [0, 1 << 15])
async def test_transfer_params_that_are_nested_too_deep_end_no_reader_and_no_request(padding: int) -> None:
    """Those of a prefill engine ended the process that was to write them into a request, which was answered 500."""
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    prefill = replace(FAST, transfer_params={"remote": deep})
    async with canned(1, FAST) as engines, canned(1, prefill) as others:
        settings = replace(QUICK, engines=(EngineSettings(others[0].url, role=Role.PREFILL),), prefill_tokens_min=64)
        async with orchestrated(engines, settings) as bed:
            answer = await bed.complete(PROMPT, user="u" * padding)
            assert answer.status == 200
            assert len(others[0].requests) == 1
            assert "kv_transfer_params" not in engines[0].requests[0]
            assert bed.orchestrator.readers.failure_count == 0
            text = b'{"model": "m", "prompt": "a", "user": "%s", "kv_transfer_params": ' % (b"u" * padding)
            said = text + b"[" * 970 + b"]" * 970 + b"}"
            refused = await bed.ask("POST", "/v1/completions", data=said, headers={"Content-Type": "application/json"})
            assert refused.status == 400
            assert bed.orchestrator.readers.failure_count == 0


async def test_long_transfer_params_are_read_and_passed_on_by_a_reading_process() -> None:
    """The event loop parsed them outside of its turns: 150 answers that ended together stopped it for four seconds."""
    params = {"remote_block_ids": list(range(10_000))}
    async with canned(1, FAST) as engines, canned(1, replace(FAST, transfer_params=params)) as others:
        settings = replace(QUICK, engines=(EngineSettings(others[0].url, role=Role.PREFILL),), prefill_tokens_min=64)
        async with orchestrated(engines, settings) as bed:
            assert (await bed.complete(PROMPT)).status == 200
            assert engines[0].requests[0]["kv_transfer_params"] == params
            assert bed.orchestrator.readers.started_count > 0


async def test_an_engine_that_is_removed_and_then_ends_leaves_an_honest_end() -> None:
    """The failure that ejects it was an error of ours: a second answer within the running one, which never ended."""
    document = {"model": "canned", "prompt": PROMPT, "max_tokens": 500, "stream": True}
    async with (
        canned(1, replace(FAST, output_s=0.05)) as engines,
        orchestrated(engines) as bed,
        AsyncExitStack() as stack,
    ):
        answers = [
            await stack.enter_async_context(bed.http.post(f"{bed.url}/v1/completions", json=document)) for _ in range(8)
        ]
        for answer in answers:
            assert await answer.content.readline()
        assert (await bed.ask("DELETE", f"/_orchestrator/engines/{quote(engines[0].url, safe='')}")).status == 200
        await engines[0].stop()
        async with asyncio.timeout(LIMIT_S):
            for answer in answers:
                said = await answer.content.read()
                assert b"HTTP/1.1" not in said
                last = said.decode().strip().rsplit("\n\n", 1)[-1]
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_lost"


@pytest.mark.parametrize("wish", ["drained", "removed"])
async def test_an_engine_that_is_to_leave_and_hangs_is_left_by_those_that_wait_for_it(wish: str) -> None:
    """One that was draining could not be ejected, and one that was removed was probed no more: they waited for ten
    minutes.
    """
    patient = replace(QUICK, first_byte_timeout_s=600.0)
    async with canned(2, FAST) as engines, orchestrated(engines, patient) as bed:
        first = await bed.complete(PROMPT)
        hung = bed.engine_at(first.engine)
        hung.is_hung.set()
        asking = asyncio.create_task(bed.complete([*PROMPT, 1], stream=True))
        engine = bed.orchestrator.engines[hung.url]
        await until(lambda: engine.books.load(time.monotonic()).active_count > 0)
        if wish == "drained":
            engine.liveness.drain(is_wanted=True)
        else:
            assert (await bed.ask("DELETE", f"/_orchestrator/engines/{quote(hung.url, safe='')}")).status == 200
        again = await asking
        assert (again.status, again.engine != first.engine) == (200, True)


async def test_an_engine_for_which_there_is_no_room_is_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orchestrator did not start any more."""
    settings = replace(QUICK, data=tmp_path)
    async with canned(3, FAST) as engines:
        async with orchestrated([], settings, is_waiting=False) as bed:
            monkeypatch.setattr("objectcache.orchestrator.rules.prefix_index.ENGINES_MAX", 2)
            statuses = [
                (await bed.ask("POST", "/_orchestrator/engines", {"url": engine.url})).status for engine in engines
            ]
            assert statuses == [201, 201, 400]
        async with orchestrated([], settings, is_waiting=False) as bed:
            assert set(bed.orchestrator.engines) == {engine.url for engine in engines[:2]}
        monkeypatch.setattr("objectcache.orchestrator.rules.prefix_index.ENGINES_MAX", 1)
        async with orchestrated([], settings, is_waiting=False) as bed:
            assert len(bed.orchestrator.engines) == 1


async def test_an_engine_that_is_registered_anew_is_never_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its blocks were read from the disk, its clients were told that no engine has their model."""
    async with canned(1, FAST) as engines, orchestrated([], replace(QUICK, data=tmp_path), is_waiting=False) as bed:
        document = {"url": engines[0].url, "name": "a"}
        assert (await bed.ask("POST", "/_orchestrator/engines", document)).status == 201
        assert (await bed.complete(PROMPT)).status == 200
        writing, goes_on = bed.orchestrator.writing, asyncio.Event()
        assert writing is not None
        monkeypatch.setattr(writing, "flush", goes_on.wait)
        before = bed.orchestrator.engines["a"]
        anew = asyncio.create_task(bed.ask("POST", "/_orchestrator/engines", {**document, "requests_max": 3}))
        await until(lambda: bed.orchestrator.engines["a"] is not before)
        assert (await bed.complete(PROMPT)).status == 200
        goes_on.set()
        assert (await anew).status == 201
        monkeypatch.undo()
        assert bed.orchestrator.engines["a"].books.requests_max == 3
        assert (await bed.ask("POST", "/_orchestrator/engines/a/drain")).status == 200
        assert (await bed.ask("POST", "/_orchestrator/engines", document)).status == 201
        assert bed.orchestrator.engines["a"].liveness.is_draining
        assert [is_draining for _, is_draining in writing.engines()] == [True]


@pytest.mark.parametrize("leaves_first", [False, True])
async def test_an_engine_that_is_registered_anew_still_has_its_requests(leaves_first: bool) -> None:
    """Those that ran there counted as nothing, so it looked idle and got the requests of all."""
    slow = replace(FAST, output_s=10.0)
    async with canned(1, slow) as engines, orchestrated([]) as bed:
        fleet, document = bed.orchestrator.fleet, {"url": engines[0].url, "name": "a"}
        await fleet.register(document)
        stream = {"model": "canned", "prompt": PROMPT, "stream": True}
        async with bed.http.post(f"{bed.url}/v1/completions", json=stream) as answer:
            assert await answer.content.readany()
            before = fleet.engines["a"]
            if leaves_first:
                await fleet.remove("a")
            await fleet.register({**document, "requests_max": 3})
            engine = fleet.engines["a"]
            assert engine is not before
            assert (engine.books.active_count, engine.books.requests_max) == (1, 3)
        await until(lambda: engine.books.active_count == 0)


async def test_a_registration_does_not_undo_a_drain_of_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote the earlier wish down: after the next start the engine got requests again."""
    async with canned(1, FAST) as engines, orchestrated([], replace(QUICK, data=tmp_path), is_waiting=False) as bed:
        document = {"url": engines[0].url, "name": "a"}
        fleet, writing = bed.orchestrator.fleet, bed.orchestrator.writing
        await fleet.register(document)
        assert writing is not None
        has_begun, goes_on, add_engine = asyncio.Event(), asyncio.Event(), writing.add_engine

        async def added(*arguments: Any, **options: Any) -> None:
            has_begun.set()
            await goes_on.wait()
            await add_engine(*arguments, **options)

        monkeypatch.setattr(writing, "add_engine", added)
        anew = asyncio.create_task(fleet.register({**document, "requests_max": 3}))
        await has_begun.wait()
        draining = asyncio.create_task(fleet.drain("a", is_wanted=True))
        await settled()
        goes_on.set()
        await asyncio.gather(anew, draining)
        assert [is_draining for _, is_draining in writing.engines()] == [True]
        assert fleet.engines["a"].liveness.is_draining


async def test_a_wish_that_cannot_be_written_down_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered 500, and was half done."""

    async def fail(*_: object, **__: object) -> None:
        raise MetadataError("the disk is full")

    async with canned(1, FAST) as engines, orchestrated([], replace(QUICK, data=tmp_path), is_waiting=False) as bed:
        document = {"url": engines[0].url, "name": "a"}
        assert (await bed.ask("POST", "/_orchestrator/engines", document)).status == 201
        assert bed.orchestrator.writing is not None
        for name in ("drain", "remove_engine"):
            monkeypatch.setattr(bed.orchestrator.writing, name, fail)
        assert (await bed.ask("POST", "/_orchestrator/engines/a/drain")).status == 503
        assert (await bed.ask("DELETE", "/_orchestrator/engines/a")).status == 503
        assert not bed.orchestrator.engines["a"].liveness.is_draining
        assert (await bed.complete(PROMPT)).status == 200
        monkeypatch.undo()
        assert (await bed.ask("DELETE", "/_orchestrator/engines/a")).status == 200
        assert (await bed.ask("DELETE", "/_orchestrator/engines/a")).status == 404


async def test_the_id_of_a_response_may_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first piece was looked at, and the next request was told that nobody knows the response."""

    async def some(reader: aiohttp.StreamReader) -> bytes:
        return await reader.read(7)

    async with canned(2, FAST) as engines, orchestrated(engines) as bed:
        monkeypatch.setattr(aiohttp.StreamReader, "readany", some)
        asked = {"model": "canned", "input": "first", "stream": True}
        began = await bed.ask("POST", "/v1/responses", asked)
        response = re.search(rb"resp_\w+", began.body)
        assert response is not None
        more = {**asked, "previous_response_id": response[0].decode()}
        gone_on = await bed.ask("POST", "/v1/responses", more)
        assert (gone_on.status, gone_on.engine) == (200, began.engine)
        assert bed.orchestrator.kept_responses.engine("", response[0].decode()) == began.engine
