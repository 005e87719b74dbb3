"""Mooncake's master and the process that owns the memory, on free loopback ports, ended by their process ids."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.child import BaselineError
from descriptors.units import MIB

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
SEGMENT_SPARE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class Owner:
    """Addresses a client needs."""

    master: str
    owner: str


@contextmanager
def running_owner(programs: Path, payload_bytes: int, folder: Path) -> Iterator[Owner]:
    """Master and owner, with room for the payload; their logs go to `folder`. Raises BaselineError."""
    master, metrics, owner = (_free_port() for _ in range(3))
    segment_mib = (payload_bytes * 5 // 4 + SEGMENT_SPARE_BYTES) // MIB
    master_options = {
        "rpc_address": "127.0.0.1",
        "rpc_port": master,
        "metrics_host": "127.0.0.1",
        "metrics_port": metrics,
        "enable_metric_reporting": "false",
    }
    owner_options = {
        "host": "127.0.0.1",
        "port": owner,
        "master_server_address": f"127.0.0.1:{master}",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": f"{segment_mib} MB",
        "threads": 2,
    }
    with (
        _running(programs / "mooncake_master", master_options, master, folder),
        _running(programs / "mooncake_client", owner_options, owner, folder),
    ):
        yield Owner(f"127.0.0.1:{master}", f"127.0.0.1:{owner}")


@contextmanager
def _running(program: Path, options: dict[str, object], port: int, folder: Path) -> Iterator[None]:
    command = [str(program), *(f"--{name}={value}" for name, value in options.items())]
    with (folder / f"{program.name}.log").open("wb") as log:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
        except OSError as error:
            raise BaselineError(f"{program}: {error}") from error
        try:
            _wait_for(port, process, program)
            yield
        finally:
            _end(process)


def _wait_for(port: int, process: subprocess.Popen[bytes], program: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise BaselineError(f"{program.name} ended with status {process.returncode} while starting")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise BaselineError(f"{program.name} does not listen after {START_TIMEOUT_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
