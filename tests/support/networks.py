"""Hosts on a network of their own: network namespaces on a bridge, each of which can be cut off. Needs root and ip."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field


class NoNetworksError(Exception):
    """This host lets nobody make network namespaces; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace: its address, the words before a command that runs it there, and its end of the cable here."""

    name: str
    address: str
    prefix: tuple[str, ...]
    cable: str


@dataclass
class Network:
    """A bridge, with this process's own namespace at `address`, and the hosts on it."""

    tag: str
    address: str
    hosts: dict[str, Host] = field(default_factory=dict)

    def host(self, name: str) -> Host:
        """The host of that name, made when it is first asked for."""
        found = self.hosts.get(name)
        if found is None:
            found = self.hosts[name] = self._made(name)
        return found

    def cut(self, name: str) -> None:
        """Drop everything to and from a host: nobody is told."""
        _ip("link", "set", self.hosts[name].cable, "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", self.hosts[name].cable, "up")

    def _made(self, name: str) -> Host:
        number = len(self.hosts) + 2
        address = f"{self.address.rpartition('.')[0]}.{number}"
        namespace, cable, inside = f"oc{self.tag}{number}", f"oc{self.tag}c{number}", f"oc{self.tag}i{number}"
        within = ("ip", "netns", "exec", namespace)
        _ip("netns", "add", namespace)
        _ip("link", "add", cable, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", namespace)
        _ip("link", "set", cable, "master", f"oc{self.tag}", "up")
        for words in (("link", "set", "lo", "up"), ("link", "set", inside, "name", "eth0"),
                      ("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):  # fmt: skip
            _ip("-n", namespace, *words)
        return Host(name, address, within, cable)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """An empty network; it and its hosts go with the block. Raises NoNetworksError."""
    if shutil.which("ip") is None or os.geteuid():
        raise NoNetworksError("needs root and `ip`, of Debian's iproute2")
    tag = secrets.token_hex(2)
    made = Network(tag, f"10.{77 + secrets.randbelow(100)}.{secrets.randbelow(250)}.1")
    bridge = f"oc{tag}"
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("link", "set", bridge, "up")
            here, cable = f"{bridge}here", f"{bridge}c1"  # UCX uses no bridge, so we are on a cable, too
            _ip("link", "add", cable, "type", "veth", "peer", "name", here)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("addr", "add", f"{made.address}/24", "dev", here)
            _ip("link", "set", here, "up")
            made.host("first")
        except subprocess.CalledProcessError as error:
            raise NoNetworksError(f"this host makes no network interfaces: {error.stderr.strip()}") from error
        yield made
    finally:
        for host in made.hosts.values():
            _ip("link", "del", host.cable, check=False)
            _ip("netns", "del", host.prefix[-1], check=False)
        _ip("link", "del", f"{bridge}c1", check=False)
        _ip("link", "del", bridge, check=False)


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=check)
