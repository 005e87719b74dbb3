"""Our side of a one-sided transport: offering memory, and hearing what the server says of it. One Protocol, ucx here,
shm in nixl_client.shm_link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from adapters.interfaces import interface_towards, ucx_devices
from adapters.nixl_agent import Registration, host_id
from descriptors.messages import AgentRegistration, AgentRenewal, Region
from descriptors.notices import Notice
from nixl_client.buffers import Buffer
from nixl_client.receiver import Receiver

_T = TypeVar("_T")


class Link(Protocol):
    """Safe from any thread."""

    def offer(self, region_id: str, buffer: Buffer) -> None:
        """Make memory ready to be written by a server that learns of it."""

    def withdraw(self, region_id: str) -> None:
        """Undo `offer`, after the server has forgotten the region."""

    def registration(self, regions: Sequence[Region], lifetime_s: float) -> AgentRegistration:
        """How to introduce ourselves, everything having been offered."""

    def renewal(self, regions: Sequence[Region], lifetime_s: float) -> AgentRenewal:
        """How to say that our regions have changed."""

    def unregistered(self) -> None:
        """The server has forgotten us."""

    def greeted_by(self, register: Callable[[], _T]) -> _T:
        """Run `register` and wait until the first fetch would find everything open."""

    def listen(self, request_id: str, on_notice: Callable[[Notice], None]) -> None:
        """From now on hand notices of this request to `on_notice`, in a thread of ours."""

    def forget(self, request_id: str) -> None:
        """Drop notices of this request from now on."""

    def stop(self) -> None:
        """End threads and connections."""


class UcxLink:
    """A NIXL agent on the interface that leads to the server, `host` and `port`: nobody on another network can reach
    the memory of this process. Raises ImportError, OSError or NixlFailure where UCX cannot run.
    """

    def __init__(self, host: str, port: int) -> None:
        self._receiver = Receiver(ucx_devices([interface_towards(host, port)]))
        self._registrations: dict[str, Registration] = {}
        self.listen = self._receiver.listen
        self.forget = self._receiver.forget
        self.stop = self._receiver.stop

    def offer(self, region_id: str, buffer: Buffer) -> None:
        self._registrations[region_id] = self._receiver.register(buffer.memory)

    def withdraw(self, region_id: str) -> None:
        self._receiver.deregister(self._registrations.pop(region_id))

    def registration(self, regions: Sequence[Region], lifetime_s: float) -> AgentRegistration:
        return AgentRegistration(self._receiver.metadata(), tuple(regions), lifetime_s, host_id=host_id())

    def renewal(self, regions: Sequence[Region], lifetime_s: float) -> AgentRenewal:
        return AgentRenewal(lifetime_s, self._receiver.metadata(), tuple(regions))

    def unregistered(self) -> None:
        """The agent can be registered again as it is."""

    def greeted_by(self, register: Callable[[], _T]) -> _T:
        return self._receiver.greeted_by(register)
