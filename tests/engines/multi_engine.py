"""vLLM engines that talk to each other or have several workers: processes of their own, several alive at a time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.engine import EngineError
from tests.engines.environment import engine_python, engine_variables
from tests.engines.messages import Json, Prompt
from tests.engines.multi_child import ANSWER
from tests.support.tree import repository

ANSWER_S = 200.0
END_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of each prompt, and what the prefill side's other connector wants the decode side to be told."""

    tokens: list[list[int]]
    transfer: list[dict[str, Json] | None]


@dataclass(frozen=True, slots=True)
class Launch:
    """An engine to be: the model, arguments of `vllm.LLM` and variables of its process beyond the usual."""

    model: Path
    arguments: Mapping[str, Json] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


class LiveEngine:
    """One engine's process. Every call has a deadline."""

    def __init__(self, launch: Launch) -> None:
        self._process = subprocess.Popen(
            [str(engine_python()), "-m", "tests.engines.multi_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=repository(),
            env={**engine_variables(), **launch.variables},
            start_new_session=True,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._write({"model": str(launch.model), **launch.arguments})

    @property
    def log(self) -> str:
        """All it has said so far."""
        return "".join(self._lines)

    def await_started(self) -> None:
        """Return when it takes requests. Raises EngineError when it does not start."""
        self._answer()

    def generate(self, prompts: Sequence[Prompt], output_tokens: int = 24, **work: Json) -> Outcome:
        """Greedy tokens of these prompts, one after the other. `work`: `lora` (name, id, path), `transfer`."""
        texts = [prompt.to_json() for prompt in prompts]
        return Outcome(**self.ask("generate", prompts=texts, max_tokens=output_tokens, **work))

    def ask(self, name: str, **work: Json) -> Any:
        """Any command of the child's."""
        self._write({"do": name, **work})
        return self._answer()

    def count(self, name: str, chunks: int = 0) -> int:
        """A counter of the connector's, once `chunks` chunks have been written or found stored."""
        return int(self.ask("settle", chunks=chunks).get(name, 0))

    def held_blocks(self) -> int:
        """Blocks that do not come back although there is no request."""
        return int(self.ask("held_blocks"))

    def end(self) -> None:
        """Shut it down, as its owner would. Raises EngineError when it does not end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise EngineError(f"the engine does not end:\n{self.log[-4000:]}") from None

    def kill(self) -> None:
        """End it and its workers at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._reader.join(60)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _write(self, value: Mapping[str, Json]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(self.log[-6000:]) from None

    def _answer(self) -> Any:
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise EngineError(f"the engine hangs:\n{self.log[-6000:]}") from None
        if line is None:
            raise EngineError(f"the engine is gone:\n{self.log[-6000:]}")
        return json.loads(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace")
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
            else:
                self._lines.append(line)
        self._answers.put(None)


@contextmanager
def live_engines(*launches: Launch) -> Iterator[list[LiveEngine]]:
    """Engines, started together; shut down at the end, and killed when the block fails."""
    made: list[LiveEngine] = []
    try:
        for launch in launches:
            made.append(LiveEngine(launch))
        for engine in made:
            engine.await_started()
        yield made
        for engine in made:
            engine.end()
    finally:
        for engine in made:
            engine.kill()


def object_cache(extra: Mapping[str, Json], role: str = "kv_both") -> dict[str, Json]:
    """`kv_transfer_config` of an engine that recomputes what it cannot load."""
    return {
        "kv_connector": "ObjectCacheConnector",
        "kv_connector_module_path": "nixl_client.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


def several(*connectors: dict[str, Json]) -> dict[str, Json]:
    """`kv_transfer_config` of connectors that are asked in this order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }
