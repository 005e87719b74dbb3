"""Starts the peers of a work; those that cannot run are named with the reason."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from bench.beds.kv_peers.install import LMCACHE, MOONCAKE
from bench.beds.kv_peers.work import Capability, Outcome, S3Target, Work, log_of
from bench.beds.processes import BaselineError, Child, failure_of, free_port, last_words, serving_program
from bench.core.lines import from_line, to_line
from descriptors.units import GIB, MIB
from objectcache.calibration.servers import s3_client

CHECK_TIMEOUT_S = 120.0
OWNER_START_TIMEOUT_S = 30.0
SEGMENT_SPARE_BYTES = 256 * MIB
HELD_BYTES_MAX = 2 * GIB
"""The largest payload of which a peer that keeps a copy of its own is given one."""
PUT_THREADS = 8


class PeerName(Enum):
    """Software that does the same work."""

    MOONCAKE_TCP = "mooncake_tcp"
    MOONCAKE_SHM = "mooncake_shm"
    LMCACHE_S3 = "lmcache_s3"
    NIXL_OBJ = "nixl_obj"
    NATIVE_RANGE_GETS = "native_range_gets"


MOONCAKES = (PeerName.MOONCAKE_TCP, PeerName.MOONCAKE_SHM)
S3_PEERS = (PeerName.LMCACHE_S3, PeerName.NIXL_OBJ, PeerName.NATIVE_RANGE_GETS)


@dataclass(frozen=True, slots=True)
class Program:
    """A peer's interpreter, what it must be able to import, and the module to run; whether it keeps the payload."""

    python: Path
    needs: str
    module: str
    holds_payload: bool


PROGRAMS: Mapping[PeerName, Program] = {
    PeerName.MOONCAKE_TCP: Program(MOONCAKE.python, "mooncake.store", "mooncake_reader", True),
    PeerName.MOONCAKE_SHM: Program(MOONCAKE.python, "mooncake.store", "mooncake_reader", True),
    PeerName.LMCACHE_S3: Program(
        LMCACHE.python, "lmcache.v1.storage_backend.connector.s3_connector", "lmcache_reader", True
    ),
    PeerName.NIXL_OBJ: Program(Path(sys.executable), "nixl_cu12._api", "nixl_obj_reader", False),
    PeerName.NATIVE_RANGE_GETS: Program(Path(sys.executable), "obstore", "range_gets_reader", False),
}


class PeerFailed(BaselineError):
    """A run of a peer failed or brought wrong bytes."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One configuration of a running peer. `run` raises PeerFailed."""

    capability: Capability
    run: Callable[[], Outcome]


@dataclass
class Peers:
    """What runs, and why the rest does not. They live as long as `stack`."""

    stack: ExitStack
    runs: list[PeerRun] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def start(
        self, names: Sequence[PeerName], work: Work, servers: Mapping[str, S3Target], folder: Path | None
    ) -> None:
        """Start these peers; those over S3 once for each of the servers, which hold the chunks, by name."""
        place = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-peers-", dir=folder)))
        owner: tuple[str, str] | None = None
        for name in names:
            try:
                if reason := _why_not(PROGRAMS[name], work):
                    raise BaselineError(reason)
                if name in MOONCAKES and owner is None:
                    owner = self.stack.enter_context(running_owner(MOONCAKE.folder / "bin", work.payload_bytes, place))
            except BaselineError as error:
                self.missing[name.value] = str(error)
                continue
            if name in MOONCAKES:
                assert owner is not None
                self._start(name, work, place, "", (name.value.removeprefix("mooncake_"), *owner))
                continue
            for server, target in servers.items():
                self._start(name, replace(work, s3=target), place, f"_via_{server}", ())

    def drop(self, run: PeerRun, reason: str) -> None:
        """A peer that failed is no longer asked."""
        self.runs = [each for each in self.runs if each is not run]
        self.missing[run.capability.name] = reason

    def _start(self, name: PeerName, work: Work, place: Path, suffix: str, arguments: Sequence[str]) -> None:
        program, file = PROGRAMS[name], place / f"{name.value}{suffix}.json"
        file.write_text(to_line(work))
        try:
            child = Child(f"bench.beds.kv_peers.{program.module}", file, *arguments, python=program.python)
        except BaselineError as error:
            self.missing[name.value + suffix] = last_words(log_of(file)) or str(error)
            return
        self.stack.callback(child.close)
        for capability in from_line(tuple[Capability, ...], child.ready):
            named = replace(capability, name=capability.name + suffix)
            self.runs.append(PeerRun(named, partial(_run, child, capability.name)))


