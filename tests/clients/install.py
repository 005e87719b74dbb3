"""Makes the clients' environments, leaving alone what is up to date: `python -m tests.clients.install [NAME ...]`."""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.clients.environments import ENVIRONMENTS, HERE, ROOT, Dependencies, Environment

_LIMIT_S = 900
_PIP = ("--quiet", "--disable-pip-version-check", "--no-input")


class InstallFailed(Exception):
    """A step of an installation failed; the message has its output."""


def install(environment: Environment) -> bool:
    """Build the environment unless it is up to date; whether it was built. Raises InstallFailed."""
    with _locked():
        if environment.is_installed():
            return False
        shutil.rmtree(environment.folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", "--without-pip", str(environment.folder))
        _pip(environment)
        if environment.node_package is not None:
            _npm(environment, environment.node_package)
        environment.stamp.write_text(environment.fingerprint())
        return True


def _pip(environment: Environment) -> None:
    options = ["--no-deps"] if environment.dependencies is Dependencies.BORROWED else []
    pip = (sys.executable, "-m", "pip", "--python", str(environment.python), "install", *_PIP, *options)
    _run(*pip, "-r", str(environment.requirements))
    if environment.dependencies is Dependencies.BORROWED:
        # afterwards, so that pip never sees the borrowed packages and cannot replace them
        packages = next((environment.folder / "lib").glob("python*/site-packages"))
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _npm(environment: Environment, node_package: str) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / node_package / name, environment.folder / name)
    npm = str(environment.folder / "bin" / "npm")
    _run(npm, "ci", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(environment.folder))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        raise InstallFailed(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-4000:]}")


@contextmanager
def _locked() -> Iterator[None]:
    """One installation at a time, also across processes."""
    ROOT.mkdir(exist_ok=True)
    (ROOT / ".gitignore").write_text("*\n")
    with (ROOT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Install the named environments, or all."""
    known = {environment.name: environment for environment in ENVIRONMENTS}
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all without")
    names = arguments.parse_args().names or list(known)
    if unknown := set(names) - set(known):
        arguments.error(f"no such environment: {', '.join(sorted(unknown))}")
    for name in names:
        start = time.monotonic()
        built = install(known[name])
        print(f"{name}: {f'installed in {time.monotonic() - start:.0f} s' if built else 'up to date'}")


if __name__ == "__main__":
    main()
