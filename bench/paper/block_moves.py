"""One block from another process into this one's memory, by MPI, UCX, TCP, shared memory and torch.distributed: what
CASCADE's Table VII compares.

The senders are processes of their own: `python -m bench.paper.block_moves mpi|shared|torch ARGUMENTS`; those of UCX and
TCP are those of `bench.beds.baselines`. A block is asked for, and the time is until its last byte is here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from bench.beds.baselines import PATTERN, check_pattern
from bench.beds.memory import huge_page_memory
from bench.beds.processes import BaselineError, Child, free_port, say
from objectcache.calibration.content import Bytes

RANKS = 4
_REQUEST, _READY, _BLOCK = 1, 2, 3
IDLE_S = 0.002
LAUNCH = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""Open MPI of 4 and of 5 as root, with more ranks than cores."""
Move = Callable[[], float]


def launcher(ranks: int) -> list[str]:
    """The words that start so many ranks. Raises BaselineError where there is no mpiexec."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise BaselineError("there is no mpiexec")
    return [found, "-n", str(ranks)]


@contextmanager
def mpi_moves(nbytes: int) -> Iterator[Move]:
    """Rank 0 asks the other ranks for the block by turns, as a node asks the home of a block in CASCADE. A rank that is
    not asked sleeps, since four that spin on few cores would measure the spinning. Raises BaselineError.
    """
    child = Child("bench.paper.block_moves", "mpi", nbytes, launcher=launcher(RANKS), environment=LAUNCH)
    with closing(child):
        yield lambda: _told(child, "move")


@contextmanager
def shared_moves(nbytes: int) -> Iterator[Move]:
    """Another process copies the block into memory that both have mapped, as our storage servers do over shm. Raises
    BaselineError.
    """
    handle = os.memfd_create("block")
    try:
        os.ftruncate(handle, nbytes)
        buffer: Bytes = np.frombuffer(mmap.mmap(handle, nbytes), dtype=np.uint8)  # unmapped with the last of its views
        child = Child("bench.paper.block_moves", "shared", f"/proc/{os.getpid()}/fd/{handle}", nbytes)

        def move() -> float:
            buffer.fill(0)
            began_s = time.monotonic()
            child.tell("move")
            child.answer()
            seconds = time.monotonic() - began_s
            check_pattern(buffer)
            return seconds

        with closing(child):
            yield move
    finally:
        os.close(handle)


@contextmanager
def torch_moves(nbytes: int, backend: str) -> Iterator[Move]:
    """torch.distributed between two processes: `gloo` for memory, `nccl` for two GPUs. Raises BaselineError."""
    port = free_port()
    sender = Child("bench.paper.block_moves", "torch", nbytes, backend, port, 1)
    with closing(sender):
        receiver = Child("bench.paper.block_moves", "torch", nbytes, backend, port, 0)
        with closing(receiver):

            def move() -> float:
                sender.tell("move")
                return _told(receiver, "move")

            yield move


def _told(child: Child, command: str) -> float:
    child.tell(command)
    return float(child.answer())


def serve_mpi(nbytes: int) -> None:
    """A rank: the first takes commands and blocks, the others send theirs when they are asked."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_rank():
        block = huge_page_memory(nbytes, PATTERN)
        empty = np.zeros(1, dtype=np.uint8)
        while True:
            while not world.Iprobe(source=0, tag=_READY):
                time.sleep(IDLE_S)
            word = np.zeros(1, dtype=np.uint8)
            world.Recv(word, source=0, tag=_READY)
            if word[0]:
                return
            world.Send(empty, dest=0, tag=_READY)
            world.Recv(word, source=0, tag=_REQUEST)
            world.Send(block, dest=0, tag=_BLOCK)
    buffer = huge_page_memory(nbytes)
    word, home = np.zeros(1, dtype=np.uint8), 0
    say("ready")
    for _ in sys.stdin:
        home = home % (RANKS - 1) + 1
        buffer.fill(0)
        word[0] = 0
        world.Send(word, dest=home, tag=_READY)
        world.Recv(word, source=home, tag=_READY)
        began_s = time.monotonic()
        world.Send(word, dest=home, tag=_REQUEST)
        world.Recv(buffer, source=home, tag=_BLOCK)
        seconds = time.monotonic() - began_s
        check_pattern(buffer)
        say(repr(seconds))
    word[0] = 1
    for rank in range(1, RANKS):
        world.Send(word, dest=rank, tag=_READY)


def serve_shared(file: str, nbytes: int) -> None:
    """For each command, copy the block into the file's memory and say so."""
    source = huge_page_memory(nbytes, PATTERN)
    handle = os.open(file, os.O_RDWR)
    target: Bytes = np.frombuffer(mmap.mmap(handle, nbytes), dtype=np.uint8)
    say("ready")
    for _ in sys.stdin:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
        say("moved")


def serve_torch(nbytes: int, backend: str, port: int, rank: int) -> None:
    """Process 0 receives the block of process 1 for each command, and tells the seconds."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if rank:
        say("ready")  # the other one is started then; both wait for each other below
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    block = torch.full((nbytes,), PATTERN if rank else 0, dtype=torch.uint8, device=device)
    word = torch.zeros(1, dtype=torch.uint8, device=device)
    if not rank:
        say("ready")
    for _ in sys.stdin:
        if rank:
            dist.recv(word, 0)
            dist.send(block, 0)
            continue
        block.zero_()
        began_s = time.monotonic()
        dist.send(word, 1)
        dist.recv(block, 1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.monotonic() - began_s
        check_pattern(block.cpu().numpy())
        say(repr(seconds))
    dist.destroy_process_group()


def main() -> None:
    """The process that `sys.argv` asks for."""
    kind, *rest = sys.argv[1:]
    if kind == "mpi":
        serve_mpi(int(rest[0]))
    elif kind == "shared":
        serve_shared(rest[0], int(rest[1]))
    else:
        serve_torch(int(rest[0]), rest[1], int(rest[2]), int(rest[3]))


if __name__ == "__main__":
    main()
