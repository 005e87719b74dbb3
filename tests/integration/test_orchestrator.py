"""The orchestrator in front of engines that are played: answers, tenants, operators and restarts."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from bench.beds.canned_engines import CannedEngine, CannedSettings
from objectcache.orchestrator.rules.admission import AdmissionSettings, Tenant
from objectcache.orchestrator.rules.policies import PolicyName
from objectcache.orchestrator.settings import EngineSettings, Role
from tests.support.orchestrators import ADMIN_TOKEN, QUICK, canned, orchestrated, words
from tests.support.waiting import until

PROMPT = list(range(1, 257))
OTHER = list(range(1000, 1256))
FAST = CannedSettings(token_us=20.0, output_s=0.001)


async def test_a_stream_comes_as_the_engine_sends_it_and_says_where_from() -> None:
    async with canned(2, FAST) as engines, orchestrated(engines) as bed:
        answer = await bed.complete(PROMPT, stream=True, headers={"X-Request-Id": "0123456789abcdef"})
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.words() == words(PROMPT)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.engine in {engine.url for engine in engines}
        assert answer.headers["x-objectcache-request-id"] == "0123456789abcdef"
        receipt = (await bed.ask("GET", "/_orchestrator/receipts/0123456789abcdef")).json()
        assert receipt["engine"] == answer.engine
        assert receipt["prompt_tokens"] == 256
        assert receipt["status"] == 200
        assert 0 < receipt["ttft_s"] <= receipt["total_s"]
        assert receipt["attempts"] == [{"engine": answer.engine, "status": 200}]


async def test_prompts_go_where_their_beginning_is_by_the_engines_own_events() -> None:
    async with canned(3, FAST) as engines, orchestrated(engines) as bed:
        for prompt in (PROMPT, OTHER):
            await bed.complete(prompt)
        known = bed.orchestrator.engines
        await until(lambda: sum(bed.orchestrator.index.held_count(each) for each in known) == 32)
        homes = {}
        for name, prompt in (("first", PROMPT), ("second", OTHER)):
            answer = await bed.complete([*prompt, 5, 6, 7])
            homes[name] = answer.engine
        assert sum(bed.orchestrator.index.held_count(each) for each in known) == 32
        for name, prompt in (("first", PROMPT), ("second", OTHER)):
            answers = [await bed.complete([*prompt, 8, at], stream=True) for at in range(4)]
            assert {answer.engine for answer in answers} == {homes[name]}
        receipt_id = answers[-1].headers["x-objectcache-request-id"]
        receipt = (await bed.ask("GET", f"/_orchestrator/receipts/{receipt_id}")).json()
        assert receipt["predictions"][0]["held_tokens"] == 256


async def test_chats_texts_and_responses_pass_through() -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        chat = await bed.ask(
            "POST", "/v1/chat/completions",
            {"model": "canned", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "tools": [],
             "logprobs": True, "seed": 5},
        )  # fmt: skip
        assert chat.json()["choices"][0]["message"]["content"]
        assert engines[0].requests[-1]["logprobs"] is True
        assert (await bed.complete("a text")).status == 200
        responses = await bed.ask("POST", "/v1/responses", {"model": "canned", "input": "hello"})
        assert responses.status == 200
        embedded = await bed.ask("POST", "/v1/embeddings", {"model": "canned", "input": "hello"})
        assert embedded.json()["data"][0]["embedding"] == [0.5]
        tokens = await bed.ask("POST", "/tokenize", {"model": "canned", "prompt": "ab"})
        assert tokens.json()["tokens"] == [97, 98]
        models = await bed.ask("GET", "/v1/models")
        assert [each["id"] for each in models.json()["data"]] == ["canned"]
        assert (await bed.ask("GET", "/health")).status == 200


async def test_an_explanation_has_every_engines_terms_and_sends_nothing() -> None:
    async with canned(3, FAST) as engines, orchestrated(engines) as bed:
        await bed.complete(PROMPT)
        sent = sum(len(engine.requests) for engine in engines)
        told = (await bed.ask("POST", "/_orchestrator/route", {"model": "canned", "prompt": PROMPT})).json()
        assert len(told["candidates"]) == 3
        assert told["candidates"][0]["engine"] == told["engine"]
        for each in told["candidates"]:
            assert each["ttft_s"] == pytest.approx(each["queue_s"] + each["routing_s"] + each["compute_s"])
        assert sum(len(engine.requests) for engine in engines) == sent


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"prompt": 5, "messages": 5}', b"\xff" * 100, b"[" * 100_000])
async def test_a_body_that_no_engine_could_answer_is_refused_and_not_sent(path: str, body: bytes) -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        answer = await bed.ask("POST", path, data=body)
        assert answer.status == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert engines[0].requests == []


async def test_load_is_counted_to_the_streams_end_on_every_path() -> None:
    """Whatever happens to 60 requests, the books are empty afterwards."""
    settings = replace(QUICK, admission=AdmissionSettings(deadline_s=0.2))  # nobody waits for engines to come back
    async with canned(2, replace(FAST, output_s=0.002)) as engines, orchestrated(engines, settings) as bed:
        engines[1].cuts_after = 1

        async def one(at: int) -> None:
            body = {"model": "canned", "prompt": [at, *PROMPT], "stream": at % 2 == 0, "max_tokens": 20}
            if at % 10 == 9:
                engines[0].fails_with = 500 if at % 20 == 19 else None
            try:
                async with asyncio.timeout(0.05 if at % 5 == 0 else 60):
                    await bed.ask("POST", "/v1/completions", body)
            except (TimeoutError, aiohttp.ClientError):
                return

        await asyncio.gather(*(one(at) for at in range(60)))
        await until(lambda: all(engine.books.active_count == 0 for engine in bed.orchestrator.engines.values()))
        assert bed.orchestrator.gate.admission.active_count == 0
        assert bed.orchestrator.gate.admission.waiting_count == 0


@pytest.fixture
def may_compute(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Engines answer nothing before it is set."""
    may, compute = asyncio.Event(), CannedEngine.compute

    async def waited(*asked: Any) -> None:
        await may.wait()
        await compute(*asked)

    monkeypatch.setattr(CannedEngine, "compute", waited)
    return may


