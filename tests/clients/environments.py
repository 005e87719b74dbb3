"""The environments clients live in: they pin versions of the same packages against each other, so there are several."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
ROOT = REPOSITORY / ".venv-clients"


class Dependencies(Enum):
    """Whether an environment stands alone."""

    OWN = "own"
    BORROWED = "borrowed"
    """Installed without dependencies; torch and others come from the interpreter that runs the tests."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One virtual environment, built from tests/clients/requirements/NAME.txt."""

    name: str
    dependencies: Dependencies = Dependencies.OWN
    node_package: str | None = None

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def stamp(self) -> Path:
        return self.folder / ".installed"

    @property
    def inputs(self) -> list[Path]:
        """The files whose content decides what is installed."""
        if self.node_package is None:
            return [self.requirements]
        node = HERE / self.node_package
        return [self.requirements, node / "package.json", node / "package-lock.json"]

    def fingerprint(self) -> str:
        """What `stamp` holds once the environment is as it should be."""
        digest = hashlib.sha256(f"{sys.version} {sys.prefix} {self}".encode())
        for path in self.inputs:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def is_installed(self) -> bool:
        return self.stamp.exists() and self.stamp.read_text() == self.fingerprint()


LIBRARIES = Environment("libraries")
PROGRAMS = Environment("programs", node_package="node")
FSSPEC = Environment("fsspec")
TORCH = Environment("torch", Dependencies.BORROWED)
SERVICES = Environment("services")
"""S3 services that stand upstream."""
SEAWEEDFS = Environment("seaweedfs")
"""As large as all others together, and made by `make test-seaweedfs` alone."""
ENVIRONMENTS = (LIBRARIES, PROGRAMS, FSSPEC, TORCH, SERVICES)
