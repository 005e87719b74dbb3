"""A model, a server of ours, and one engine for each way, side by side, each in a process of its own; and LMCache's own
server, which engines on CPUs need: the process inside the engine knows no transfer without a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.beds.kv_peers.install import ENGINES
from bench.beds.kv_peers.work import S3Target
from bench.beds.ours import target_of
from bench.beds.processes import BaselineError, Child, await_ready, failure_of, free_port, last_words, running_program
from bench.core.lines import from_line, to_line
from bench.core.show import Json
from bench.experiments.engine.ways import (
    BLOCK_TOKENS,
    EXAMPLES,
    LMCACHE_CHUNK_TOKENS,
    LMCACHES,
    Answer,
    Case,
    Command,
    EngineSettings,
    EngineWork,
    Prompts,
    Way,
    engine_options,
    transfer_config,
)
from descriptors.units import GIB
from objectcache.calibration.origin import python_path
from objectcache.calibration.servers import LocalServer, running_server

START_TIMEOUT_S = 120.0
QUIET_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 10.0
POLL_S = 0.05
WRITES = (
    ("store_controllers", "pending_keys_count"),
    ("store_controllers", "in_flight_task_count"),
    ("l1_managers", "write_locked_count"),
    ("l1_managers", "staging_object_count"),
)
"""Counts of its status that say what it has still to write."""
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class LmcacheServer:
    """A running one. `port` is for engines. Every method raises BaselineError where it does not answer."""

    port: int
    http_port: int

    def await_quiet(self) -> None:
        """Return when it stores and fetches nothing."""
        self._await_no(self._work)

    def forget(self) -> None:
        """Drop what it keeps in its own memory, so that the next load comes from S3."""
        self._await_no(self._chunks)

    def _await_no(self, left: Callable[[], str]) -> None:
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        while found := left():
            if time.monotonic() > deadline_s:
                raise BaselineError(f"LMCache still has {found} after {QUIET_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _work(self) -> str:
        storage = self._call("GET", "/status")["storage_manager"]
        stores = sum(each[count] for of, count in WRITES for each in storage[of].values())
        fetches = storage["prefetch_controller"]["in_flight_request_count"]
        return f"{stores} stores and {fetches} fetches" if stores or fetches else ""

    def _chunks(self) -> str:
        self._call("POST", "/cache/clear")
        managers = self._call("GET", "/status")["storage_manager"]["l1_managers"].values()
        count = sum(manager["total_object_count"] for manager in managers)
        return f"{count} chunks in its memory" if count else ""

    def _call(self, method: str, path: str) -> dict[str, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", method=method)
        try:
            with _NO_PROXY.open(request, timeout=CALL_TIMEOUT_S) as answer:
                parsed: dict[str, Any] = json.load(answer)
                return parsed
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise BaselineError(f"LMCache does not answer: {error}") from error


@contextmanager
def running_lmcache(python: Path, log: Path, memory_bytes: int, s3: S3Target | None) -> Iterator[LmcacheServer]:
    """Serve with so much memory of its own, over S3 where given. Raises BaselineError where it does not start."""
    server = LmcacheServer(free_port(), free_port())
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    options = {
        "host": "127.0.0.1",
        "port": server.port,
        "http-host": "127.0.0.1",
        "http-port": server.http_port,
        "chunk-size": LMCACHE_CHUNK_TOKENS,
        "l1-size-gb": memory_bytes / GIB,
        "shm-name": f"objectcache-bench-{server.port}",
        "supported-transfer-mode": "auto",
        "eviction-policy": "LRU",
    }
    if s3 is not None:
        environment |= s3.proxy()
        adapter = {
            "type": "s3",
            "s3_endpoint": f"s3://{s3.address}",
            "s3_region": s3.region,
            "s3_prefer_http2": False,
            "disable_tls": True,
            "aws_access_key_id": s3.access_key,
            "aws_secret_access_key": s3.secret_key,
        }
        options["l2-adapter"] = json.dumps(adapter)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [str(python), "-m", "lmcache.cli.main", "server", *words, "--disable-observability"]

    def is_quiet() -> bool:
        with contextlib.suppress(BaselineError):
            server.await_quiet()
            return True
        return False

    with running_program(command, log, number=signal.SIGINT, environment=environment) as process:
        try:
            await_ready(process, is_quiet, "LMCache's server", START_TIMEOUT_S)
        except BaselineError as error:
            raise BaselineError(f"{error}: {last_words(log) or 'it says nothing'}") from error
        yield server


PYTHON_VARIABLE = "OBJECTCACHE_ENGINES_PYTHON"
CHECK_TIMEOUT_S = 120.0
MODEL_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 900.0
STARTING_MAX = 2
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Steps of such an engine leave other cores to loads, as those of a GPU do."""
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
                s3 = target_of(server, way.bucket)
                log, memory_bytes = self.place / f"{way.value}-server.log", LMCACHE_COPIES * self.settings.payload_bytes
                running = running_lmcache(engines_python(), log, memory_bytes, s3 if way is Way.LMCACHE_S3 else None)
                self.lmcaches[way] = self.stack.enter_context(running)
            self.engines[way] = self.start_engine(way, way.value, ONE_THREAD if self.settings.beside else {})
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
        work = EngineWork(
            way, llm, prompts, settings.chunk_tokens, BLOCK_TOKENS * settings.shape.token_bytes, settings.overlaps(way)
        )
        file = self.place / f"{name}.json"
        file.write_text(to_line(work))
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(settings.tier)),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the bench asks a worker for its threads
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
