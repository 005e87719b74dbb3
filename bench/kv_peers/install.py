"""Makes the environments of peers that need one, leaving alone what is up to date: `python -m bench.kv_peers.install`.

Each is a folder of `.venv-peers`, built from requirements/NAME.txt with nothing but the pinned packages. Checkouts
share them in the folder that OBJECTCACHE_ENVIRONMENTS names, where each version of an environment is kept.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARED = os.environ.get("OBJECTCACHE_ENVIRONMENTS")
ROOT = Path(SHARED or HERE.parent.parent / ".venv-peers").absolute()
STEP_TIMEOUT_S = 900
_PIP = ("--quiet", "--disable-pip-version-check", "--no-input")
TORCH_INDEX = "TORCH_INDEX"
"""The variable that names an index for torch: PyTorch's own has builds for CPUs alone, which are small."""


def torch_index(environment: Mapping[str, str]) -> tuple[str, ...]:
    """pip's options for installing torch."""
    index = environment.get(TORCH_INDEX)
    return ("--index-url", index) if index else ()


class InstallFailed(Exception):
    """A step of an installation failed; the message has its output."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One virtual environment; `borrows` says that it sees the packages of the interpreter that made it as well."""

    name: str
    borrows: bool = False

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return ROOT / (f"{self.name}-{self._fingerprint()[:12]}" if SHARED else self.name)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        """Whether it is there and made from the pins as they are."""
        return self._stamp.exists() and self._stamp.read_text() == self._fingerprint()

    def install(self) -> bool:
        """Build it unless it is up to date; whether it was built. Raises InstallFailed."""
        with _locked():
            if self.is_installed:
                return False
            shutil.rmtree(self.folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", "--without-pip", str(self.folder))
            pip = (sys.executable, "-m", "pip", "--python", str(self.python), "install", *_PIP)
            for torch in self._torch():
                _run(*pip, *torch_index(os.environ), "-c", str(self._pins), torch)
            _run(*pip, "--no-deps", "-r", str(self._pins))
            if self.borrows:
                packages = next((self.folder / "lib").glob("python*/site-packages"))
                (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
            self._stamp.write_text(self._fingerprint())
            return True

    def _torch(self) -> list[str]:
        """torch as it is pinned, if it is: with what it needs, since PyPI's build needs CUDA's libraries."""
        return [line for line in self._pins.read_text().splitlines() if line.startswith("torch==")]

    @property
    def _pins(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def _stamp(self) -> Path:
        return self.folder / ".installed"

    def _fingerprint(self) -> str:
        lender = sys.prefix if self.borrows else ""
        digest = hashlib.sha256(f"{sys.version} {lender} {self}".encode())
        digest.update(self._pins.read_bytes())
        return digest.hexdigest()


MOONCAKE = Environment("mooncake")
LMCACHE = Environment("lmcache", borrows=True)
ENGINES = Environment("engines")
ENVIRONMENTS = (MOONCAKE, LMCACHE, ENGINES)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=STEP_TIMEOUT_S)
    if done.returncode != 0:
        raise InstallFailed(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-4000:]}")


@contextmanager
def _locked() -> Iterator[None]:
    """One installation at a time, also across processes."""
    ROOT.mkdir(parents=True, exist_ok=True)
    (ROOT / ".gitignore").write_text("*\n")
    with (ROOT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Install the named environments, or all."""
    known = {environment.name: environment for environment in ENVIRONMENTS}
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all without")
    names = arguments.parse_args().names or list(known)
    if unknown := set(names) - set(known):
        arguments.error(f"no such environment: {', '.join(sorted(unknown))}")
    for name in names:
        start_s = time.monotonic()
        built = known[name].install()
        print(f"{name}: {f'installed in {time.monotonic() - start_s:.0f} s' if built else 'up to date'}")


if __name__ == "__main__":
    main()
