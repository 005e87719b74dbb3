"""What `bench s3` puts its load on: our server, Ceph RGW, moto, and the two cheapest senders there can be."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from bench.child import Child
from bench.jobs import BUCKET, REGION, Target
from bench.server import ROOT, BenchServerError, running_server

START_TIMEOUT_S = 60.0
CEPH_START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
CEPH_PROGRAMS = ("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "curl")
CEPH_SCRIPT = Path(__file__).resolve().parent / "ceph_one_node.sh"
CEPH_DATA_PATH = ("client.rgw.a", "osd.0")
"""The daemons whose processor time counts."""
CEPH_OSD_GIB = 32


class PeerName(Enum):
    """CANNED answers GETs with bytes from memory and stores nothing; RAW_SOCKET does so without HTTP."""

    OURS = "ours"
    RGW = "rgw"
    MOTO = "moto"
    CANNED = "canned"
    RAW_SOCKET = "raw_socket"


class PeerUnavailable(Exception):
    """A peer cannot run here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that is running. `processes` gives the processes that work for it; `give_back` frees the space of
    deleted objects where that takes an order.
    """

    name: PeerName
    target: Target
    durability: str
    version: str
    processes: Callable[[], Sequence[int]]
    give_back: Callable[[], None]

    @property
    def stores(self) -> bool:
        """Whether what is put can be read, listed and deleted."""
        return self.name not in (PeerName.CANNED, PeerName.RAW_SOCKET)


@contextmanager
def running_ours(folder: Path | None, options: Sequence[str]) -> Iterator[Peer]:
    """Our server with these options of `serve`. Raises BenchServerError."""
    with running_server(folder, options) as server:
        target = Target(server.url, server.access_key, server.secret_key)
        durability = "its default: bytes and index synced before the answer"
        if options:
            durability = f"serve {' '.join(options)}; otherwise {durability}"
        yield Peer(PeerName.OURS, target, durability, "this tree", lambda: [server.pid], _nothing)


@contextmanager
def running_rgw(folder: Path | None) -> Iterator[Peer]:
    """One-node Ceph in a folder of its own. Raises PeerUnavailable."""
    missing = [program for program in CEPH_PROGRAMS if shutil.which(program) is None]
    if missing:
        raise PeerUnavailable(f"{', '.join(missing)} not installed (Debian: ceph-mon ceph-mgr ceph-osd radosgw)")
    if os.geteuid() != 0:
        raise PeerUnavailable("Ceph's daemons need root")
    with tempfile.TemporaryDirectory(prefix="objectcache-bench-ceph-", dir=folder, ignore_cleanup_errors=True) as place:
        environment = {**os.environ, "MON_PORT": str(_free_port()), "OSD_GIB": str(CEPH_OSD_GIB)}
        keys = ("ceph-access", "ceph-secret-key")
        start = ["bash", str(CEPH_SCRIPT), "start", place, str(_free_port()), *keys]
        try:
            log = Path(place, "start.log")
            with log.open("wb") as errors:
                started = subprocess.run(
                    start,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    timeout=CEPH_START_TIMEOUT_S,
                    check=False,
                )
            if started.returncode != 0:
                raise PeerUnavailable(f"ceph_one_node.sh: {_last_line(log)}")
            url = started.stdout.decode().split()[-3]
            config = {**os.environ, "CEPH_CONF": f"{place}/ceph.conf"}

            def give_back() -> None:
                collect = ["radosgw-admin", "gc", "process", "--include-all"]
                subprocess.run(collect, env=config, capture_output=True, timeout=START_TIMEOUT_S, check=False)

            peer = Peer(
                PeerName.RGW,
                Target(url, *keys),
                "one OSD, one replica, bluestore in a file: committed to its log (synced) before the answer",
                _version(["radosgw", "--version"]),
                lambda: [int(Path(place, "run", f"{name}.pid").read_text()) for name in CEPH_DATA_PATH],
                give_back,
            )
            _make_bucket(peer.target)
            yield peer
        except subprocess.TimeoutExpired as error:
            raise PeerUnavailable(f"Ceph did not start within {error.timeout:.0f} s") from error
        finally:
            subprocess.run(["bash", str(CEPH_SCRIPT), "stop", place], timeout=STOP_TIMEOUT_S, check=False)


@contextmanager
def running_moto(python: str, folder: Path | None) -> Iterator[Peer]:
    """moto's server, from the environment of that interpreter. Raises PeerUnavailable."""
    version = _version([python, "-c", "import moto.server, moto; print('moto', moto.__version__)"])
    if not version.startswith("moto "):
        raise PeerUnavailable(f"{python} has no moto.server (pip install 'moto[server]')")
    port = _free_port()
    command = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile(dir=folder) as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            target = Target(f"http://127.0.0.1:{port}", "moto-access", "moto-secret-key")
            _wait_for_http(target.url, process)
            _make_bucket(target)
            yield Peer(
                PeerName.MOTO,
                target,
                "memory only, nothing synced; signatures unchecked",
                version,
                lambda: [process.pid],
                _nothing,
            )
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running_canned(seed: int, nbytes_max: int, list_keys: int) -> Iterator[Peer]:
    """The cheapest HTTP server. Raises BaselineError."""
    child = Child("bench.canned", seed, nbytes_max, list_keys)
    try:
        yield _cheapest(PeerName.CANNED, "http", child)
    finally:
        child.close()