async def test_admission_bounds_what_runs_and_tells_the_rest_to_come_again(may_compute: asyncio.Event) -> None:
    """003: ten at once with `active_max` 3: three run and seven are refused."""
    settings = replace(QUICK, admission=AdmissionSettings(active_max=3, queue_max=0))
    async with canned(2, FAST) as engines, orchestrated(engines, settings) as bed:
        asked = [asyncio.create_task(bed.complete([at, *PROMPT])) for at in range(10)]
        await until(lambda: sum(each.done() for each in asked) == 7)
        may_compute.set()
        answers = await asyncio.gather(*asked)
        statuses = sorted(answer.status for answer in answers)
        assert statuses == [200] * 3 + [429] * 7
        refused = next(answer for answer in answers if answer.status == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_web_pages_of_named_origins_may_ask(stream: bool) -> None:
    page, other = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
    settings = replace(QUICK, cors_origins=("https://chat.example",), response_cache_bytes=1 << 20)
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        preflight = await bed.ask("OPTIONS", "/v1/chat/completions", headers=page | asks)
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (204, page["Origin"])
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        for _ in range(2):  # the second comes from the response cache
            answer = await bed.complete(PROMPT, stream=stream, temperature=0, headers=page)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, page["Origin"])
            assert "x-objectcache-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.engine == "response cache"
        refused = await bed.complete([], headers=page)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, page["Origin"])
        for answer in (
            await bed.complete(PROMPT, stream=stream, headers=other),
            await bed.ask("OPTIONS", "/v1/chat/completions", headers=other | asks),
            await bed.ask("OPTIONS", "/_orchestrator/engines", headers=page | asks),
            await bed.ask("GET", "/_orchestrator/engines", headers=page),
        ):
            assert "access-control-allow-origin" not in answer.headers
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        answer = await bed.complete(PROMPT, stream=stream, headers=page)
        assert (answer.status, answer.headers.get("access-control-allow-origin")) == (200, None)