def borrowed_mooncake(folder: Path) -> Path:
    """A folder in `folder` from which a process of another environment can import Mooncake's client, and nothing else.
    Raises BaselineError where it cannot be loaded.
    """
    if not MOONCAKE.is_installed:
        raise BaselineError("not installed: make peers")
    packages = next((MOONCAKE.folder / "lib").glob("python*/site-packages"))
    borrowed = folder / "mooncake"
    borrowed.mkdir()
    for found in (packages / "mooncake", *packages.glob("mooncake*.libs")):
        (borrowed / found.name).symlink_to(found)
    load = "import sys; sys.path.append(sys.argv[1]); import mooncake.store"
    problem = failure_of([sys.executable, "-c", load, str(borrowed)], CHECK_TIMEOUT_S)
    if problem is not None:
        raise BaselineError(problem)
    return borrowed


@contextmanager
def running_owner(programs: Path, payload_bytes: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Mooncake's master and the process that owns the memory, with room for the payload, on free ports of loopback;
    their addresses. Their logs go to `folder`. Raises BaselineError.
    """
    ports = [free_port() for _ in range(3)]
    master, owner, _ = (f"127.0.0.1:{port}" for port in ports)
    master_options: dict[str, object] = {
        "rpc_address": "127.0.0.1",
        "rpc_port": ports[0],
        "metrics_host": "127.0.0.1",
        "metrics_port": ports[2],
        "enable_metric_reporting": "false",
    }
    owner_options: dict[str, object] = {
        "host": "127.0.0.1",
        "port": ports[1],
        "master_server_address": master,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": f"{(payload_bytes * 5 // 4 + SEGMENT_SPARE_BYTES) // MIB} MB",
        "threads": 2,
    }
    with ExitStack() as stack:
        for name, options, port in (("master", master_options, ports[0]), ("client", owner_options, ports[1])):
            program, log = programs / f"mooncake_{name}", folder / f"mooncake_{name}.log"
            command = [str(program), *(f"--{option}={value}" for option, value in options.items())]
            stack.enter_context(serving_program(command, log, port, OWNER_START_TIMEOUT_S, folder))
        yield master, owner


def put_chunks(work: Work, target: S3Target) -> None:
    """Store the work's chunks in an S3 server. Raises BaselineError."""
    content = work.content()
    s3 = s3_client(target.url, target.access_key, target.secret_key, region=target.region, connections=PUT_THREADS)

    def put(index: int) -> None:
        s3.put_object(Bucket=target.bucket, Key=work.keys[index], Body=content.chunk(index).tobytes())

    try:
        with ThreadPoolExecutor(PUT_THREADS) as pool:
            list(pool.map(put, range(len(work.keys))))
    except (BotoCoreError, ClientError) as error:
        raise BaselineError(f"{target.url}: {error}") from error
    finally:
        s3.close()


def _run(child: Child, name: str) -> Outcome:
    try:
        child.tell(name)
        outcome = from_line(Outcome, child.answer())
    except BaselineError as error:
        raise PeerFailed(str(error)) from error
    if outcome.problem is not None:
        raise PeerFailed(outcome.problem)
    return outcome


def _why_not(program: Program, work: Work) -> str | None:
    """Why the peer cannot do this work; None where it can import what it needs."""
    if program.holds_payload and work.payload_bytes > HELD_BYTES_MAX:
        return f"keeps the payload in memory of its own: run for up to {HELD_BYTES_MAX // GIB} GiB only"
    if not program.python.exists():
        return "not installed: python -m bench.beds.kv_peers.install"
    return failure_of([str(program.python), "-c", f"import {program.needs}"], CHECK_TIMEOUT_S)
