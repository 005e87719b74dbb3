"""Certificates of this test run's own, each made once."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from tests.support.run_folder import run_folder


def certificate(folder: Path, name: str, address: str | None = None) -> tuple[str, str]:
    """A certificate that signs itself, and its key, as files in a folder; for an address where one is given. Those of
    one name and address are the same.
    """
    files = folder / f"{name}.pem", folder / f"{name}.key"
    for made, file in zip(_made(name, address), files, strict=True):
        shutil.copyfile(made, file)
    return str(files[0]), str(files[1])


@cache
def _made(name: str, address: str | None) -> tuple[Path, Path]:
    files = run_folder() / f"{name}-{address}.pem", run_folder() / f"{name}-{address}.key"
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    request = ["openssl", "req", "-x509", *key, "-days", "2", "-subj", f"/CN={name}"]
    if address is not None:
        request += ["-addext", f"subjectAltName=IP:{address}"]
    subprocess.run([*request, "-out", str(files[0]), "-keyout", str(files[1])], check=True, capture_output=True)
    return files
