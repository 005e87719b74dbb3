"""Where the model runs: work in lanes beside each other, marks between them, and pinned memory. Needs torch.

On CUDA a lane is a stream and a mark an event; enqueued work is done later. The CPU does everything at once, in the
calling thread: the same code runs on both, so that what is not about speed is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from calibration.compute.layer import Device, describe_device
from calibration.content import Bytes

REGISTER_DEFAULT = 0
"""cudaHostRegisterDefault: pinned for the context that registers it, which is the only one here."""
PRIORITY_HIGH = -1
"""Of streams beside the computation: the few blocks of a copy's kernel must not queue behind a matrix product's."""


class DeviceError(Exception):
    """The device refused what it was asked for, or computes something else."""


Mark = float | torch.cuda.Event
"""A place in a lane's work: an event where it is done later, the time where it was done at once."""
Lane = Callable[[], AbstractContextManager[object]]
"""Work in sequence, beside that of other lanes: what a thread enqueues within it goes there."""


class Accelerator:
    """The CPU, at once and in turn. Safe from any thread; a thread that has entered no lane works in the main one."""

    def __init__(self, device: Device = Device.CPU) -> None:
        self.device = torch.device("cpu") if device is Device.CPU else torch.device("cuda", 0)
        self.title = describe_device(device)

    def lane(self) -> Lane:
        """A new one."""
        return contextlib.nullcontext

    def mark(self) -> Mark:
        """After all that the current lane has been given so far."""
        return time.perf_counter()

    def wait(self, mark: Mark) -> None:
        """What the current lane is given from now on is done after the mark. Does not block the thread."""

    def elapsed_s(self, first: Mark, last: Mark) -> float:
        """Between two marks that were both reached."""
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first

    def synchronize(self) -> None:
        """Block until every lane has done everything."""

    @contextmanager
    def pinned(self, memory: Bytes) -> Iterator[Tensor]:
        """The memory as a uint8 tensor that the device copies from by itself. Not to be given back while in use: all
        lanes are waited for at the end. Raises DeviceError.
        """
        yield torch.from_numpy(memory)


class CudaAccelerator(Accelerator):
    """The first CUDA device; the main lane is its default stream."""

    def __init__(self) -> None:
        super().__init__(Device.CUDA)

    def lane(self) -> Lane:
        return partial(torch.cuda.stream, torch.cuda.Stream(priority=PRIORITY_HIGH))  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream().wait_event(_event(mark))

    def elapsed_s(self, first: Mark, last: Mark) -> float:
        return float(_event(first).elapsed_time(_event(last))) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextmanager
    def pinned(self, memory: Bytes) -> Iterator[Tensor]:
        tensor = torch.from_numpy(memory)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), REGISTER_DEFAULT))
        if status != 0:
            raise DeviceError(f"CUDA does not pin {tensor.numel()} bytes of host memory: error {status}")
        try:
            if not tensor.is_pinned():
                raise DeviceError("torch does not see that the memory is pinned: its copies would not be asynchronous")
            yield tensor
        finally:
            torch.cuda.synchronize()
            status = int(runtime.cudaHostUnregister(tensor.data_ptr()))
            if status != 0:
                raise DeviceError(f"CUDA does not give pinned host memory back: error {status}")


@contextmanager
def opened(device: Device) -> Iterator[Accelerator]:
    """The device must be present (`calibration.compute.layer.is_present`). The CPU is used with one thread: it tries
    things out, perhaps beside other work, and threads would wait for each other at every operation.
    """
    if device is Device.CUDA:
        yield CudaAccelerator()
        return
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Accelerator()
    finally:
        torch.set_num_threads(thread_count)


def _event(mark: Mark) -> torch.cuda.Event:
    if not isinstance(mark, torch.cuda.Event):
        raise RuntimeError("a mark of another accelerator")
    return mark
