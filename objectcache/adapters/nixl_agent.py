"""A NIXL agent with the UCX backend: registered memory, peers, one-sided writes and reads, notices.

An Agent is used by one thread, which also makes it progress by polling. NIXL's status strings become
`TransferState` and its exceptions `PeerLost` or `NixlFailure` here and nowhere else.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import pathlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from objectcache.adapters.nixl_memory import Memory, paired

_MODULES = {"12": "nixl_cu12._api", "13": "nixl_cu13._api", "any": "nixl._api"}
"""By CUDA's major version. Each has a UCX that works with GPUs of that version only, and with host memory anywhere."""
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = frozenset({"all", "shm", "sm", "mm", "cma", "knem", "xpmem"})
"""Values of UCX_TLS with which UCX copies between processes of a host."""
_INFINIBAND_DEVICES = pathlib.Path("/sys/class/infiniband")


class NixlFailure(Exception):
    """NIXL refused or failed a call."""


class PeerLost(NixlFailure):
    """The remote process is gone. Nothing will reach it any more."""


class TransferState(Enum):
    """The state of a posted transfer. A failed transfer raises instead."""

    IN_FLIGHT = "in-flight"
    DONE = "done"


def has_infiniband() -> bool:
    """Whether this host shows an RDMA device."""
    return _INFINIBAND_DEVICES.is_dir() and any(_INFINIBAND_DEVICES.iterdir())


def host_id() -> str:
    """A text that is equal for all processes of one running host, and different on other hosts."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def writes_pieces_well(peer_host_id: str) -> bool:
    """Whether a one-sided write of many pieces to a peer on that host costs about as much as one piece of their size.
    Over RDMA and shared memory it does, over TCP it does not.
    """
    if has_infiniband():
        return True
    allowed = os.environ.get("UCX_TLS", "all").removeprefix("^").split(",")
    has_shared_memory = bool(_SHARED_MEMORY.intersection(allowed)) != os.environ.get("UCX_TLS", "").startswith("^")
    return has_shared_memory and peer_host_id != "" and peer_host_id == host_id()


def is_available() -> bool:
    """Whether a NIXL wheel can be imported."""
    try:
        _load()
    except ImportError:
        return False
    return True


def leave(status: int) -> None:
    """Exit the process, skipping destructors that crash in NIXL 1.5.1 where RDMA devices keep UCX's ib module loaded.

    Hosts without such a device exit in the usual way, because `_load` keeps the module out.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    if has_infiniband():
        os._exit(status)
    sys.exit(status)


def _load() -> ModuleType:
    if not has_infiniband():
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # UCX's default is SIGHUP, which the server uses
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    loaded = [sys.modules[name] for name in _MODULES.values() if name in sys.modules]
    if loaded:
        return loaded[0]  # two wheels bring two UCX
    for name in sorted(_MODULES.values(), key=lambda name: name != _MODULES.get(_cuda_major())):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ImportError("no NIXL wheel is installed (pip install nixl-cu12)")


def _cuda_major() -> str:
    """The CUDA version of the torch that this process has loaded; empty where there is none, or one without CUDA."""
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return str(version or "").partition(".")[0]


class PostedTransfer:
    """A posted one-sided write or read. `release` frees NIXL's handle and may be called twice."""

    __slots__ = ("_agent", "_handle", "nbytes")

    def __init__(self, agent: Any, handle: Any, nbytes: int) -> None:
        self._agent = agent
        self._handle = handle
        self.nbytes = nbytes

    def poll(self) -> TransferState:
        """The transfer's state. Raises PeerLost or NixlFailure once the transfer has failed."""
        with _translated():
            status = self._agent.check_xfer_state(self._handle)
        return _transfer_state(status)

    def transferred_bytes(self) -> int:
        """The bytes that NIXL's telemetry counted for this transfer; meaningful once the transfer is done."""
        with _translated():
            return int(self._agent.get_xfer_telemetry(self._handle).totalBytes)

    def release(self) -> bool:
        """Free the handle. False when NIXL cannot free it yet, because the transfer is in flight."""
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception:
            return False
        return True


class Registration:
    """Memory registered with an agent until `close`."""

    def __init__(self, agent: Any, descriptors: Any, memory: Memory) -> None:
        self._agent = agent
        self._descriptors = descriptors
        self.memory = memory

    def close(self) -> None:
        """Deregister; safe to call twice."""
        descriptors, self._descriptors = self._descriptors, None
        if descriptors is not None:
            with _translated():
                self._agent.deregister_memory(descriptors)


_DEVICES = "UCX_NET_DEVICES"
_making = threading.Lock()


@contextmanager
def _listening_on(devices: str | None) -> Iterator[None]:
    """Let UCX use only these devices for whatever is created in the block; UCX reads them from the environment. Where
    the user has set them, or `devices` is None, they stay.
    """
    if devices is None or _DEVICES in os.environ:
        yield
        return
    with _making:
        os.environ[_DEVICES] = devices
        try:
            yield
        finally:
            os.environ.pop(_DEVICES, None)