async def test_a_stop_lets_requests_end_and_takes_no_more(may_compute: asyncio.Event) -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        running = [asyncio.create_task(bed.complete([at, *PROMPT], stream=at == 0)) for at in range(2)]
        await until(lambda: bed.orchestrator.gate.admission.active_count == 2)
        stop = asyncio.create_task(bed.made.close())
        await until(lambda: bed.made.is_stopping)
        late, health = await bed.complete(PROMPT), await bed.ask("GET", "/health")
        assert (late.status, late.json()["error"]["code"], late.headers["retry-after"]) == (503, "stopping", "1")
        assert (health.status, health.json()) == (503, {"status": "stopping"})
        assert not any(each.done() for each in running)
        may_compute.set()
        assert [answer.status for answer in await asyncio.gather(*running)] == [200, 200]
        await stop


async def test_what_a_stop_cuts_off_is_told_so() -> None:
    """A stream, whose status is out, by an event; a request without an answer by 503."""
    slow = CannedSettings(token_us=20.0, output_s=0.5)
    async with canned(1, slow) as engines, orchestrated(engines, replace(QUICK, drain_s=0.0)) as bed:
        whole = asyncio.create_task(bed.complete(PROMPT, max_tokens=1000))
        body = {"model": "canned", "prompt": PROMPT, "max_tokens": 1000, "stream": True}
        async with bed.http.post(f"{bed.url}/v1/completions", json=body) as stream:
            begun = await stream.content.readany()
            await until(lambda: bed.orchestrator.gate.admission.active_count == 2)
            await bed.made.close()
            ended = begun + await stream.content.read()
        assert stream.status == 200
        event = json.loads(ended.decode().rstrip().rpartition("data: ")[2])
        assert event["error"]["code"] == "stopping"
        answer = await whole
        assert (answer.status, answer.json()["error"]["code"]) == (503, "stopping")
        for headers in (stream.headers, answer.headers):
            receipt = bed.orchestrator.receipts.find(headers["x-objectcache-request-id"])
            assert receipt is not None
            assert receipt.note == "cut off: the orchestrator was told to stop"


async def test_a_request_that_waits_too_long_is_told_so(may_compute: asyncio.Event) -> None:
    settings = replace(QUICK, admission=AdmissionSettings(active_max=1, queue_max=5, deadline_s=0.1))
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        asked = [asyncio.create_task(bed.complete([at, *PROMPT])) for at in range(3)]
        await until(lambda: sum(each.done() for each in asked) == 2)
        may_compute.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status for answer in answers) == [200, 503, 503]


async def test_tenants_are_told_apart_by_their_keys_and_share_nothing() -> None:
    tenants = {"key-of-a-tenant": Tenant("a"), "key-of-another": Tenant("b", active_max=1)}
    settings = replace(QUICK, tenants=tenants, response_cache_bytes=1 << 20)
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        assert (await bed.complete(PROMPT)).status == 401
        assert (await bed.complete(PROMPT, headers={"Authorization": "Bearer nobody"})).status == 401
        assert (await bed.ask("GET", "/v1/models")).status == 401
        for _ in range(2):
            answer = await bed.complete(
                PROMPT, temperature=0, stream=True, headers={"Authorization": "Bearer key-of-a-tenant"}
            )
            assert answer.words() == words(PROMPT)
        assert answer.engine == "response cache"
        other = await bed.complete(
            PROMPT, temperature=0, stream=True, headers={"Authorization": "Bearer key-of-another"}
        )
        assert other.engine == engines[0].url
        assert len(engines[0].requests) == 2
        quota = await bed.ask("PUT", "/_orchestrator/quotas/b", {"weight": 2.0, "active_max": 5})
        assert quota.status == 200
        assert (await bed.ask("PUT", "/_orchestrator/quotas/nobody", {"weight": 2.0})).status == 400
        assert (await bed.ask("PUT", "/_orchestrator/quotas/b", {"weight": -1})).status == 400


