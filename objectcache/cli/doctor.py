"""`objectcache doctor`: what this host, a data directory and an upstream service offer, and what to change."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import platform
import resource
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from descriptors.conditions import WriteCondition
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError
from descriptors.objects import BodyDigests, ChecksumAlgorithm, PutRequest, ReadRequest
from descriptors.units import MIB
from objectcache.adapters import native
from objectcache.adapters.beneath import Beneath
from objectcache.cli.doctor_devices import device_findings, remote_dram_findings
from objectcache.cli.doctor_findings import Finding, FindingState, described
from storage_server.home.objects import UpstreamObjects
from storage_server.home.s3.connection import Upstream
from storage_server.kernel.data.disk import Disk
from storage_server.settings import UpstreamSettings

PROBE_BYTES = 16 * MIB
SLOW_PROBE_S = 0.1
"""For 1 MiB: 16 MiB more would take seconds."""
ROUND_TRIPS = 9
FILES_MIN = 16_384
IO_URING_SETUP = 425
IO_URING_PARAMS_BYTES = 120
_OTHER_ETAG = WriteCondition(if_match="0" * 32)
PACKAGES = ("aiohttp", "botocore", "numpy", "nixl-cu12", "torch")
NEEDED_BY = {
    "nixl-cu12": "the ucx transport needs it: pip install nixl-cu12",
    "torch": "only clients with tensors need it",
}


def run(
    directory: Path | None,
    upstream: UpstreamSettings | None,
    bucket: str | None,
    report: Path | None,
    tried: Iterable[Finding] | None = None,
) -> int:
    """Print the findings, or write them as JSON (`-` is standard output); 1 where one is a problem. `tried`: those of a
    server, in place of an upstream service.
    """
    findings = [*host_findings(), *([] if directory is None else directory_findings(directory))]
    if tried is not None:
        findings += tried
    elif upstream is not None:
        findings += asyncio.run(upstream_findings(upstream, bucket))
        if upstream.remote_dram is not None:
            findings += remote_dram_findings(upstream.remote_dram)
    rows = [{**asdict(finding), "state": finding.state.value} for finding in findings]
    text = described(findings) if report is None else json.dumps({"findings": rows}, indent=2)
    if report is None or str(report) == "-":
        print(text)
    else:
        report.write_text(text + "\n")
    return int(any(finding.state is FindingState.PROBLEM for finding in findings))


def host_findings() -> list[Finding]:
    """The host: versions, limits, devices."""
    return [*_versions(), _descriptors(), _locked_memory(), _guard(), _io_uring(), _huge_pages(), *device_findings()]


def _versions() -> list[Finding]:
    rows = [
        Finding("Python", FindingState.GOOD, platform.python_version()),
        Finding("kernel", FindingState.GOOD, platform.release()),
    ]
    for name in PACKAGES:
        try:
            rows.append(Finding(name, FindingState.GOOD, version(name)))
        except PackageNotFoundError:
            rows.append(Finding(name, FindingState.MISSING, "not installed", NEEDED_BY.get(name, "a server needs it")))
    return rows


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {hard})"
    if soft < FILES_MIN:
        advice = f"raise it to {FILES_MIN} (ulimit -n): connections and open segments count"
        return Finding("open files", FindingState.PROBLEM, found, advice)
    return Finding("open files", FindingState.GOOD, found)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", FindingState.GOOD, "no limit")
    advice = "RDMA locks what it registers: ulimit -l unlimited where ucx uses RDMA"
    return Finding("locked memory", FindingState.MISSING, f"{soft} bytes", advice)


def _guard() -> Finding:
    try:
        os.close(native.open_guard())
    except OSError as error:
        advice = "shm needs it: give the process /dev/userfaultfd, or set vm.unprivileged_userfaultfd=1"
        return Finding("userfaultfd", FindingState.MISSING, error.strerror or str(error), advice)
    return Finding("userfaultfd", FindingState.GOOD, "shm can be offered")


def _io_uring() -> Finding:
    params = ctypes.create_string_buffer(IO_URING_PARAMS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(IO_URING_SETUP, 1, params)
    if fd < 0:
        name = errno.errorcode.get(ctypes.get_errno(), "error")
        return Finding(
            "io_uring",
            FindingState.MISSING,
            name,
            'cold_reads = "direct" needs it; without it chunks come through the page cache',
        )
    os.close(fd)
    return Finding("io_uring", FindingState.GOOD, 'there, for cold_reads = "direct"')


def _huge_pages() -> Finding:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        text = path.read_text().strip()
    except OSError:
        return Finding("huge pages", FindingState.MISSING, "unknown")
    if "[never]" in text:
        return Finding("huge pages", FindingState.MISSING, text, f"the DRAM tier uses them: echo madvise > {path}")
    return Finding("huge pages", FindingState.GOOD, text)


def directory_findings(directory: Path) -> list[Finding]:
    """The file system of a data directory, tried with a file that is removed again."""
    place = next((each for each in (directory, *directory.parents) if each.is_dir()), Path("/"))
    found = os.statvfs(place)
    total_bytes, free_bytes = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    free = Finding("free space", FindingState.GOOD, f"{free_bytes:,} of {total_bytes:,} bytes")
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".objectcache-doctor-") as file:
            file.write(bytes(MIB))
            file.flush()
            holes = _holes(Path(file.name))
            direct = _direct(Path(file.name))
    except OSError as error:
        return [
            free,
            Finding("data directory", FindingState.PROBLEM, f"{place}: {error.strerror}", "the server writes there"),
        ]
    return [free, holes, direct]


def _holes(path: Path) -> Finding:
    if Disk().punch(Beneath(path.parent, path.name), 0, MIB):
        return Finding("hole punching", FindingState.GOOD, "deleted bytes of a segment give their space back")
    advice = "space comes back only with whole segments: a bounded cache holds less here"
    return Finding("hole punching", FindingState.PROBLEM, "this file system cannot", advice)


def _direct(path: Path) -> Finding:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        return Finding("O_DIRECT", FindingState.MISSING, error.strerror or str(error), "only benchmarks use it")
    return Finding("O_DIRECT", FindingState.GOOD, "there; only benchmarks use it")


async def upstream_findings(settings: UpstreamSettings, bucket: str | None) -> list[Finding]:
    """The service: its round trip and, with a bucket, its bandwidth and what it knows, tried with one object that is
    deleted again.
    """
    if settings.directory is not None:
        return shared_findings(settings.directory)
    upstream = Upstream(settings)
    await upstream.start()
    try:
        objects = UpstreamObjects(upstream, PROBE_BYTES)
        findings = [await _tried("upstream", _round_trip(objects))]
        if bucket is None:
            findings.append(Finding("upstream bandwidth", FindingState.MISSING, "not tried", "--bucket NAME tries it"))
        elif findings[0].state is FindingState.GOOD:
            findings += await _bucket_findings(objects, bucket)
        return findings
    finally:
        await upstream.close()


def shared_findings(root: Path) -> list[Finding]:
    """A directory that servers share: what a change costs there, and how fast bytes come and go."""
    if not root.is_dir():
        return [
            Finding("shared directory", FindingState.PROBLEM, f"{root} is no directory", "is the file system mounted?")
        ]
    writers = len(list(root.glob("writers/*")))
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix="doctor-") as file:
            fd = file.fileno()
            times_s = []
            for at in range(ROUND_TRIPS):
                start_s = time.perf_counter()
                os.pwrite(fd, bytes(512), at * 512)
                os.fdatasync(fd)
                times_s.append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            os.pwrite(fd, bytes(PROBE_BYTES), 0)
            os.fdatasync(fd)
            write_s = time.perf_counter() - start_s
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start_s = time.perf_counter()
            os.pread(fd, PROBE_BYTES, 0)
            read_s = time.perf_counter() - start_s
    except OSError as error:
        return [
            Finding(
                "shared directory", FindingState.PROBLEM, error.strerror or str(error), f"let this user write {root}"
            )
        ]
    write, read = (PROBE_BYTES / seconds / 1e6 for seconds in (write_s, read_s))
    found = f"one file, {PROBE_BYTES // MIB} MiB: writes {write:,.0f} MB/s, reads {read:,.0f} MB/s"
    is_private = root.stat().st_mode & 0o022 == 0
    advice = "" if is_private else f"chmod go-w {root}: whoever may write there may change all objects"
    return [
        Finding(
            "shared directory",
            FindingState.GOOD if is_private else FindingState.PROBLEM,
            f"{writers} writers; a synced change takes {statistics.median(times_s) * 1e3:.1f} ms",
            advice,
        ),
        Finding("shared bandwidth", FindingState.GOOD, found),
        _striping(),
    ]


def _striping() -> Finding:
    if shutil.which("lfs") is None:
        return Finding(
            "striping", FindingState.MISSING, "no lfs: this host has no Lustre tools", "only Lustre needs it"
        )
    return Finding("striping", FindingState.GOOD, "files are striped with lfs setstripe")


async def _tried(what: str, probe: Awaitable[Finding]) -> Finding:
    try:
        return await probe
    except ObjectCacheError as error:
        return Finding(what, FindingState.PROBLEM, str(error), "see docs/guides/upstream.md")


async def _round_trip(objects: UpstreamObjects) -> Finding:
    times_s = []
    for _ in range(ROUND_TRIPS):
        start_s = time.perf_counter()
        await objects.list_buckets("")
        times_s.append(time.perf_counter() - start_s)
    low, middle, high = min(times_s), statistics.median(times_s), max(times_s)
    found = f"answers in {middle * 1000:.1f} ms ({low * 1000:.1f} to {high * 1000:.1f} of {ROUND_TRIPS})"
    return Finding("upstream", FindingState.GOOD, found)


async def _bucket_findings(objects: UpstreamObjects, bucket: str) -> list[Finding]:
    key = f"objectcache-doctor-{secrets.token_hex(8)}"
    try:
        return [
            await _tried("upstream bandwidth", _bandwidth(objects, bucket, key)),
            await _tried("upstream trailers", _trailers(objects, bucket, key)),
            await _tried("upstream conditions", _conditions(objects, bucket, key)),
        ]
    finally:
        try:
            await objects.delete_object("", bucket, key)
        except ObjectCacheError as error:
            print(f"objectcache: {bucket}/{key} could not be deleted: {error}", file=sys.stderr)


async def _bandwidth(objects: UpstreamObjects, bucket: str, key: str) -> Finding:
    """A service for which a small object takes long is not asked to take a large one."""
    probe_bytes, put_s = MIB, await _put_s(objects, bucket, key, MIB)
    if put_s < SLOW_PROBE_S:
        probe_bytes, put_s = PROBE_BYTES, await _put_s(objects, bucket, key, PROBE_BYTES)
    start_s, nbytes = time.perf_counter(), 0
    async with objects.open_object("", ReadRequest(bucket, key)) as read:
        async for piece in read.body:
            nbytes += len(piece)
    get_s = time.perf_counter() - start_s
    if nbytes != probe_bytes:
        return Finding("upstream bandwidth", FindingState.PROBLEM, f"{nbytes} bytes of {probe_bytes} came back")
    write, read_back = (probe_bytes / seconds / 1e6 for seconds in (put_s, get_s))
    found = f"one connection, {probe_bytes // MIB} MiB: writes {write:,.0f} MB/s, reads {read_back:,.0f} MB/s"
    return Finding("upstream bandwidth", FindingState.GOOD, found)


async def _put_s(objects: UpstreamObjects, bucket: str, key: str, nbytes: int) -> float:
    start_s = time.perf_counter()
    await objects.put_object("", PutRequest(bucket, key, nbytes), _Zeros(nbytes))
    return time.perf_counter() - start_s


async def _trailers(objects: UpstreamObjects, bucket: str, key: str) -> Finding:
    request = PutRequest(bucket, key, MIB, checksum=ChecksumAlgorithm.CRC32)
    try:
        await objects.put_object("", request, _Zeros(MIB))
    except ObjectCacheError as error:
        if error.code is not ErrorCode.SLOW_DOWN:
            raise
        advice = "checksums of large bodies are compared here, and not kept there"
        return Finding("upstream trailers", FindingState.MISSING, "unknown there", advice)
    return Finding("upstream trailers", FindingState.GOOD, "checksums are kept")


async def _conditions(objects: UpstreamObjects, bucket: str, key: str) -> Finding:
    """Writes over an object that is there: under two conditions that fail, and one that holds."""
    etag = (await objects.head_object("", ReadRequest(bucket, key))).info.etag
    wrong = []
    for name, condition in (("If-None-Match: *", WriteCondition(if_absent=True)), ("If-Match", _OTHER_ETAG)):
        if await _is_written(objects, bucket, key, condition):
            wrong.append(f"{name} is ignored on writes")
            etag = (await objects.head_object("", ReadRequest(bucket, key))).info.etag
    if not await _is_written(objects, bucket, key, WriteCondition(if_match=etag)):
        wrong.append("If-Match is refused on writes where it holds")
    if not wrong:
        return Finding("upstream conditions", FindingState.GOOD, "If-None-Match: * and If-Match are kept on writes")
    return Finding("upstream conditions", FindingState.MISSING, "; ".join(wrong), "do not rely on conditional writes")


async def _is_written(objects: UpstreamObjects, bucket: str, key: str, condition: WriteCondition) -> bool:
    try:
        await objects.put_object("", PutRequest(bucket, key, 4, condition=condition), _Zeros(4))
    except CallerError as error:
        if error.code is not ErrorCode.PRECONDITION_FAILED:
            raise
        return False
    return True


class _Zeros:
    """A body of zeros."""

    has_sha256 = False
    is_held_back = False

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, self._nbytes, MIB):
            yield bytes(min(MIB, self._nbytes - start))

    def digests(self) -> BodyDigests:
        """None: nobody has said any."""
        return BodyDigests()
