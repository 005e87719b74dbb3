"""The orchestrator in front of real vLLM servers, over a store of ours: minutes, so `make test-engines`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.beds.kv_peers.work import S3Target
from bench.beds.vllm_servers import MODEL, VllmServer, make_model, vllm_servers
from bench.experiments.orchestrator.cost import await_engine, orchestrator_process
from orchestrator.tokens import LocalTokenizer
from tests.engines.environment import engine_python, engine_variables
from tests.support.requests import OWNER, s3_client
from tests.support.servers import CONFIG, started

pytestmark = [pytest.mark.engines_full, pytest.mark.timeout(900)]
BUCKET = "kv-cache"
LONG = [number % 900 + 10 for number in range(1024)]


@dataclass
class Bed:
    """Engines, their store, and an orchestrator in front of them."""

    url: str
    engines: list[VllmServer]
    target: S3Target

    def ask(self, path: str, document: Any = None) -> Any:
        """A request to the orchestrator; its answer as JSON."""
        return asyncio.run(self._ask(path, document))

    async def _ask(self, path: str, document: Any) -> Any:
        async with aiohttp.ClientSession() as http:
            method = "GET" if document is None else "POST"
            async with http.request(method, f"{self.url}{path}", json=document) as answer:
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
    folder = tmp_path_factory.mktemp("orchestrated")
    config = folder / "config.toml"
    config.write_text(CONFIG)
    model = folder / "model"
    make_model(model)
    with ExitStack() as stack:
        serve = ("serve", "--data", str(folder / "data"), "--port", "0", "--config", str(config))
        url, _ = stack.enter_context(started(*serve))
        s3_client(url, OWNER).create_bucket(Bucket=BUCKET)
        target = S3Target(url, *OWNER, BUCKET, "us-east-1")
        engines = stack.enter_context(vllm_servers(folder, model, 2, target, load="all"))
        environment = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
        urls = [engine.url for engine in engines]
        orchestrator, _ = stack.enter_context(
            orchestrator_process(urls, "--store", url, "--data", str(folder / "metadata"), environment=environment)
        )
        await_engine(orchestrator)
        yield Bed(orchestrator, engines, target)


def status_when(bed: Bed, name: str, wanted: Any) -> dict[str, Any]:
    """The state of both engines when each has what is wanted."""
    for _ in range(300):
        engines = bed.ask("/_orchestrator/status")["engines"]
        if all(wanted(each[name]) for each in engines):
            return {each["url"]: each for each in engines}
        time.sleep(0.1)
    raise AssertionError(f"{name}: {[each[name] for each in engines]}")


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
    engines = status_when(bed, "status", lambda status: status == "up")
    again = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": [*LONG, 5, 6, 7]})
    assert again["engine"] == first["engine_header"]
    held = {each["engine"]: each["held_tokens"] for each in again["candidates"]}
    assert held[first["engine_header"]] == len(LONG)
    assert engines[first["engine_header"]]["blocks"] >= len(LONG) // 32


def test_the_other_engine_has_the_prefix_from_the_store_and_the_decision_knows_it(bed: Bed) -> None:
    """The connector publishes its namespace, and follows the number of chunks that the decision had."""
    prompt = [number % 800 + 20 for number in range(512)]
    first = bed.complete(prompt)
    home = first["engine_header"]
    for _ in range(100):
        told = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": [*prompt, 9]})
        stored = {each["engine"]: each["stored_tokens"] for each in told["candidates"]}
        if stored[home] >= 480:
            break
        time.sleep(0.1)
    assert stored[home] >= 480
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


def test_salts_share_nothing(bed: Bed) -> None:
    prompt = [number % 700 + 30 for number in range(256)]
    home = bed.complete(prompt, cache_salt="one")["engine_header"]
    same = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": prompt, "cache_salt": "one"})
    held = {each["engine"]: each["held_tokens"] for each in same["candidates"]}
    assert held[home] >= 224
    for salt in ({"cache_salt": "two"}, {}):
        told = bed.ask("/_orchestrator/route", {"model": MODEL, "prompt": prompt, **salt})
        assert {each["held_tokens"] for each in told["candidates"]} == {0}


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
    ours = LocalTokenizer(model).tokens({"messages": messages})
    assert ours == theirs
    answer = bed.ask("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 2})
    told = bed.ask("/_orchestrator/route", {"model": MODEL, "messages": messages})
    assert told["prompt_tokens"] == len(theirs)
    assert told["engine"] == answer["engine_header"]
