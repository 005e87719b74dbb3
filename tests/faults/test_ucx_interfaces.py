"""`--ucx IF,IF`: the process with the ucx agent listens on each interface that was named, and on no other."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.requests import OWNER
from tests.support.servers import READY
from tests.support.tree import repository
from tests.support.waiting import eventually

LISTENING = "0A"
SETUP = " && ".join(
    (
        "mount -t sysfs sysfs /sys",
        "ip link set lo up",
        "ip link add rail0 type veth peer name rail1",
        "ip link set rail0 up",
        "ip link set rail1 up",
        "ip addr add 10.77.0.1/24 dev rail0",
        "ip addr add 10.78.0.1/24 dev rail1",
    )
)


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The words before a command that runs it in a network namespace with loopback and two more interfaces."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("unshare or ip is not installed")
    within = ["unshare", "--net", "--mount", "sh", "-c", f'{SETUP} && exec "$@"', "sh"]
    done = subprocess.run([*within, "true"], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"this host lets its tests make no network interfaces: {done.stderr.strip()}")
    return within


@contextlib.contextmanager
def served(within: list[str], directory: Path, interfaces: str) -> Iterator[psutil.Process]:
    """A server in the namespace, with these ucx interfaces."""
    command = [sys.executable, "-m", "objectcache", "serve", "--data", str(directory), "--port", "0"]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    process = subprocess.Popen(
        [*within, *command, "--ucx", interfaces],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=repository(),
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            assert READY in process.stdout.readline()
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def engine_of(server: psutil.Process) -> psutil.Process:
    (engine,) = [
        child for child in server.children() if "storage_server.delivery.transport.ucx_engine" in child.cmdline()
    ]
    return engine


def listeners_of(process: psutil.Process) -> set[str]:
    """IPv4 addresses that a process of another network namespace listens on."""
    links = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    sockets = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    table = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    rows = [row.split() for row in table]
    return {
        socket.inet_ntoa(bytes.fromhex(row[1].partition(":")[0])[::-1])
        for row in rows
        if row[3] == LISTENING and row[9] in sockets
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interfaces", "wanted"),
    [
        ("lo", {"127.0.0.1"}),
        ("rail0", {"10.77.0.1"}),
        ("rail0,rail1", {"10.77.0.1", "10.78.0.1"}),
        ("lo,rail1", {"127.0.0.1", "10.78.0.1"}),
    ],
)
def test_ucx_listens_on_every_interface_that_was_named_and_on_no_other(
    tmp_path: Path, namespace: list[str], interfaces: str, wanted: set[str]
) -> None:
    with served(namespace, tmp_path, interfaces) as server:
        engine = engine_of(server)
        assert eventually(lambda: listeners_of(engine) == wanted, 20), listeners_of(engine)