async def test_an_operators_token_goes_to_no_engine() -> None:
    """With it an engine could remove all others. A client's own key goes on."""
    async with canned(1, FAST) as engines, orchestrated(engines, QUICK) as bed:
        asked = {"model": "canned", "prompt": "a text that an engine tokenizes"}
        assert (await bed.ask("POST", "/_orchestrator/route", asked)).status == 200
        operator, client = f"Bearer {ADMIN_TOKEN}", "Bearer of-a-client"
        await bed.complete("another text", headers={"Authorization": operator})
        await bed.complete("one more text", headers={"Authorization": client})
        told = [each.get("Authorization") for each in engines[0].tokenize_headers + engines[0].headers]
        assert told.count(client) == 2
        assert operator not in told
        assert len(told) == 5


async def test_a_kept_answer_is_of_the_headers_that_its_engine_was_told() -> None:
    """An engine may answer by them. What only names a client or a request decides nothing."""
    async with canned(1, FAST) as engines, orchestrated(engines, replace(QUICK, response_cache_bytes=1 << 20)) as bed:
        for count, headers in (
            (1, {"OpenAI-Organization": "one", "User-Agent": "x"}),
            (1, {"OpenAI-Organization": "one", "User-Agent": "y", "X-Request-Id": "7"}),
            (2, {"OpenAI-Organization": "other"}),
            (3, {"OpenAI-Organization": "other", "OpenAI-Project": "p"}),
        ):
            answer = await bed.complete(PROMPT, temperature=0, stream=True, headers=headers)
            assert answer.words() == words(PROMPT)
            assert len(engines[0].requests) == count


async def test_with_salts_of_their_own_tenants_share_no_block() -> None:
    tenants = {"key-of-a-tenant": Tenant("a"), "key-of-another": Tenant("b")}
    settings = replace(QUICK, tenants=tenants, tenant_salts=True)
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        index, name = bed.orchestrator.index, engines[0].url
        for count, (key, salt) in enumerate(
            [("key-of-a-tenant", "x"), ("key-of-another", "x"), ("key-of-a-tenant", "y")], start=1
        ):
            await bed.complete(PROMPT, cache_salt=salt, headers={"Authorization": f"Bearer {key}"})
            await until(lambda count=count: index.held_count(name) == 16 * count)
        await bed.complete(PROMPT, cache_salt="x", headers={"Authorization": "Bearer key-of-a-tenant"})
        assert len({each["cache_salt"] for each in engines[0].requests}) == 3
        assert index.held_count(name) == 48
        form = aiohttp.FormData({"model": "canned", "file": "sound"}, default_to_multipart=True)
        bearer = {"Authorization": "Bearer key-of-a-tenant"}
        unsalted = await bed.ask("POST", "/v1/audio/transcriptions", data=form, headers=bearer)
        assert unsalted.status == 501
        assert b"cache_salt" in unsalted.body
        assert not engines[0].forms
        for path in ("/v1/messages", "/v1/embeddings", "/v1/score", "/rerank"):
            answer = await bed.ask("POST", path, {"model": "canned", "input": "a"}, headers=bearer)
            assert answer.status == 501, path
            assert f"obey cache_salt at {path}" in answer.json()["error"]["message"]
        for path in ("/v1/responses", "/detokenize"):
            answer = await bed.ask("POST", path, {"model": "canned", "input": "a"}, headers=bearer)
            assert answer.status == 200, path


