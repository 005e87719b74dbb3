"""A worker's loads ahead of their requests, where vLLM has several steps under way: it takes tokens of a step that it
made on top of a load that failed, so that a load has to be over before its request runs. No step waits for one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from descriptors.recompute import PrefillCosts
from nixl_client.connectors.compute_fit import LoadFit
from nixl_client.connectors.vllm.loads import Loads
from nixl_client.connectors.vllm.lossy_blocks import LossyBlocks
from nixl_client.connectors.vllm.steps import LoadJob, Report

_cuda: Any = torch.cuda  # of which some is untyped
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A step's loads, asked for at `since_s`. `ready` is the device's event after which their blocks may be written."""

    jobs: tuple[LoadJob, ...]
    costs: PrefillCosts | None
    since_s: float
    ready: Any


class LoadsAhead:
    """Has `loads` carried out by a thread of its own, in the order in which they were asked for; as many at once as the
    buffer holds. Its methods are called by the thread that runs the model.
    """

    waited_s = 0.0
    """No step waits."""

    def __init__(self, loads: Loads, device: torch.device) -> None:
        """`loads` tells `ended` of each job that is over."""
        self._loads = loads
        self._device = device
        self._stream: Any = _cuda.Stream(device) if device.type == "cuda" else None
        self._changed = threading.Condition()
        self._asked: deque[_Asked] = deque()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._over: set[str] = set()
        self._lost_blocks: set[int] = set()
        self._report = Report()
        self._told_lost: set[int] = set()
        self._told = Report()

    @property
    def is_idle(self) -> threading.Event:
        """Set while nothing is loaded."""
        return self._loads.is_idle

    @property
    def lossy_blocks(self) -> LossyBlocks:
        """The blocks whose KV is not exact."""
        return self._loads.lossy_blocks

    @property
    def late_count(self) -> int:
        """Loads that were given up, or cut short, for being late."""
        return self._loads.late_count

    @property
    def load_fit(self) -> LoadFit:
        """The times of loads that no rate held back."""
        return self._loads.load_fit

    def start(self, jobs: Sequence[LoadJob], layer_compute_us: int = 0, costs: PrefillCosts | None = None) -> None:
        """Have these loaded. Nothing of them is hidden by computing."""
        if not jobs:
            return
        ready = None
        if self._stream is not None:  # the step may be zeroing their blocks
            ready = _cuda.Event()
            ready.record(_cuda.current_stream(self._device))
        with self._changed:
            self._asked.append(_Asked(tuple(jobs), costs, time.monotonic(), ready))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="objectcache-load", daemon=True)
                self._thread.start()

    def wait_layer(self, layer_index: int) -> None:
        """Every layer is there: its request would not run."""

    def finish(self) -> None:
        """Nothing of them belongs to a step."""

    def take_over(self) -> set[str]:
        """Requests whose loads are over, since the last call. `take_lost_blocks` and `take_report` are of these."""
        with self._changed:
            over, self._over = self._over, set()
            lost, self._lost_blocks = self._lost_blocks, set()
            report, self._report = self._report, Report()
        self._told_lost |= lost
        self._told = self._told.add(report)
        return over

    def take_lost_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        lost, self._told_lost = self._told_lost, set()
        return lost

    def take_report(self) -> Report:
        """Jobs that are over, and what was wrong with them."""
        report, self._told = self._told, Report()
        return report

    def close(self, timeout_s: float) -> None:
        """Give up what is under way."""
        with self._changed:
            self._is_closing = True
            self._asked.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            self._loads.interrupt()
            thread.join(timeout_s)
        self._loads.close(timeout_s)

    def ended(self, job: LoadJob) -> None:
        """Called in the thread that loads: the job is over, and what has come of it is in its blocks."""
        if self._stream is not None:
            self._stream.synchronize()
        lost, report = self._loads.take_lost_blocks(), self._loads.take_report()
        with self._changed:
            self._over.add(job.request_id)
            self._lost_blocks |= lost
            self._report = self._report.add(report)

    def _run(self) -> None:
        if self._stream is None:
            self._load_all()
            return
        with _cuda.device(self._device), _cuda.stream(self._stream):
            self._load_all()

    def _load_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._asked or self._loads.is_under_way)
                if self._is_closing:
                    return
                asked = None
                if self._asked and self._loads.has_room(self._asked[0].jobs):
                    asked = self._asked.popleft()
            if asked is None:
                self._loads.finish_first()
                continue
            if asked.ready is not None:
                self._stream.wait_event(asked.ready)
            self._loads.start(asked.jobs, 0, asked.costs, asked.since_s)
            if not self._loads.is_under_way:  # none could be started
                self._loads.finish_first()
