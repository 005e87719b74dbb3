"""Prometheus metrics of two kinds. A `Tally` or `Distribution` holds plain numbers that are read on request: they are
for the data path, where counting must cost no more than an addition. `ProcessMetrics` are added up over a server's
processes.

prometheus_client is imported late, because its import decides whether processes share their numbers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from descriptors.metrics import Metric, MetricKind
from descriptors.version import __version__
from objectcache.adapters.held_folder import held_folder

Labels = tuple[str, ...]
Samples = Mapping[Labels, float]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SHARED_MEMORY = "/dev/shm"
FILE_BYTES = 1 << 20
"""The file of one kind of metrics of one process has this size. All series that a gateway can have take a quarter, and
a container has 64 MiB of such memory by default, for all workers.
"""
_LOCK_NAME = "lock"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """The value of a counter, by the values of its labels."""

    samples: dict[Labels, float] = field(default_factory=dict)

    def add(self, amount: float, *labels: str) -> None:
        """Add to the counter."""
        self.samples[labels] = self.samples.get(labels, 0.0) + amount


@dataclass(slots=True)
class _Spread:
    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class Distribution:
    """The observations of a histogram, by the values of its labels. `bounds` are the buckets' upper
    bounds, ascending.
    """

    bounds: tuple[float, ...]
    spreads: dict[Labels, _Spread] = field(default_factory=dict)

    def observe(self, value: float, *labels: str) -> None:
        """Add an observation."""
        spread = self.spreads.get(labels)
        if spread is None:
            spread = self.spreads[labels] = _Spread([0] * (len(self.bounds) + 1))
        spread.counts[bisect_left(self.bounds, value)] += 1
        spread.total += value


Reading = tuple[Metric, Samples | Distribution]
"""A metric, and its value now."""


def text_of(readings: Iterable[Reading]) -> bytes:
    """The readings in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(readings))  # type: ignore[arg-type]
    return generate_latest(registry)


def process_text() -> bytes:
    """This process in Prometheus' usual names (`process_*`), and `objectcache_build_info`."""
    from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    made = Gauge("objectcache_build_info", "The version that runs.", ("version", "python"), registry=registry)
    made.labels(__version__, platform.python_version()).set(1)
    return generate_latest(registry)


class _Once:
    """A collector of readings that can be read once."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[object]:
        for metric, read in self._readings:
            yield _family(metric, read)


def _family(metric: Metric, read: Samples | Distribution) -> object:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if isinstance(read, Distribution):
        histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, spread in read.spreads.items():
            bounds = [*map(str, read.bounds), "+Inf"]
            histogram.add_metric(labels, list(zip(bounds, accumulate(spread.counts), strict=True)), spread.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in read.items():
        family.add_metric(labels, value)
    return family


class ProcessMetrics:
    """Metrics that several processes of one server count. Each process shows their sum.

    Where the environment names a folder in FOLDER_VARIABLE when this module first imports prometheus_client, each
    process keeps its numbers in a file there (prometheus_client's multiprocess mode). Without it the numbers are this
    object's own.
    """

    def __init__(self, wanted: Iterable[Metric]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

        # otherwise each counter has one more series, which nobody reads
        disable_created_metrics()  # type: ignore[no-untyped-call]
        _reserve_files()
        self._registry = CollectorRegistry()
        self._by_name: dict[str, Any] = {}
        for metric in wanted:
            make: Callable[..., object] = Counter
            if metric.kind is MetricKind.HISTOGRAM:
                make = partial(Histogram, buckets=metric.buckets)
            elif metric.kind is MetricKind.GAUGE:
                make = partial(Gauge, multiprocess_mode="livesum")
            self._by_name[metric.name] = make(metric.name, metric.meaning, metric.labels, registry=self._registry)

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Add to a counter or a gauge; a gauge also takes a negative amount."""
        self._of(metric, labels).inc(amount)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add an observation to a histogram."""
        self._of(metric, labels).observe(value)

    def text(self) -> bytes:
        """All processes' numbers in Prometheus' text format. It takes a few milliseconds a process, so call it in a
        thread.
        """
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            return generate_latest(self._registry)
        together = CollectorRegistry()
        MultiProcessCollector(together, folder)  # type: ignore[no-untyped-call]
        with _locked(Path(folder), fcntl.LOCK_SH):
            return generate_latest(together)

    def _of(self, metric: Metric, labels: Labels) -> Any:
        made = self._by_name[metric.name]
        return made.labels(*labels) if labels else made


def _reserve_files() -> None:
    """Give this process's files their room before the library maps them: it makes files with holes, and where others
    have filled the memory meanwhile, writing to a hole ends the process (SIGBUS). Raises OSError where there is no
    room now.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    for kind in ("counter", "histogram", "gauge_livesum") if folder is not None else ():
        with Path(folder or "", f"{kind}_{os.getpid()}.db").open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, FILE_BYTES)


def forget_process(pid: int) -> None:
    """Drop the gauges of a process that has ended, and add its counters to those of all that ended before it, so that
    restarts add no files. Call this in a thread.
    """
    from prometheus_client.multiprocess import mark_process_dead

    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    with _locked(Path(folder), fcntl.LOCK_EX):  # else a scrape in between would count twice, or not at all
        mark_process_dead(pid)  # type: ignore[no-untyped-call]
        for kind in ("counter", "histogram"):
            _keep_sums(Path(folder, f"{kind}_{pid}.db"), Path(folder, f"{kind}_ended.db"))


def _keep_sums(own: Path, ended: Path) -> None:
    """Add the numbers of one file to those of another, and remove the file."""
    from prometheus_client.mmap_dict import MmapedDict

    if not own.exists():
        return
    if not ended.exists():
        own.rename(ended)  # its room is reserved
        return
    sums = MmapedDict(str(ended))  # type: ignore[no-untyped-call]
    try:
        for key, value, _, _ in list(MmapedDict.read_all_values_from_file(str(own))):  # type: ignore[no-untyped-call]
            before, _ = sums.read_value(key)  # type: ignore[no-untyped-call]
            sums.write_value(key, before + value, 0.0)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:  # the process ended while it wrote
        _log.warning("the counters in %s are lost: %s", own.name, error)
    finally:
        sums.close()  # type: ignore[no-untyped-call]
    own.unlink()


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """Hold the lock of the files in the folder; the kernel drops that of a process that ends."""
    fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


@contextmanager
def shared_folder() -> Iterator[None]:
    """Within the block, this process and the children that it starts share their metrics in one folder. The folder is
    in memory where the system has a place for it, because writing to a mapped file on a full disk ends a process
    (SIGBUS).
    """
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    with held_folder("objectcache-held-metrics-", Path(place)) as folder:
        os.environ[FOLDER_VARIABLE] = str(folder)
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]
