"""CASCADE's Table VII, which the paper left open: blocks by MPI between four ranks, beside UCX, TCP, shared memory and
torch.distributed, in the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import numpy as np

from bench.beds.baselines import raw_nixl_writes, raw_socket
from bench.beds.processes import BaselineError
from bench.core.rounds import sampled
from bench.paper.block_moves import Move, mpi_moves, shared_moves, torch_moves
from descriptors.units import MIB
from objectcache.calibration.samples import spread

SOURCE_BYTES_MIN = MIB


class Mover(Enum):
    """The ways to move a block from one process to another."""

    MPI = "MPI"
    UCX = "UCX"
    TCP = "TCP"
    SHARED = "shared memory"
    GLOO = "Gloo"
    NCCL = "NCCL"


def table_7(block_mib: Sequence[int], runs: int) -> dict[str, Any]:
    """GB/s of each mover for each size; where one is missing, the reason. Every block is checked. Raises what movers
    raise but BaselineError.
    """
    missing: dict[Mover, str] = _without_gpus()
    rows = []
    for size_mib in block_mib:
        nbytes = size_mib * MIB
        with ExitStack() as stack:
            moves: dict[Mover, Callable[[int], float]] = {}
            for mover in Mover:
                if mover in missing:
                    continue
                try:
                    move = stack.enter_context(_moves(mover, nbytes))
                except BaselineError as error:
                    missing[mover] = str(error)
                    continue
                moves[mover] = lambda _, move=move: move()  # type: ignore[misc]

            def failed(mover: Mover, error: BaselineError) -> None:
                missing[mover] = str(error)

            taken = sampled(moves, runs, f"{size_mib} MiB", failed=failed)
        rates = {mover.value: spread([nbytes / seconds for seconds in taken[mover]]) for mover in taken}
        rows.append({"block_mib": size_mib, "bytes_per_s": rates})
    return {"rows": rows, "missing": {mover.value: reason for mover, reason in missing.items()}}


def _without_gpus() -> dict[Mover, str]:
    try:
        import torch
    except ImportError:
        reason = "torch is not installed"
        return {Mover.GLOO: reason, Mover.NCCL: reason}
    count = torch.cuda.device_count()
    return {} if count >= 2 else {Mover.NCCL: f"needs two GPUs, and this machine has {count or 'none'}"}


@contextmanager
def _moves(mover: Mover, nbytes: int) -> Iterator[Move]:
    """One mover at work. Raises BaselineError."""
    with ExitStack() as stack:
        if mover is Mover.MPI:
            yield stack.enter_context(mpi_moves(nbytes))
        elif mover is Mover.SHARED:
            yield stack.enter_context(shared_moves(nbytes))
        elif mover in (Mover.GLOO, Mover.NCCL):
            yield stack.enter_context(torch_moves(nbytes, mover.value.lower()))
        elif mover is Mover.TCP:
            yield stack.enter_context(raw_socket(np.empty(nbytes, dtype=np.uint8), nbytes))
        else:
            write = stack.enter_context(raw_nixl_writes(np.empty(nbytes, dtype=np.uint8), nbytes))
            yield lambda: write(nbytes)
