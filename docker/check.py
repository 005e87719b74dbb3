"""Build the image without Docker and try it: `make image-check`, as root, with Debian's buildah and debootstrap.

The Dockerfile is built as it is, step by step in chroots. In place of python:3.11-slim-bookworm, which only a registry
has, stands a Debian 12 root made by debootstrap, whose python3 is the same minor version. Then the image's own command
serves an object, and health, packages and user are looked at. Nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from nixl_client.client import Client
from nixl_client.session.signed_http import SignedHttp
from tests.support.compose_steps import steps

ROOT = Path(__file__).resolve().parents[1]
BASE_IMAGE = "docker.io/library/python:3.11-slim-bookworm"
IMAGE = "localhost/objectcache:check"
PACKAGES = "python3,python3-dev,python3-pip,python3-venv,ca-certificates"
"""The real image has headers, too."""
KEYS = ("CHECKKEY", "checksecret")
START_S = 60.0


class CheckError(Exception):
    """The image is not what it should be, or cannot be built here."""


class Buildah:
    """buildah with storage of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]
        self._command = ["buildah", *storage]

    def command(self, *words: str) -> list[str]:
        """One call."""
        return [*self._command, *words]

    def run(self, *words: str) -> str:
        """Its output. Raises CheckError."""
        return _run(self.command(*words))


def main() -> int:
    """0 when the image is built and works."""
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root{' and ' if missing else ''}{' and '.join(missing)} (Debian packages)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="objectcache-image-") as name:
        try:
            _check(Path(name))
        except CheckError as error:
            print(f"the image check failed: {error}", file=sys.stderr)
            return 1
    print("the image builds, starts, serves and is healthy")
    return 0


def _check(folder: Path) -> None:
    buildah = Buildah(folder)
    _say("a Debian root in place of the base image")
    _make_base(buildah, folder / "base")
    _say("the Dockerfile")
    buildah.run(
        "bud", "--isolation", "chroot", "--pull-never", "--tag", IMAGE, "--file", str(ROOT / "docker" / "Dockerfile"),
        str(ROOT),
    )  # fmt: skip
    container = buildah.run("from", "--pull-never", IMAGE)
    _say("what is in it")
    inside = "import nixl_cu12, aiohttp, numpy, os, pwd; print(pwd.getpwuid(os.getuid()).pw_name)"
    user = buildah.run("run", "--isolation", "chroot", container, "--", "python", "-c", inside)
    if user != "objectcache":
        raise CheckError(f"it runs as {user!r}")
    absent = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'tests') if u.find_spec(n)])"
    found = buildah.run("run", "--isolation", "chroot", container, "--", "python", "-c", absent)
    if found != "[]":
        raise CheckError(f"it has {found}")
    _say("a server")
    port = _free_port()
    words = ["serve", "--data", "/var/lib/objectcache/data", "--host", "127.0.0.1", "--port", str(port)]
    with _served(buildah, container, folder / "server.log", words, port) as url:
        with urllib.request.urlopen(f"{url}/_objectcache/health", timeout=10) as reply:
            if reply.status != 200:
                raise CheckError(f"health says {reply.status}")
        http = SignedHttp(url, *KEYS, "us-east-1", 30.0)
        http.request("PUT", "/checked")
        http.close()
        with Client(url, "checked", access_key=KEYS[0], secret_key=KEYS[1], transport="http") as client:
            client.put_chunks(["a"], [bytearray(b"x" * 4096)])
            if client.lookup(["a", "b"]) != 1:
                raise CheckError("what was put is not found")
        _say("the steps of compose.minio.yaml, with this server in MinIO's place")
        _check_compose(buildah, folder, url)


def _check_compose(buildah: Buildah, folder: Path, upstream: str) -> None:
    """A second container in front of `upstream`; its bucket is made, and an object goes through."""
    container = buildah.run("from", "--pull-never", IMAGE)
    port = _free_port()
    chosen = steps(upstream, "127.0.0.1", port, "/var/lib/objectcache/data")
    with _served(buildah, container, folder / "front.log", chosen.serve, port) as url:
        keys = [f"--env=AWS_ACCESS_KEY_ID={KEYS[0]}", f"--env=AWS_SECRET_ACCESS_KEY={KEYS[1]}"]
        buildah.run("run", "--isolation", "chroot", *keys, container, "--", "python", "-c", chosen.make_bucket)
        front, home = (SignedHttp(each, *KEYS, "us-east-1", 30.0) for each in (url, upstream))
        front.request("PUT", "/kv-cache/key", body=b"data")
        if home.request("GET", "/kv-cache/key").body != b"data":
            raise CheckError("what was put in front is not upstream")
        front.close()
        home.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _make_base(buildah: Buildah, root: Path) -> None:
    _run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)])
    (root / "usr" / "bin" / "python").symlink_to("python3")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()  # the real image's python is nobody else's
    environment = []
    certificates = os.environ.get("PIP_CERT")
    if certificates:  # where packages come through a proxy with a certificate of its own
        copy = root / "etc" / "ssl" / "check.pem"
        shutil.copy(certificates, copy)
        environment = ["--env", "PIP_CERT=/etc/ssl/check.pem"]
    container = buildah.run("from", "scratch")
    buildah.run("add", container, str(root), "/")
    buildah.run("config", *environment, "--env", "PIP_ROOT_USER_ACTION=ignore", container)
    buildah.run("commit", container, BASE_IMAGE)
    buildah.run("rm", container)


@contextlib.contextmanager
def _served(buildah: Buildah, container: str, log: Path, words: list[str], port: int) -> Iterator[str]:
    """The image's command with these words, which make it listen on this port of the host."""
    names = ("AWS_{}", "OBJECTCACHE_UPSTREAM_{}")
    parts = zip(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), KEYS, strict=True)
    keys = [f"--env={name.format(part)}={value}" for part, value in parts for name in names]
    with log.open("wb") as output:
        server = subprocess.Popen(
            buildah.command("run", "--isolation", "chroot", *keys, container, "--", "objectcache", *words),
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _await_health(server, url, log)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, 15)
            server.wait(30)


def _await_health(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/_objectcache/health", timeout=5):
            return
        time.sleep(0.2)
    raise CheckError(f"the server does not start: {log.read_text()[-2000:]}")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(f"{' '.join(command[:3])} …: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout.strip()


def _say(what: str) -> None:
    print(f"{what} ...", flush=True)


if __name__ == "__main__":
    sys.exit(main())
