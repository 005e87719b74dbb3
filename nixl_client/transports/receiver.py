"""The client's side of a one-sided transport: memory that the server may write, and the notices it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from descriptors.messages import AgentRegistration, AgentRenewal, Region
from descriptors.notices import Notice
from nixl_client.transports.buffers import Buffer

_T = TypeVar("_T")


class Receiver(Protocol):
    """One for ucx, one for shm. Safe from any thread."""

    def offer(self, region_id: str, buffer: Buffer) -> None:
        """Make memory ready to be written by a server that learns of it."""

    def withdraw(self, region_id: str) -> None:
        """Undo `offer`, after the server has forgotten the region."""

    def registration(self, regions: Sequence[Region], lifetime_s: float) -> AgentRegistration:
        """The message that registers us with these regions, all of which have been offered."""

    def introduction(self, regions: Sequence[Region], lifetime_s: float, names: Sequence[str]) -> AgentRegistration:
        """The message that makes us known to these members of a cluster, where others know us already."""

    def renewal(self, regions: Sequence[Region], lifetime_s: float) -> AgentRenewal:
        """The message that says which regions there are now."""

    def ended_ids(self) -> list[str]:
        """Members of a cluster that surely write into our memory no more, because they have ended."""

    def writers(self) -> Callable[[], bool]:
        """A question to ask later: whether all that may write into our memory now have surely ended by then."""

    def on_forgotten(self) -> None:
        """The server has forgotten us: the next message to it is a registration."""

    def call_and_connect(self, register: Callable[[], _T]) -> _T:
        """Call `register`, which sends the registration, and return its result once the server has connected to us, so
        that the first fetch does not wait for that.
        """

    def listen(self, request_id: str, on_notice: Callable[[Notice], None]) -> None:
        """From now on pass notices of this request to `on_notice`, in a thread of ours."""

    def stop_listening(self, request_id: str) -> None:
        """Drop notices of this request from now on."""

    def stop(self) -> None:
        """End threads and connections."""
