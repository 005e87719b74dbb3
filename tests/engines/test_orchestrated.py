"""The orchestrator in front of real vLLM servers, over a store of ours: minutes, so `make test-engines`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from bench.beds.kv_peers.work import S3Target
from bench.beds.orchestrators import ADMIN, await_engine, orchestrator_process
from bench.beds.vllm_servers import MODEL, VllmServer, make_model, vllm_servers
from objectcache.orchestrator.tokenizer import LocalTokenizer, TokenizerFiles
from tests.engines.environment import engine_python, engine_variables
from tests.engines.multi_models import RANK, make_adapter
from tests.support.requests import OWNER, s3_client
from tests.support.servers import CONFIG, started
from tests.support.waiting import eventually

pytestmark = [pytest.mark.engines_full, pytest.mark.timeout(900)]
BUCKET = "kv-cache"
LONG = [number % 900 + 10 for number in range(1024)]


@dataclass
class Bed:
    """Engines, their store, and an orchestrator in front of them."""

    url: str
    engines: list[VllmServer]
    target: S3Target
    kill_store: Callable[[], None]
    start_store: Callable[[], None]

    def ask(self, path: str, document: Any = None) -> Any:
        """A request to the orchestrator; its answer as JSON."""
        return asyncio.run(self._ask(path, document))

    async def _ask(self, path: str, document: Any) -> Any:
        async with aiohttp.ClientSession() as http:
            method = "GET" if document is None else "POST"
            headers = ADMIN if path.startswith("/_orchestrator") else {}
            async with http.request(method, f"{self.url}{path}", json=document, headers=headers) as answer:
                return {**await answer.json(), "engine_header": answer.headers.get("x-objectcache-engine")}

    def complete(self, prompt: Any, **options: Any) -> Any:
        """A completion."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
        return self.ask("/v1/completions", body)

    def engine(self, url: str) -> VllmServer:
        """The engine of an address."""
        return next(engine for engine in self.engines if engine.url == url)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with running(tmp_path_factory.mktemp("orchestrated"), 2) as made:
        yield made


@contextmanager
def running(folder: Path, engine_count: int, *engine_options: str, has_tier: bool = False) -> Iterator[Bed]:
    """A store, engines and an orchestrator, which end with the block. Engines have our connector or our tier."""
    config = folder / "config.toml"
    config.write_text(CONFIG)
    model = folder / "model"
    make_model(model)
    with ExitStack() as stack:
        serve = ("serve", "--data", str(folder / "data"), "--config", str(config), "--port")
        url, store = stack.enter_context(started(*serve, "0"))
        stores = [store]

        def kill_store() -> None:
            stores[-1].kill()
            stores[-1].wait()

        def start_store() -> None:
            """At the address that everybody knows."""
            _, again = stack.enter_context(started(*serve, str(urlsplit(url).port)))
            stores.append(again)

        s3_client(url, OWNER).create_bucket(Bucket=BUCKET)
        target = S3Target(url, *OWNER, BUCKET, "us-east-1")
        extra = {} if has_tier else {"load": "all"}
        running = vllm_servers(folder, model, engine_count, target, *engine_options, extra=extra, has_tier=has_tier)
        engines = stack.enter_context(running)
        environment = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
        urls = [engine.url for engine in engines]
        orchestrator, _ = stack.enter_context(
            orchestrator_process(urls, "--store", url, "--data", str(folder / "metadata"), environment=environment)
        )
        await_engine(orchestrator)
        yield Bed(orchestrator, engines, target, kill_store, start_store)


def status_when(bed: Bed, name: str, wanted: Any) -> dict[str, Any]:
    """The state of both engines when each has what is wanted."""
    engines: list[dict[str, Any]] = []

    def are_so() -> bool:
        engines[:] = bed.ask("/_orchestrator/status")["engines"]
        return all(wanted(each[name]) for each in engines)

    assert eventually(are_so), f"{name}: {[each[name] for each in engines]}"
    return {each["url"]: each for each in engines}


