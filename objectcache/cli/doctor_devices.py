"""Checks of `objectcache doctor` on devices: networks, RDMA, UCX, GPUs, and memory of other hosts."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from objectcache.cli.doctor_findings import Finding, FindingState
from storage_server.settings import RemoteDramSettings

ANSWER_S_MAX = 10.0
CONNECT_S_MAX = 3.0
LOOPBACK_TYPE = "772"
ASK_UCX = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).ucp_get_version_string; f.restype = ctypes.c_char_p; \
print(f().decode())"
ASK_GPUS = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def device_findings() -> list[Finding]:
    """The devices of this host."""
    return [*networks(Path("/sys/class/net")), rdma(Path("/sys/class/infiniband")), ucx(), gpu(Path("/proc"))]


def networks(folder: Path) -> list[Finding]:
    """Each interface that is up, and its speed as its driver tells it; those of virtual machines tell none."""
    found = []
    for device in sorted(listed(folder)):
        if _text(device / "operstate") == "up" and _text(device / "type") != LOOPBACK_TYPE:
            speed = _text(device / "speed")
            told = f"{int(speed) / 1000:g} Gbps" if speed.isdecimal() and int(speed) else "speed not told"
            found.append(Finding(f"network {device.name}", FindingState.GOOD, told))
    return found or [Finding("network", FindingState.MISSING, "no interface but loopback is up")]


def rdma(folder: Path) -> Finding:
    """InfiniBand's and RoCE's devices."""
    devices = sorted(each.name for each in listed(folder))
    if devices:
        return Finding("RDMA", FindingState.GOOD, ", ".join(devices))
    return Finding("RDMA", FindingState.MISSING, "no device", "between hosts, http is then the fastest transport")


def ucx() -> Finding:
    """The UCX that NIXL brings, asked in a process of its own: loading it starts threads and reads UCX_* variables."""
    try:
        libraries = [file for file in files("nixl-cu12") or () if file.name.startswith("libucp")]
    except PackageNotFoundError:
        libraries = []
    if not libraries:
        return Finding(
            "UCX", FindingState.MISSING, "not installed", "the ucx transport needs it: pip install nixl-cu12"
        )
    version = _said(sys.executable, "-P", "-c", ASK_UCX, str(libraries[0].locate()))
    if not version:
        return Finding("UCX", FindingState.PROBLEM, "cannot be loaded", f"try to load {libraries[0].locate()}")
    return Finding("UCX", FindingState.GOOD, f"{version}, from nixl-cu12")


def gpu(proc: Path) -> Finding:
    """Names and driver, from nvidia-smi or from the driver's own files."""
    told = [line.split(", ") for line in _said(*ASK_GPUS).splitlines()]
    if told:
        names, drivers = [each[0] for each in told], {each[-1] for each in told}
        return Finding("GPU", FindingState.GOOD, f"{', '.join(names)}; driver {', '.join(sorted(drivers))}")
    cards = [
        _text(card / "information").partition("Model:")[2].strip().partition("\n")[0]
        for card in sorted(listed(proc / "driver/nvidia/gpus"))
    ]
    if not cards:
        return Finding("GPU", FindingState.MISSING, "none")
    driver = _text(proc / "driver/nvidia/version").partition("\n")[0].removeprefix("NVRM version:").strip()
    return Finding("GPU", FindingState.GOOD, f"{', '.join(cards)}; driver {driver or 'not told'}")


def remote_dram_findings(settings: RemoteDramSettings) -> list[Finding]:
    """Mooncake's client, and whether its master can be reached."""
    package = Finding("mooncake", FindingState.GOOD, "installed")
    if find_spec("mooncake") is None:
        advice = "remote_dram needs it: pip install mooncake-transfer-engine-non-cuda"
        package = Finding("mooncake", FindingState.PROBLEM, "not installed", advice)
    parts = urlsplit(settings.endpoint)
    try:
        socket.create_connection((parts.hostname, parts.port), CONNECT_S_MAX).close()
    except OSError as error:
        found = f"{settings.endpoint}: {error.strerror or error}"
        return [package, Finding("mooncake master", FindingState.PROBLEM, found, "start mooncake_master there")]
    return [package, Finding("mooncake master", FindingState.GOOD, f"{settings.endpoint} takes connections")]


def listed(folder: Path) -> list[Path]:
    """The names in a folder; none where it cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _said(*command: str) -> str:
    """The output of a command; empty where it fails, or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S_MAX, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
