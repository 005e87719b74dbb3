"""Certificates of this test run's own."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path, name: str, address: str | None = None) -> tuple[str, str]:
    """A certificate that signs itself, and its key; for an address where one is given."""
    files = folder / f"{name}.pem", folder / f"{name}.key"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    if address is not None:
        request += ["-addext", f"subjectAltName=IP:{address}"]
    subprocess.run([*request, "-out", str(files[0]), "-keyout", str(files[1])], check=True, capture_output=True)
    return str(files[0]), str(files[1])