def test_openais_client_sees_one_server(bed: Bed) -> None:
    """Streams and not, tools, logprobs, several answers, stops, a stream that is left, errors, many at once."""
    done = subprocess.run(
        [str(engine_python()), "-m", "tests.engines.openai_child", bed.url],
        env=engine_variables(), capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["models"] == [MODEL]
    assert seen["streamed"] == seen["chat"]
    assert seen["usage"] == 8
    assert seen["logprobs"] == 3
    assert seen["n"] == [0, 1, 2]
    assert (seen["no such model"], seen["wrong"]) == ("NotFoundError", "BadRequestError")
    assert seen["too long"] == "BadRequestError"
    assert seen["same"]


def test_events_are_found_and_say_what_engines_hold(bed: Bed) -> None:
    status_when(bed, "events", bool)
    first = bed.complete(LONG)
    again: dict[str, Any] = {}

    def is_held() -> bool:
        again.update(bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": [*LONG, 5, 6, 7]}))
        held = {each["engine"]: each["held_tokens"] for each in again["candidates"]}
        return held.get(first["engine_header"]) == len(LONG)

    assert eventually(is_held), again  # events come behind the answer
    assert again["engine"] == first["engine_header"]
    engines = status_when(bed, "status", lambda status: status == "up")
    assert engines[first["engine_header"]]["blocks"] >= len(LONG) // 32


def test_the_other_engine_has_the_prefix_from_the_store_and_the_decision_knows_it(bed: Bed) -> None:
    """The connector publishes its namespace, and follows the number of chunks that the decision had."""
    prompt = [number % 800 + 20 for number in range(512)]
    first = bed.complete(prompt)
    home = first["engine_header"]

    def stored_tokens() -> int:
        told = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": [*prompt, 9]})
        return int({each["engine"]: each["stored_tokens"] for each in told["candidates"]}[home])

    assert eventually(lambda: stored_tokens() >= 480)
    bed.ask(f"/_orchestrator/engines/{home}/drain", {})
    try:
        other = bed.complete([*prompt, 9])
        assert other["engine_header"] != home
        direct = bed.engine(home).post(
            "/v1/completions", {"model": MODEL, "prompt": [*prompt, 9], "max_tokens": 4, "temperature": 0}
        )
        assert other["choices"][0]["text"] == direct["choices"][0]["text"]
    finally:
        bed.ask(f"/_orchestrator/engines/{home}/undrain", {})


def test_a_tiers_objects_are_found_for_every_engine(tmp_path: Path) -> None:
    """By vLLM's own hashes, those of a tenant for that tenant alone."""
    prompt = [number % 750 + 25 for number in range(512)]
    with running(tmp_path, 2, has_tier=True) as bed:
        for salt in ({}, {"cache_salt": "one"}):
            bed.complete(prompt, **salt)

        def stored(**salt: str) -> dict[str, int]:
            told = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": [*prompt, 9], **salt})
            return {each["engine"]: each["stored_tokens"] for each in told["candidates"]}

        for engine in bed.engines:  # each publishes after its first step
            engine.post("/v1/completions", {"model": MODEL, "prompt": [5, 6], "max_tokens": 1})
        for salt in ({}, {"cache_salt": "one"}):
            assert eventually(lambda salt=salt: min(stored(**salt).values()) >= 480), stored(**salt)
        assert set(stored(cache_salt="two").values()) == {0}


def test_salts_share_nothing(bed: Bed) -> None:
    prompt = [number % 700 + 30 for number in range(256)]
    home = bed.complete(prompt, cache_salt="one")["engine_header"]
    same = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": prompt, "cache_salt": "one"})
    held = {each["engine"]: each["held_tokens"] for each in same["candidates"]}
    assert held[home] >= 224
    for salt in ({"cache_salt": "two"}, {}):
        told = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": prompt, **salt})
        assert {each["held_tokens"] for each in told["candidates"]} == {0}


def test_three_engines_and_adapters_that_share_nothing(tmp_path: Path) -> None:
    """An adapter is a model of its own: its blocks are found for it alone, and its answers are those of an engine that
    has none of its blocks.
    """
    adapters = {"one": tmp_path / "one", "two": tmp_path / "two"}
    for seed, folder in enumerate(adapters.values(), 1):
        make_adapter(folder, seed)
    modules = [f"{name}={folder}" for name, folder in adapters.items()]
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-modules", *modules)
    with running(tmp_path, 3, *options) as lora:
        status_when(lora, "events", bool)
        prompt = [number % 650 + 35 for number in range(512)]
        texts = {}
        for model in ("one", "two", MODEL):
            told = lora.ask("/_orchestrator/route", {"model": model, "prompt": prompt})
            assert {each["held_tokens"] for each in told["candidates"]} == {0}
            first = lora.complete(prompt, model=model)
            texts[model] = first["choices"][0]["text"]
            home = first["engine_header"]

            def held(model: str = model, home: str = home) -> bool:
                """By its engine alone."""
                again = lora.ask("/_orchestrator/route", {"model": model, "prompt": [*prompt, 7]})
                tokens = {each["engine"]: each["held_tokens"] for each in again["candidates"]}
                return tokens.pop(home) >= 480 and not any(tokens.values())

            assert eventually(held)
            other = next(engine for engine in lora.engines if engine.url != home)
            body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
            assert other.post("/v1/completions", body)["choices"][0]["text"] == texts[model]
        assert len(set(texts.values())) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_costs_a_retry_and_comes_back(bed: Bed, number: int) -> None:
    prompt = [at % 600 + 40 + int(number) for at in range(256)]
    home = bed.complete(prompt)["engine_header"]
    victim = bed.engine(home)
    if number == signal.SIGKILL:
        victim.kill()
    else:
        os.killpg(victim.process.pid, signal.SIGSTOP)
    try:
        answers = [bed.complete([*prompt, at]) for at in range(3)]
        assert {answer["engine_header"] for answer in answers}.isdisjoint({home})
        assert all(answer["choices"][0]["finish_reason"] for answer in answers)
    finally:
        if number == signal.SIGKILL:
            victim.start_again()
        else:
            os.killpg(victim.process.pid, signal.SIGCONT)
    status_when(bed, "status", lambda status: status == "up")


def test_a_chat_is_routed_by_the_engines_own_tokens(bed: Bed, tmp_path: Path) -> None:
    """And the local tokenizer files give the same ones."""
    messages = [{"role": "system", "content": "word " * 200}, {"role": "user", "content": "hello"}]
    engine = bed.engines[0]
    theirs = engine.post("/tokenize", {"model": MODEL, "messages": messages})["tokens"]
    model = Path(engine.command[engine.command.index("--model") + 1])
    ours = LocalTokenizer(TokenizerFiles.read(model)).tokens({"messages": messages})
    assert ours == theirs
    answer = bed.ask("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 2})
    told = bed.ask("/_orchestrator/route", {"model": MODEL, "messages": messages})
    assert told["prompt_tokens"] == len(theirs)
    assert told["engine"] == answer["engine_header"]


async def streamed(
    url: str, prompt: list[int], tokens: int, on_third: Callable[[], None]
) -> tuple[list[str], str, int]:
    """The pieces of a stream, how it ended, and the tokens that the engine says it has made: a piece has several where
    the machine is busy. `on_third` is called when three pieces have come.
    """
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    made = 0
    try:
        async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    return pieces, "done", made
                document = json.loads(line.removeprefix(b"data: "))
                if "error" in document:
                    return pieces, "error", made
                made = (document.get("usage") or {}).get("completion_tokens", made)
                pieces += [choice["text"] for choice in document["choices"]]
                if len(pieces) == 3:
                    await asyncio.to_thread(on_third)
    except (aiohttp.ClientError, ConnectionError):
        return pieces, "broken", made
    return pieces, "cut", made


def test_streams_go_on_when_the_store_dies_and_its_chunks_are_found_again(bed: Bed) -> None:
    """Meanwhile requests are computed, and decisions count on nothing that is stored."""
    prompt = [at % 500 + 50 for at in range(512)]
    first = bed.complete(prompt)["choices"][0]["text"]
    home = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": [*prompt, 1]})["engine"]

    def stored() -> dict[str, int]:
        told = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": [*prompt, 1]})
        return {each["engine"]: each["stored_tokens"] for each in told["candidates"]}

    assert eventually(lambda: stored()[home] >= 480)
    pieces, end, made = asyncio.run(streamed(bed.url, prompt, 64, bed.kill_store))
    try:
        assert (end, made) == ("done", 64)
        assert "".join(pieces).startswith(first)
        for engine in bed.engines:
            engine.forget()
        again = bed.complete([*prompt, 2])
        assert again["choices"][0]["finish_reason"] == "length"
        assert eventually(lambda: set(stored().values()) == {0})
    finally:
        bed.start_store()
    assert eventually(lambda: stored()[home] >= 480)


def test_an_orchestrator_that_is_killed_in_a_stream_comes_back_with_a_warm_index(bed: Bed, tmp_path: Path) -> None:
    """Its client sees the connection break, engines stop the request, and events that came meanwhile are replayed."""
    environment = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    options = ("--store", bed.target.url, "--data", str(tmp_path / "metadata"))
    prompt = [at % 400 + 60 for at in range(512)]
    urls = [engine.url for engine in bed.engines]

    def held(url: str, tokens: list[int]) -> int:
        """The tokens that an engine is known to hold."""
        asked = asyncio.run(posted(f"{url}/_orchestrator/route", {"model": MODEL, "prompt": [*tokens, 3]}))
        return max(each["held_tokens"] for each in asked["candidates"])

    with orchestrator_process(urls, *options, environment=environment) as (url, pid):
        await_engine(url)
        assert eventually(lambda: all(engine["events"] for engine in engines_of(url)))
        tokens = 2000  # seconds of it: a whole short stream could lie in a socket when the client comes to read
        pieces, end, _ = asyncio.run(streamed(url, prompt, tokens, lambda: os.kill(pid, signal.SIGKILL)))
        assert end in {"broken", "cut"}
        assert 3 <= len(pieces) < tokens
    assert eventually(lambda: sum(map(running_count, bed.engines)) == 0)
    meanwhile = [at % 300 + 70 for at in range(256)]
    bed.engines[0].post("/v1/completions", {"model": MODEL, "prompt": meanwhile, "max_tokens": 1})
    with orchestrator_process(urls, *options, environment=environment) as (url, _):
        await_engine(url)
        assert eventually(lambda: held(url, prompt) >= 480)
        assert eventually(lambda: held(url, meanwhile) >= 224)


def engines_of(url: str) -> list[dict[str, Any]]:
    """The engines, as an orchestrator knows them."""

    async def ask() -> Any:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/_orchestrator/status", headers=ADMIN) as answer:
            return await answer.json()

    found: list[dict[str, Any]] = asyncio.run(ask())["engines"]
    return found


async def posted(url: str, document: Any) -> Any:
    async with aiohttp.ClientSession() as http, http.post(url, json=document, headers=ADMIN) as answer:
        return await answer.json()


def running_count(engine: VllmServer) -> float:
    """The requests that an engine works on."""
    lines = engine.get("/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running{"))
