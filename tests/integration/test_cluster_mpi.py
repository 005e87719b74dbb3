"""A cluster whose members find each other by MPI, under a real mpiexec."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from bench.beds.processes import BaselineError
from bench.paper.block_moves import LAUNCH, launcher
from descriptors.descriptor import Delivery
from nixl_client.client import Client
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import OWNER, s3_client
from tests.support.servers import CONFIG, READY, LocalStack
from tests.support.tree import repository

pytestmark = [pytest.mark.needs_server, pytest.mark.timeout(180)]
KEYS, CHUNKS = make_chunks(N, LAYOUT)
SERVERS, GATEWAYS = 3, 2
START_S, STOP_S = 60.0, 30.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        yield running


def mpiexec() -> str:
    try:
        return launcher(1)[0]
    except BaselineError:
        pytest.skip("there is no mpiexec")


class Job:
    """A running mpiexec, and the lines that its ranks say."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def urls(self, what: str, count: int) -> list[str]:
        """Where so many commands of this name listen."""
        found: list[str] = []
        said: list[str] = []
        while len(found) < count:
            try:
                said.append(self._lines.get(timeout=START_S))
            except queue.Empty:
                pytest.fail(f"only {len(found)} of {count}: {said}")
            if match := re.search(rf"{re.escape(what)} {re.escape(READY)}(\S+)", said[-1]):
                found.append(match[1])
        return found

    def join(self) -> None:
        """Read what is left."""
        self._reader.join(STOP_S)

    def ended(self) -> tuple[int, str]:
        """The exit status, and all that was said."""
        code = self.process.wait(STOP_S)
        self.join()
        return code, "".join(self._lines.get_nowait() for _ in range(self._lines.qsize()))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)


@contextmanager
def job(folder: Path, *commands: tuple[int, str]) -> Iterator[Job]:
    """mpiexec of so many ranks of each shell command."""
    (folder / "config.toml").write_text(CONFIG)
    (folder / "secret").write_text("a secret of gateways and storage servers\n")
    (folder / "secret").chmod(0o600)
    arguments: list[str] = []
    for count, command in commands:
        arguments += [":"] if arguments else []
        arguments += ["-n", str(count), "sh", "-c", f"exec {sys.executable} -m objectcache {command}"]
    account = {"OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID": OWNER[0], "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY": OWNER[1]}
    environment = {**os.environ, **LAUNCH, **account, "FOLDER": str(folder), "PYTHONPATH": str(repository())}
    process = subprocess.Popen(
        [mpiexec(), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    running = Job(process)
    try:
        yield running
    finally:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for each in below:
            if each.is_running():
                each.kill()
        process.wait()
        assert process.stdout is not None
        running.join()
        process.stdout.close()


COMMON = "--cluster mpi --config $FOLDER/config.toml --peer-secret-file $FOLDER/secret"
GATEWAY = f"gateway --port 0 {COMMON}"


@pytest.mark.slow
def test_ranks_find_each_other_and_serve_one_prefix(tmp_path: Path, home: LocalStack) -> None:
    s3_client(home.url).create_bucket(Bucket="mpi")
    storage = f"storage-server --data $FOLDER/$OMPI_COMM_WORLD_RANK --listen tcp://127.0.0.1:0 --upstream {home.url}"
    with job(tmp_path, (SERVERS, f"{storage} {COMMON}"), (GATEWAYS, GATEWAY)) as running:
        urls = running.urls("objectcache gateway", GATEWAYS)
        assert len(set(urls)) == GATEWAYS
        options = {"access_key": OWNER[0], "secret_key": OWNER[1]}
        with Client(urls[0], "mpi", transport="http", **options) as client:
            for key, chunk in zip(KEYS, CHUNKS, strict=True):
                client.put_chunks([key], [chunk])
        layers = CHUNKS.reshape(N, LAYOUT.num_layers, -1).transpose(1, 0, 2).tobytes()
        for transport in ("http", "shm"):
            with Client(urls[1], "mpi", transport=transport, **options) as client:
                buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
                client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(START_S)
                assert np.asarray(buffer).tobytes() == layers
        below = psutil.Process(running.process.pid).children(recursive=True)
        assert len(below) >= SERVERS + GATEWAYS
        running.process.send_signal(signal.SIGTERM)
        running.ended()
        assert psutil.wait_procs(below, STOP_S)[1] == []


@pytest.mark.slow
def test_gateways_alone_are_no_cluster(tmp_path: Path) -> None:
    with job(tmp_path, (2, GATEWAY)) as running:
        code, said = running.ended()
    assert code != 0
    assert "no rank is a storage server" in said
    assert "Traceback" not in said
