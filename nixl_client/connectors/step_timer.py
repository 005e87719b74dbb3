"""How long the engine's forward passes take: clocks on CPUs; on a GPU events, which are read when they have come."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from nixl_client.connectors.compute_fit import Work

PENDING_MAX = 16


class StepTimer:
    """Times of one worker, used by the thread that runs the model."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._began: Any = None
        self._pending: deque[tuple[Work, Any, Any]] = deque(maxlen=PENDING_MAX)
        self._ended: list[tuple[Work, float]] = []

    def begin(self) -> None:
        """The forward pass begins."""
        self._began = self._event() if self._is_gpu else time.perf_counter()

    def end(self, work: Work, waited_s: float) -> None:
        """It has ended, or on a GPU is queued; for `waited_s` of it layers were waited for and copied. On a GPU such a
        step tells nothing: the device stood still for a time that nobody knows.
        """
        began, self._began = self._began, None
        if began is None or not work.tokens:
            return
        if not self._is_gpu:
            self._ended.append((work, time.perf_counter() - began - waited_s))
        elif not waited_s:
            self._pending.append((work, began, self._event()))

    def take(self) -> list[tuple[Work, float]]:
        """Steps whose times are known, since the last call."""
        while self._pending and self._pending[0][2].query():
            work, began, ended = self._pending.popleft()
            self._ended.append((work, began.elapsed_time(ended) / 1000))
        ended_steps, self._ended = self._ended, []
        return ended_steps

    def _event(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
