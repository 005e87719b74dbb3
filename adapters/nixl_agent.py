"""A NIXL agent with the UCX backend: registered memory, peers, one-sided writes, notices.

An Agent is used by one thread, which also makes it progress by polling. NIXL's status strings become
`WriteState` and its exceptions `PeerLost` or `NixlFailure` here and nowhere else.
"""

from __future__ import annotations

import importlib
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_INFINIBAND_DEVICES = pathlib.Path("/sys/class/infiniband")


class NixlFailure(Exception):
    """NIXL refused or failed a call."""


class PeerLost(NixlFailure):
    """The remote process is gone; nothing more will reach it."""


class WriteState(Enum):
    """Where a posted write stands; failures raise."""

    IN_FLIGHT = "in-flight"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Memory:
    """A span of memory: `device` is cpu or cuda:N."""

    address: int
    nbytes: int
    device: str = "cpu"

    @property
    def nixl_type(self) -> str:
        """NIXL's name for this kind of memory."""
        return "VRAM" if self.device.startswith("cuda") else "DRAM"

    @property
    def device_index(self) -> int:
        """N of cuda:N, 0 for cpu."""
        return int(self.device.partition(":")[2] or 0)


def has_infiniband() -> bool:
    """Whether this host shows an RDMA device."""
    return _INFINIBAND_DEVICES.is_dir() and any(_INFINIBAND_DEVICES.iterdir())


def is_available() -> bool:
    """Whether a NIXL wheel can be imported."""
    try:
        _load()
    except ImportError:
        return False
    return True


def leave(status: int) -> None:
    """Exit the process, skipping destructors that crash in NIXL 1.5.1 where RDMA devices keep UCX's ib module loaded.

    Hosts without such a device leave the usual way: `_load` keeps the module out.
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
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ImportError("no NIXL wheel is installed (pip install 'objectcache[ucx]')")


class Write:
    """A posted one-sided write. `release` frees NIXL's handle and may be called twice."""

    __slots__ = ("_agent", "_handle", "nbytes")

    def __init__(self, agent: Any, handle: Any, nbytes: int) -> None:
        self._agent = agent
        self._handle = handle
        self.nbytes = nbytes

    def poll(self) -> WriteState:
        """Raises PeerLost or NixlFailure once the write has failed."""
        with _translated():
            status = self._agent.check_xfer_state(self._handle)
        return _write_state(status)

    def transferred_bytes(self) -> int:
        """Bytes NIXL's telemetry counted for this write; meaningful once done."""
        with _translated():
            return int(self._agent.get_xfer_telemetry(self._handle).totalBytes)

    def release(self) -> bool:
        """Free the handle; False when NIXL cannot yet let go of a write in flight."""
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


class Agent:
    """One NIXL agent. Raises NixlFailure when NIXL cannot start."""

    def __init__(self, name: str) -> None:
        module = _load()
        with _translated():
            # NIXL's progress thread spins on a core even when idle; our own polling makes progress instead
            config = module.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], capture_telemetry=True)
            self._agent = module.nixl_agent(name, config)
        self.name = name

    def register(self, memory: Memory) -> Registration:
        """Pin and register memory for one-sided access."""
        region = [(memory.address, memory.nbytes, memory.device_index, "")]
        with _translated():
            descriptors = self._agent.register_memory(region, memory.nixl_type)
        return Registration(self._agent, descriptors, memory)

    def metadata(self) -> bytes:
        """What a peer needs to write into this agent's registered memory."""
        with _translated():
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata; the peer's name. Loading again replaces what was known of it."""
        with _translated():
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def check_peer_memory(self, peer: str, memory: Memory) -> None:
        """Raises NixlFailure when the peer's metadata does not offer all of `memory`."""
        with _translated():
            descriptors = self._agent.get_xfer_descs(_row(memory), memory.nixl_type)
            self._agent.prep_xfer_dlist(peer, descriptors).release()

    def remove_peer(self, name: str) -> None:
        """Disconnect and forget a peer; writes in flight to it fail."""
        with _translated():
            self._agent.remove_remote_agent(name)

    def post_write(self, peer: str, source: Memory, target: Memory) -> tuple[Write, WriteState]:
        """Start writing `source` to `target` in the peer's memory; both have the same length in bytes."""
        with _translated():
            local = self._agent.get_xfer_descs(_row(source), source.nixl_type)
            remote = self._agent.get_xfer_descs(_row(target), target.nixl_type)
            handle = self._agent.initialize_xfer("WRITE", local, remote, peer)
            write = Write(self._agent, handle, source.nbytes)
            try:
                return write, _write_state(self._agent.transfer(handle))
            except BaseException:
                write.release()
                raise

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notice of its own, not bound to a write."""
        with _translated():
            self._agent.send_notif(peer, message)

    def notices(self) -> list[bytes]:
        """Notices that arrived since the last call, from any peer."""
        with _translated():
            arrived = self._agent.get_new_notifs()
        return [message for messages in arrived.values() for message in messages]


def _row(memory: Memory) -> np.ndarray:
    return np.array([[memory.address, memory.nbytes, memory.device_index]], dtype=np.uint64)


def _write_state(status: str) -> WriteState:
    if status == "DONE":
        return WriteState.DONE
    if status == "PROC":
        return WriteState.IN_FLIGHT
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