async def test_a_retry_is_kept_without_the_refusal_before_it() -> None:
    settings = replace(QUICK, response_cache_bytes=1 << 20)
    async with canned(2, FAST) as engines, orchestrated(engines, settings) as bed:
        first = await bed.complete(PROMPT)
        home = bed.engine_at(first.engine)
        home.answers_with = 503
        answers = [await bed.complete([*PROMPT, 1], temperature=0) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        assert answers[1].engine == "response cache"
        assert answers[0].json() == answers[1].json()


async def test_one_engine_has_one_name() -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        for document in ({"url": engines[0].url, "name": "b"}, {"url": "http://127.0.0.1:1", "name": engines[0].url}):
            assert (await bed.ask("POST", "/_orchestrator/engines", document)).status == 409
        assert (await bed.ask("POST", "/_orchestrator/engines", {"url": f"{engines[0].url}/"})).status == 201
        assert list(bed.orchestrator.engines) == [engines[0].url]


async def test_an_operator_joins_drains_and_removes_engines_while_it_runs() -> None:
    async with canned(2, FAST) as engines, orchestrated(engines[:1]) as bed:
        bed.engines = engines
        joined = await bed.ask("POST", "/_orchestrator/engines", {"url": engines[1].url, "name": "second"})
        assert (joined.status, joined.json()["name"]) == (201, "second")
        await until(lambda: bed.orchestrator.engines["second"].status().value == "up")
        assert (await bed.ask("POST", f"/_orchestrator/engines/{engines[0].url}/drain")).status == 200
        answers = [await bed.complete([at, *PROMPT]) for at in range(3)]
        assert {answer.engine for answer in answers} == {"second"}
        assert (await bed.ask("POST", f"/_orchestrator/engines/{engines[0].url}/undrain")).status == 200
        assert (await bed.ask("DELETE", "/_orchestrator/engines/second")).status == 200
        assert {(await bed.complete(PROMPT)).engine} == {engines[0].url}
        for wrong in (
            {},
            {"url": "ftp://x"},
            {"url": "http://x:1", "requests_max": 0},
            {"url": "http://x:1", "more": 1},
        ):
            assert (await bed.ask("POST", "/_orchestrator/engines", wrong)).status == 400
        assert (await bed.ask("DELETE", "/_orchestrator/engines/nobody")).status == 404


async def test_the_admin_surface_needs_its_token() -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {ADMIN_TOKEN}x"}):
            assert (await bed.ask("GET", "/_orchestrator/status", headers=headers)).status == 401
        status = await bed.ask("GET", "/_orchestrator/status", headers={"Authorization": f"bearer {ADMIN_TOKEN}"})
        assert status.json()["engines"][0]["status"] == "up"


async def test_after_a_restart_engines_sessions_and_blocks_are_known(tmp_path: Path) -> None:
    """The registration was acknowledged; the blocks were written down, and what came since is replayed."""
    settings = replace(QUICK, data=tmp_path)
    async with canned(2, FAST) as engines:
        async with orchestrated([], settings) as bed:
            for engine in engines:
                await bed.ask("POST", "/_orchestrator/engines", {"url": engine.url})
            known = bed.orchestrator.engines
            await until(lambda: len(known) == 2 and all(engine.blocks.feeds for engine in known.values()))
            home = (await bed.complete(PROMPT, user="session")).engine
            await until(lambda: bed.orchestrator.index.held_count(home) == 16)
        engine = next(each for each in engines if each.url == home)
        await engine.publish(
            [{"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": list(range(16)),
              "block_size": 16, "medium": "GPU"}]
        )  # fmt: skip
        async with orchestrated([], settings) as bed:
            assert set(bed.orchestrator.engines) == {each.url for each in engines}
            assert bed.orchestrator.sessions.engine("session") == home
            await until(lambda: bed.orchestrator.index.held_count(home) == 17)
            feed = bed.orchestrator.engines[home].blocks.feeds[home]
            assert feed.replayed_count == 1
            assert (await bed.complete([*PROMPT, 1])).engine == home


@pytest.mark.parametrize("policy", PolicyName)
async def test_every_policy_serves(policy: PolicyName) -> None:
    async with canned(3, FAST) as engines, orchestrated(engines, replace(QUICK, policy=policy)) as bed:
        answers = await asyncio.gather(*(bed.complete([at % 3, *PROMPT], stream=True) for at in range(12)))
        assert {answer.status for answer in answers} == {200}
        for at, answer in enumerate(answers):
            assert answer.words() == words([at % 3, *PROMPT])


async def test_a_prefill_engine_computes_long_prompts_first_and_its_parameters_go_on() -> None:
    async with canned(2, FAST) as engines:
        prefill = EngineSettings(engines[1].url, role=Role.PREFILL)
        async with orchestrated(engines[:1], replace(QUICK, engines=(prefill,), prefill_tokens_min=64)) as bed:
            answer = await bed.complete(PROMPT, stream=True)
            assert answer.engine == engines[0].url
            assert answer.words() == words(PROMPT)
            first = engines[1].requests[0]
            assert (first["max_tokens"], first["stream"]) == (1, False)
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            await bed.complete(PROMPT[:32])
            assert len(engines[1].requests) == 1


async def test_a_request_that_no_engine_could_hold_says_what_it_needs_and_what_there_is() -> None:
    async with canned(2, replace(FAST, blocks_max=10)) as engines, orchestrated(engines) as bed:
        await until(lambda: all(engine.report.kv_tokens == 160 for engine in bed.orchestrator.engines.values()))
        answer = await bed.complete(PROMPT)
        assert answer.status == 400
        assert "260 tokens" in answer.json()["error"]["message"]
        assert "160" in answer.json()["error"]["message"]
        several = await bed.complete([1, 2, 3], n=8, max_tokens=50)
        assert several.status == 200
        missing = await bed.ask("POST", "/v1/completions", {"model": "nobody's", "prompt": [1]})
        assert missing.status == 404


async def test_what_a_client_claims_sends_nobody_to_another_engine() -> None:
    """A stream of some hundred tokens looked as if it filled its engine, and all others went to the engine without."""
    slow = replace(FAST, output_s=10.0, blocks_max=10_000)
    async with canned(2, slow) as engines, orchestrated(engines) as bed:
        await until(lambda: all(engine.report.kv_tokens for engine in bed.orchestrator.engines.values()))
        claimed = {"model": "canned", "prompt": [1], "stream": True, "max_tokens": 600, "best_of": 16_384}
        async with bed.http.post(f"{bed.url}/v1/completions", json=claimed) as answer:
            assert await answer.content.readany()
            found = await asyncio.gather(
                *(
                    bed.ask("POST", "/_orchestrator/route", {"model": "canned", "prompt": [at] * 64, "max_tokens": 4})
                    for at in range(32)
                )
            )
            assert {each.json()["engine"] for each in found} == {engine.url for engine in engines}


@pytest.mark.slow
async def test_two_hundred_at_once_all_get_their_own_answers() -> None:
    async with canned(3, replace(FAST, token_us=1.0)) as engines, orchestrated(engines) as bed:
        prompts = [[at, *range(1, 64)] for at in range(200)]
        answers = await asyncio.gather(*(bed.complete(prompt, stream=at % 2 == 0) for at, prompt in enumerate(prompts)))
        for at, answer in enumerate(answers):
            text = "".join(answer.words()) if at % 2 == 0 else answer.json()["choices"][0]["text"]
            assert text == "".join(words(prompts[at]))


async def test_the_models_are_told_while_answers_have_memory() -> None:
    """Thousands of clients that did not read took memory beside all budgets."""
    settings = replace(QUICK, cors_origins=("https://chat.example",))
    origin = {"Origin": "https://chat.example"}
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        await until(lambda: all(engine.models for engine in bed.orchestrator.engines.values()))
        answer = await bed.ask("GET", "/v1/models", headers=origin)
        assert [each["id"] for each in answer.json()["data"]] == ["canned"]
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        head = await bed.ask("HEAD", "/v1/models")
        assert (head.status, head.body) == (200, b"")
        answers = bed.orchestrator.answers
        assert answers.held_bytes == 0
        for at in range(24):  # each tenant may have half of what is left
            answers.take(str(at), (settings.bodies_bytes_max - answers.held_bytes) // 2)
        refused = await bed.ask("GET", "/v1/models")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")


async def test_metrics_count_what_was_done() -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        await bed.complete(PROMPT)
        text = (await bed.ask("GET", "/metrics")).body.decode()
        assert 'objectcache_orchestrator_requests_total{path="/v1/completions",status="200"} 1.0' in text
        assert "objectcache_orchestrator_ttft_seconds_count 1.0" in text
        assert 'objectcache_orchestrator_known_engines{state="up"} 1.0' in text


async def test_an_orchestrator_without_engines_serves_nothing() -> None:
    async with orchestrated([]) as bed:
        assert (await bed.ask("GET", "/health")).status == 503


async def test_requests_wait_for_an_engine_that_restarts_and_it_holds_nothing_then() -> None:
    """Probes go on every 2 s at most however long an ejection lasts; the new process was credited with the old one's
    blocks, and a client got 503 while the only engine had been back for seconds.
    """
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        engine = bed.orchestrator.engines[engines[0].url]
        assert (await bed.complete(PROMPT)).status == 200
        await until(lambda: bed.orchestrator.index.held_count(engine.name) > 0)
        port = int(engines[0].url.rsplit(":", 1)[1])
        await engines[0].stop()
        await until(lambda: engine.status().value != "up")
        for _ in range(3):  # each ejection is longer than the one before
            engine.failed("refused", is_certain=True)
        engine.liveness.ejected_until_s += 3600.0
        waiting = asyncio.create_task(bed.complete(PROMPT))
        await until(lambda: bed.orchestrator.index.held_count(engine.name) == 0)
        assert not waiting.done()
        again = CannedEngine(FAST)
        await again.start(port)
        try:
            answer = await waiting
            assert answer.status == 200
            request_id = answer.headers["x-objectcache-request-id"]
            receipt = (await bed.ask("GET", f"/_orchestrator/receipts/{request_id}")).json()
            assert receipt["predictions"][0]["held_tokens"] == 0
        finally:
            await again.stop()


async def test_without_any_engine_up_a_request_is_refused_at_its_deadline() -> None:
    settings = replace(QUICK, admission=AdmissionSettings(deadline_s=0.3))
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        engine = bed.orchestrator.engines[engines[0].url]
        await engines[0].stop()
        await until(lambda: engine.status().value != "up")
        answer = await bed.complete(PROMPT)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_goes_on_from_a_response_goes_to_the_engine_that_has_it(stream: bool) -> None:
    """Another engine answers 404: 30 of 30 second turns went wrong."""
    async with canned(3, FAST) as engines, orchestrated(engines) as bed:
        for number in range(12):
            first = {"model": "canned", "input": f"prompt {number}", "stream": stream}
            began = await bed.ask("POST", "/v1/responses", first)
            response = re.search(rb"resp_\w+", began.body)
            assert response is not None
            second = {**first, "input": "more", "previous_response_id": response[0].decode()}
            gone_on = await bed.ask("POST", "/v1/responses", second)
            assert (gone_on.status, gone_on.engine) == (200, began.engine)
        unknown = {"model": "canned", "input": "more", "previous_response_id": "resp_nobodys"}
        assert (await bed.ask("POST", "/v1/responses", unknown)).status == 404
        bed.orchestrator.engines[began.engine].liveness.drain(is_wanted=True)
        assert (await bed.ask("POST", "/v1/responses", second)).status == 503


async def test_a_tenant_goes_on_from_its_own_responses_only() -> None:
    """With another tenant's id it got an answer to what that one had said."""
    settings = replace(QUICK, tenants={"key-a": Tenant("a"), "key-b": Tenant("b")})
    async with canned(2, FAST) as engines, orchestrated(engines, settings) as bed:
        first = {"model": "canned", "input": "a secret"}
        keys = {who: {"Authorization": f"Bearer key-{who}"} for who in "ab"}
        began = await bed.ask("POST", "/v1/responses", first, headers=keys["a"])
        response = re.search(rb"resp_\w+", began.body)
        assert response is not None
        more = {**first, "input": "go on", "previous_response_id": response[0].decode()}
        said = [await bed.ask("POST", "/v1/responses", more, headers=keys[who]) for who in "ba"]
        assert [answer.status for answer in said] == [404, 200]
        assert all(engine.status().value == "up" for engine in bed.orchestrator.engines.values())


async def test_a_client_that_waits_for_leave_gets_it() -> None:
    """curl holds bodies of over a megabyte back, for a second where nobody answers."""
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        address = urlsplit(bed.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = json.dumps({"model": "canned", "prompt": PROMPT, "max_tokens": 1}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection() -> None:
    """A client that asked to keep its connection waited for the end until the connection had been idle for long."""
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        place = urlsplit(bed.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        body = json.dumps({"model": "canned", "prompt": PROMPT, "max_tokens": 4, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_a_large_answer_goes_on_as_it_comes_and_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole answers of 60 MiB were held here, for each request at once."""
    monkeypatch.setattr("objectcache.orchestrator.passing_on.WHOLE_BYTES_MAX", 100)
    async with canned(3, FAST) as engines, orchestrated(engines) as bed:
        answer = await bed.complete(PROMPT, max_tokens=100)
        assert answer.status == 200
        assert answer.json()["usage"]["completion_tokens"] == 100
        assert sum(len(engine.requests) for engine in engines) == 1


async def test_engines_say_nothing_to_clients_in_headers_of_ours() -> None:
    """An engine could name another one, or set cookies."""
    said = {"X-ObjectCache-Engine": "http://other", "Set-Cookie": "a=b", "Openai-Version": "1", "Retry-After": "3"}
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        engines[0].extra_headers = said
        for stream in (False, True):
            answer = await bed.complete(PROMPT, stream=stream)
            assert answer.engine == engines[0].url
            names = {name.lower() for name in answer.headers}
            assert "set-cookie" not in names
            assert {"openai-version", "retry-after"} <= names


@pytest.mark.parametrize("path", ["/v1/score", "/rerank", "/v1/messages", "/detokenize"])
async def test_endpoints_that_only_engines_know_go_on_to_one_that_serves_the_model(path: str) -> None:
    async with canned(2, FAST) as engines, orchestrated(engines) as bed:
        document = {"model": "canned", "query": "q", "documents": ["a", "b"]}
        answer = await bed.ask("POST", path, document)
        assert (answer.status, answer.json()) == (200, {"path": path, "said": document})
        assert answer.engine in {engine.url for engine in engines}
        assert (await bed.ask("POST", path, {**document, "model": "nobody's"})).status == 404
        assert (await bed.ask("GET", path)).status == 405


async def test_forms_go_on_as_they_came() -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        for model, wanted in (("canned", 200), ("nobody's", 404)):
            form = aiohttp.FormData()
            form.add_field("file", b"\0\xff" * 50_000, filename="speech.wav")
            form.add_field("model", model)
            answer = await bed.ask("POST", "/v1/audio/transcriptions", data=form)
            assert answer.status == wanted
        assert len(engines[0].forms) == 1
        assert b"\0\xff" * 50_000 in engines[0].forms[0]


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/sleep", "/shutdown", "/reset_prefix_cache", "/invocations"]
)
async def test_what_would_change_an_engine_goes_nowhere(path: str) -> None:
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        assert (await bed.ask("POST", path, {"model": "canned"})).status == 404
        assert (await bed.ask("HEAD", "/health")).status == 200


async def test_a_body_that_goes_on_in_pieces_says_its_length() -> None:
    """Engines, and what stands before them, may refuse bodies of unknown length."""
    async with canned(1, FAST) as engines, orchestrated(engines) as bed:
        answer = await bed.complete(PROMPT, user="u" * 300_000)
        assert answer.status == 200
        assert int(engines[0].headers[0]["Content-Length"]) > 300_000
        assert "Transfer-Encoding" not in engines[0].headers[0]
        assert len(engines[0].requests[0]["user"]) == 300_000


async def test_an_answer_is_not_kept_longer_than_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with other weights under the same name, and no engine at all, gave the answers of the ones before."""
    monkeypatch.setattr("objectcache.orchestrator.engine.MODELS_EVERY_S", 3600.0)  # they are asked for once
    settings = replace(QUICK, response_cache_bytes=1 << 20)
    async with canned(1, FAST) as engines, orchestrated(engines, settings) as bed:
        first = bed.orchestrator.engines[engines[0].url]
        await until(lambda: bool(first.models))
        for _ in range(2):
            answer = await bed.complete(PROMPT, temperature=0)
        assert answer.engine == "response cache"
        first.models = {"canned": {"id": "canned", "root": "other weights"}}
        assert (await bed.complete(PROMPT, temperature=0)).engine == engines[0].url
        await bed.orchestrator.fleet.remove(first.name)
        assert (await bed.complete(PROMPT, temperature=0)).status == 503