@contextmanager
def running_raw_socket(seed: int, nbytes_max: int) -> Iterator[Peer]:
    """The raw sender. Raises BaselineError."""
    child = Child("bench.senders", "objects", seed, nbytes_max)
    try:
        yield _cheapest(PeerName.RAW_SOCKET, "tcp", child)
    finally:
        child.close()


def serve_options(workers: int | None, extra: Sequence[str]) -> list[str]:
    """Options of `objectcache serve`: as many workers as wanted, if it knows the option. Raises BenchServerError."""
    command = [sys.executable, "-m", "objectcache.cli", "serve", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if said.returncode != 0:
        raise BenchServerError(f"objectcache serve --help failed: {said.stderr.strip().splitlines()[-1:]}")
    if "--workers" not in said.stdout or "--workers" in extra:
        return list(extra)
    return ["--workers", str(workers or len(os.sched_getaffinity(0))), *extra]


def cpu_seconds(pids: Sequence[int]) -> float | None:
    """Processor time so far of these processes and their descendants; None where /proc does not say."""
    total, left = 0.0, list(pids)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    try:
        while left:
            process = Path(f"/proc/{left.pop()}")
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks_per_s
            for task in (process / "task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
                    left += map(int, (task / "children").read_text().split())
    except (OSError, ValueError):
        return None
    return total


def _cheapest(name: PeerName, scheme: str, child: Child) -> Peer:
    url = f"{scheme}://127.0.0.1:{child.ready.split()[1]}"
    return Peer(name, Target(url, "any", "any-secret"), "nothing is stored", "this tree", lambda: [child.pid], _nothing)


def _nothing() -> None:
    pass


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _make_bucket(target: Target) -> None:
    config = Config(s3={"addressing_style": "path"}, signature_version="s3v4", proxies={})
    s3: Any = boto3.client(
        "s3",
        endpoint_url=target.url,
        region_name=REGION,
        aws_access_key_id=target.access_key,
        aws_secret_access_key=target.secret_key,
        config=config,
    )
    try:
        s3.create_bucket(Bucket=BUCKET)
    except (BotoCoreError, ClientError) as error:
        raise PeerUnavailable(f"no bucket: {error}") from error
    finally:
        s3.close()


def _wait_for_http(url: str, process: subprocess.Popen[bytes]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise PeerUnavailable(f"it ended with status {process.returncode} while starting")
        try:
            opener.open(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise PeerUnavailable(f"it did not answer within {START_TIMEOUT_S:.0f} s")


def _version(command: Sequence[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.strip() if said.returncode == 0 else "unknown"


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it failed and said nothing"
