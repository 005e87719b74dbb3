"""Starts the peers of a work; those that cannot run are named with the reason."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from bench.child import BaselineError, Child
from bench.kv_peers.install import LMCACHE, MOONCAKE
from bench.kv_peers.mooncake_owner import running_owner
from bench.kv_peers.serving import log_of
from bench.kv_peers.work import Capability, Outcome, S3Target, Work, capabilities_from_line
from descriptors.units import GIB

CHECK_TIMEOUT_S = 120.0
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


class PeerFailed(Exception):
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
        able = [name for name in names if self._can_run(name, work)]
        owner: Sequence[str] = ()
        if any(name in MOONCAKES for name in able):
            try:
                addresses = self.stack.enter_context(running_owner(MOONCAKE.folder / "bin", work.payload_bytes, place))
                owner = (addresses.master, addresses.owner)
            except BaselineError as error:
                self.missing.update({name.value: str(error) for name in able if name in MOONCAKES})
                able = [name for name in able if name not in MOONCAKES]
        for name in able:
            if name in MOONCAKES:
                way = name.value.removeprefix("mooncake_")
                self._start(name, work, place / f"{name.value}.json", "", (way, *owner))
                continue
            for server, target in servers.items():
                file = place / f"{name.value}-{server}.json"
                self._start(name, replace(work, s3=target), file, f"_via_{server}", ())

    def drop(self, run: PeerRun, reason: str) -> None:
        """A peer that failed is no longer asked."""
        self.runs = [each for each in self.runs if each is not run]
        self.missing[run.capability.name] = reason

    def _can_run(self, name: PeerName, work: Work) -> bool:
        program = PROGRAMS[name]
        reason = _why_not(program)
        if program.holds_payload and work.payload_bytes > HELD_BYTES_MAX:
            reason = f"keeps the payload in memory of its own: run for up to {HELD_BYTES_MAX // GIB} GiB only"
        if reason is not None:
            self.missing[name.value] = reason
        return reason is None

    def _start(self, name: PeerName, work: Work, file: Path, suffix: str, arguments: Sequence[str]) -> None:
        program = PROGRAMS[name]
        file.write_text(work.to_json())
        try:
            child = Child(f"bench.kv_peers.{program.module}", file, *arguments, python=program.python)
        except BaselineError as error:
            said = log_of(file).read_text(errors="replace").strip() if log_of(file).exists() else ""
            self.missing[name.value + suffix] = (said or str(error)).splitlines()[-1]
            return
        self.stack.callback(child.close)
        for capability in capabilities_from_line(child.ready):
            told = capability.name
            named = replace(capability, name=capability.name + suffix)
            self.runs.append(PeerRun(named, lambda child=child, told=told: _run(child, told)))  # type: ignore[misc]


def put_chunks(work: Work, target: S3Target) -> None:
    """Store the work's chunks in an S3 server. Raises BaselineError."""
    content = work.content()
    config = Config(
        s3={"addressing_style": "path"}, signature_version="s3v4", proxies={}, max_pool_connections=PUT_THREADS
    )
    s3 = boto3.client(
        "s3",
        endpoint_url=target.url,
        region_name=target.region,
        aws_access_key_id=target.access_key,
        aws_secret_access_key=target.secret_key,
        config=config,
    )

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
        outcome = Outcome.from_line(child.answer())
    except BaselineError as error:
        raise PeerFailed(str(error)) from error
    if outcome.problem is not None:
        raise PeerFailed(outcome.problem)
    return outcome


def _why_not(program: Program) -> str | None:
    """Why the interpreter cannot import what the peer needs; None where it can."""
    if not program.python.exists():
        return "not installed: python -m bench.kv_peers.install"
    command = [str(program.python), "-c", f"import {program.needs}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"import {program.needs} took more than {CHECK_TIMEOUT_S:.0f} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
