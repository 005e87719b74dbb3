"""Membership by MPI: the ranks of one `mpiexec` or `srun` tell each other once who they are."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from typing import Any

import numpy as np

from descriptors.cluster import ClusterError, Member, View, member_fields, member_from_fields
from objectcache.adapters.membership import MembershipError, StandingMembership

EXCHANGE_S = 600.0
"""A storage server sweeps its directory before: so long ranks wait until all of them have started."""
RECORD_BYTES = 1_024
"""Each rank tells so many, padded."""
POLL_S = 0.02
_log = logging.getLogger(__name__)


class MpiMembership(StandingMembership):
    """The members are those that the ranks of MPI_COMM_WORLD announce; a rank that announces none is a gateway.

    MPI is ended as soon as every rank knows every other. So no rank waits for another that is killed, hangs or ends,
    and what the storage servers themselves move goes its own ways. The members never change after that: a rank that
    dies is a member that cannot be reached. Most launchers then end the whole job, unless they are told otherwise.

    Raises MembershipError where there is no MPI.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            import mpi4py

            mpi4py.rc.finalize = False  # a rank that leaves early must not wait for the others
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            problem = f"there is no MPI: {error}; install mpi4py, and Open MPI or MPICH"
            raise MembershipError(problem) from None
        self._mpi: Any = MPI
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self._size: int = MPI.COMM_WORLD.Get_size()

    async def start(self) -> None:
        """Wait until all ranks have told who they are, and end MPI."""
        own = record(self._own, secrets.token_hex(8))
        records = np.empty((self._size, RECORD_BYTES), dtype=np.uint8)
        exchange = self._mpi.COMM_WORLD.Iallgather(np.frombuffer(own, dtype=np.uint8), records)
        until_s = time.monotonic() + EXCHANGE_S
        while not exchange.Test():
            if time.monotonic() > until_s:
                raise MembershipError(f"not all of the {self._size} ranks have started within {EXCHANGE_S:.0f} s")
            await asyncio.sleep(POLL_S)
        self._mpi.Finalize()
        view = view_of([bytes(each) for each in records])
        _log.info("rank %d of %d: the members are %s", self.rank, self._size, [each.name for each in view.members])
        self._show(view)

    async def refresh(self) -> None:
        """Do nothing: the members of a job do not change."""


def record(own: Member | None, cluster_id: str) -> bytes:
    """The bytes that a rank tells of itself: its member, if it is one, and a name for the cluster, which is taken from
    the first rank. Raises MembershipError.
    """
    told = json.dumps({"cluster": cluster_id, "member": None if own is None else member_fields(own)}).encode()
    if len(told) > RECORD_BYTES:
        raise MembershipError(f"what a rank tells of itself takes {len(told)} bytes, and {RECORD_BYTES} is the most")
    return told.ljust(RECORD_BYTES)


def view_of(records: list[bytes]) -> View:
    """The view that all ranks agree on, from what each has told, by rank. Raises MembershipError."""
    try:
        told = [json.loads(each) for each in records]
        members = tuple(member_from_fields(each["member"]) for each in told if each["member"] is not None)
        view = View(f"mpi-{told[0]['cluster']}", 1, members)
    except (ValueError, KeyError, TypeError, ClusterError) as error:
        raise MembershipError(f"what the ranks tell each other makes no cluster: {error}") from None
    if not members:
        raise MembershipError("no rank is a storage server: start them and the gateways under one mpiexec or srun")
    return view
