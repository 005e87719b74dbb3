"""What `bench s3` puts its load on: our server, Ceph RGW, moto, and the two cheapest senders there can be."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from bench.beds.kv_peers.work import S3Target
from bench.beds.ours import target_of
from bench.beds.processes import BaselineError, Child, free_port, last_words, serving_program
from objectcache.calibration.servers import BUCKET, REGION, running_server, s3_client

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


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that is running. `processes` gives the processes that work for it; `give_back` frees the space of
    deleted objects where that takes an order.
    """

    name: PeerName
    target: S3Target
    durability: str
    version: str
    processes: Callable[[], Sequence[int]]
    give_back: Callable[[], object] = lambda: None

    @property
    def stores(self) -> bool:
        """Whether what is put can be read, listed and deleted."""
        return self.name not in (PeerName.CANNED, PeerName.RAW_SOCKET)


@contextmanager
def running_ours(folder: Path | None, options: Sequence[str]) -> Iterator[Peer]:
    """Our server with these options of `serve`. Raises LocalServerError."""
    with running_server(folder, options) as server:
        target = target_of(server)
        durability = f"serve {' '.join(options)}; otherwise its default: bytes and index synced before the answer"
        yield Peer(PeerName.OURS, target, durability, "this tree", lambda: [server.pid])


@contextmanager
def running_rgw(folder: Path | None) -> Iterator[Peer]:
    """One-node Ceph in a folder of its own. Raises BaselineError."""
    missing = [program for program in CEPH_PROGRAMS if shutil.which(program) is None]
    if missing:
        raise BaselineError(f"{', '.join(missing)} not installed (Debian: ceph-mon ceph-mgr ceph-osd radosgw)")
    if os.geteuid() != 0:
        raise BaselineError("Ceph's daemons need root")
    with tempfile.TemporaryDirectory(prefix="objectcache-bench-ceph-", dir=folder, ignore_cleanup_errors=True) as place:
        script, keys = ["bash", str(CEPH_SCRIPT)], ("ceph-access", "ceph-secret-key")
        environment = {**os.environ, "MON_PORT": str(free_port()), "OSD_GIB": str(CEPH_OSD_GIB)}
        start, log = [*script, "start", place, str(free_port()), *keys], Path(place, "start.log")
        collect = ["radosgw-admin", "gc", "process", "--include-all"]
        config = {**os.environ, "CEPH_CONF": f"{place}/ceph.conf"}
        try:
            with log.open("wb") as errors:
                started = subprocess.run(
                    start, env=environment, stdout=subprocess.PIPE, stderr=errors, timeout=CEPH_START_TIMEOUT_S
                )
            if started.returncode != 0:
                raise BaselineError(f"ceph_one_node.sh: {last_words(log)}")
            target = S3Target(started.stdout.decode().split()[-3], *keys, BUCKET, REGION)
            _make_bucket(target)
            yield Peer(
                PeerName.RGW,
                target,
                "one OSD, one replica, bluestore in a file: committed to its log (synced) before the answer",
                _version(["radosgw", "--version"]),
                lambda: [int(Path(place, "run", f"{name}.pid").read_text()) for name in CEPH_DATA_PATH],
                lambda: subprocess.run(collect, env=config, capture_output=True, timeout=START_TIMEOUT_S),
            )
        except subprocess.TimeoutExpired as error:
            raise BaselineError(f"Ceph did not start within {error.timeout:.0f} s") from error
        finally:
            subprocess.run([*script, "stop", place], timeout=STOP_TIMEOUT_S)


@contextmanager
def running_moto(python: str, folder: Path | None) -> Iterator[Peer]:
    """moto's server, from the environment of that interpreter. Raises BaselineError."""
    version = _version([python, "-c", "import moto.server, moto; print('moto', moto.__version__)"])
    if not version.startswith("moto "):
        raise BaselineError(f"{Path(python).name} has no moto.server (pip install 'moto[server]')")
    port = free_port()
    command = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    durability = "memory only, nothing synced; signatures unchecked"
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-moto-", dir=folder) as place,
        serving_program(command, Path(place, "moto.log"), port, START_TIMEOUT_S) as process,
    ):
        target = S3Target(f"http://127.0.0.1:{port}", "moto-access", "moto-secret-key", BUCKET, REGION)
        _make_bucket(target)
        yield Peer(PeerName.MOTO, target, durability, version, lambda: [process.pid])


@contextmanager
def running_cheapest(name: PeerName, seed: int, nbytes_max: int, list_keys: int) -> Iterator[Peer]:
    """The cheapest HTTP server, or the raw sender. Raises BaselineError."""
    scheme = "http" if name is PeerName.CANNED else "tcp"
    with closing(Child("bench.beds.canned", scheme, seed, nbytes_max, list_keys)) as child:
        url = f"{scheme}://127.0.0.1:{child.ready.split()[1]}"
        target = S3Target(url, "any", "any-secret", BUCKET, REGION)
        yield Peer(name, target, "nothing is stored", "this tree", lambda: [child.pid])


def _make_bucket(target: S3Target) -> None:
    s3 = s3_client(target.url, target.access_key, target.secret_key)
    try:
        s3.create_bucket(Bucket=target.bucket)
    except (BotoCoreError, ClientError) as error:
        raise BaselineError(f"no bucket: {error}") from error
    finally:
        s3.close()


def _version(command: Sequence[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.strip() if said.returncode == 0 else "unknown"