class Agent:
    """One NIXL agent, on `devices` as UCX_NET_DEVICES names them (None: all). Raises NixlFailure when NIXL cannot
    start.
    """

    def __init__(self, name: str, devices: str | None = None) -> None:
        module = _load()
        with _translated(), _listening_on(devices):
            # NIXL's progress thread would spin on a core even when idle; the owner of this agent polls instead
            config = module.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], capture_telemetry=True)
            self._agent = module.nixl_agent(name, config)
        self.name = name

    def register(self, memory: Memory) -> Registration:
        """Pin and register memory for one-sided access. Raises NixlFailure."""
        region = [(memory.address, memory.nbytes, memory.device_index, "")]
        try:
            with _translated():
                descriptors = self._agent.register_memory(region, memory.nixl_type)
        except NixlFailure as error:
            if memory.nixl_type == "DRAM":
                raise
            version = _cuda_major() or "N"
            raise NixlFailure(
                f"NIXL does not take a GPU's memory ({error}): it needs the wheel of torch's CUDA, nixl-cu{version}"
            ) from error
        return Registration(self._agent, descriptors, memory)

    def metadata(self) -> bytes:
        """The metadata that a peer needs to write to and read from this agent's registered memory."""
        with _translated():
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata and return the peer's name. Loading again replaces the earlier metadata."""
        with _translated():
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def check_peer_memory(self, peer: str, memory: Memory) -> None:
        """Raises NixlFailure when the peer's metadata does not offer all of `memory`."""
        with _translated():
            descriptors = self._agent.get_xfer_descs(_rows((memory,)), memory.nixl_type)
            self._agent.prep_xfer_dlist(peer, descriptors).release()

    def remove_peer(self, name: str) -> None:
        """Disconnect and forget a peer; transfers in flight with it fail."""
        with _translated():
            self._agent.remove_remote_agent(name)

    def post_write(self, peer: str, source: Memory, target: Memory) -> tuple[PostedTransfer, TransferState]:
        """Start writing `source` to `target` in the peer's memory; both have the same length in bytes."""
        return self._post("WRITE", peer, (source,), (target,))

    def post_gathered_write(
        self, peer: str, spans: npt.NDArray[np.int64], targets: Sequence[Memory]
    ) -> tuple[PostedTransfer, TransferState]:
        """Start writing registered host memory, rows of (address, nbytes), one after the other to `targets`, one after
        the other. The targets are all one kind of the peer's memory, and together as long as the spans.
        """
        places = np.array([(target.address, target.nbytes) for target in targets], dtype=np.int64)
        if places[:, 1].sum() != spans[:, 1].sum():
            raise NixlFailure(f"{spans[:, 1].sum()} bytes cannot be written to {places[:, 1].sum()}")
        sources, sinks = paired(spans, places)
        ours = np.zeros((len(sources), 3), dtype=np.uint64)
        ours[:, :2] = sources
        theirs = np.zeros_like(ours)
        theirs[:, :2] = sinks
        theirs[:, 2] = targets[0].device_index
        return self._post_rows(
            "WRITE", peer, ours=ours, our_type="DRAM", theirs=theirs, their_type=targets[0].nixl_type
        )

    def post_read(self, peer: str, sources: Sequence[Memory], target: Memory) -> tuple[PostedTransfer, TransferState]:
        """Start reading `sources`, one after the other, into `target`. The sources are all one kind of the peer's
        memory, and together as long as `target`.
        """
        starts = itertools.accumulate((source.nbytes for source in sources[:-1]), initial=target.address)
        pieces = [Memory(at, source.nbytes, target.device) for at, source in zip(starts, sources, strict=True)]
        return self._post("READ", peer, pieces, sources)

    def _post(
        self, operation: str, peer: str, ours: Sequence[Memory], theirs: Sequence[Memory]
    ) -> tuple[PostedTransfer, TransferState]:
        return self._post_rows(
            operation,
            peer,
            ours=_rows(ours),
            our_type=ours[0].nixl_type,
            theirs=_rows(theirs),
            their_type=theirs[0].nixl_type,
        )

    def _post_rows(
        self, operation: str, peer: str, ours: np.ndarray, our_type: str, theirs: np.ndarray, their_type: str
    ) -> tuple[PostedTransfer, TransferState]:
        with _translated():
            local = self._agent.get_xfer_descs(ours, our_type)
            remote = self._agent.get_xfer_descs(theirs, their_type)
            handle = self._agent.initialize_xfer(operation, local, remote, peer)
            transfer = PostedTransfer(self._agent, handle, int(ours[:, 1].sum()))
            try:
                return transfer, _transfer_state(self._agent.transfer(handle))
            except BaseException:
                transfer.release()
                raise

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notice that does not belong to a write."""
        with _translated():
            self._agent.send_notif(peer, message)

    def notices(self) -> list[bytes]:
        """Notices that arrived since the last call, from any peer."""
        with _translated():
            arrived = self._agent.get_new_notifs()
        return [message for messages in arrived.values() for message in messages]


def _rows(memories: Sequence[Memory]) -> np.ndarray:
    rows = [(memory.address, memory.nbytes, memory.device_index) for memory in memories]
    return np.array(rows, dtype=np.uint64)


def _transfer_state(status: str) -> TransferState:
    if status == "DONE":
        return TransferState.DONE
    if status == "PROC":
        return TransferState.IN_FLIGHT
    raise NixlFailure(f"NIXL reports {status}")


@contextmanager
def _translated() -> Iterator[None]:
    """Turn NIXL's exceptions into ours, keeping the cause."""
    try:
        yield
    except NixlFailure:
        raise
    except Exception as error:
        family = PeerLost if type(error).__name__ == "nixlRemoteDisconnectError" else NixlFailure
        raise family(str(error)) from error
