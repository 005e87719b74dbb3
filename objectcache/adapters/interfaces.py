"""Network interfaces: from the names that people use to UCX's names."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

LOOPBACK = "lo"
_NETWORKS = Path("/sys/class/net")


class UnknownInterfaceError(ValueError):
    """This host has no interface of that name."""


def ucx_devices(interfaces: Sequence[str]) -> str:
    """UCX_NET_DEVICES for these interfaces: each interface itself, for TCP, and the RDMA ports behind it. UCX's own
    names, such as `mlx5_0:1`, stay. Raises UnknownInterfaceError.
    """
    devices: list[str] = []
    for name in interfaces:
        if ":" in name:
            devices.append(name)
            continue
        network = _NETWORKS / name
        if not name or "/" in name or not network.exists():
            raise UnknownInterfaceError(f"this host has no network interface {name!r}")
        devices += [name, *_rdma_ports(network)]
    return ",".join(dict.fromkeys(devices))


def _rdma_ports(network: Path) -> list[str]:
    try:
        port = int((network / "dev_port").read_text()) + 1
        return [f"{device.name}:{port}" for device in sorted((network / "device" / "infiniband").iterdir())]
    except (OSError, ValueError):
        return []


def interface_towards(host: str, port: int) -> str:
    """The interface from which this host sends to that address; loopback for an address of this host. Raises OSError
    where there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; it only looks the route up
        ours, theirs = probe.getsockname()[0], probe.getpeername()[0]
    return LOOPBACK if ours == theirs else _owner_of(ours, family)


def _owner_of(address: str, family: int) -> str:
    """The interface that has the address. Raises OSError."""
    for _, name in socket.if_nameindex():
        if address in _addresses(name, family):
            return name
    raise OSError(f"no interface has the address {address}")


def _addresses(name: str, family: int) -> list[str]:
    if family == socket.AF_INET:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            try:
                answer = fcntl.ioctl(asking, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                return []
        return [socket.inet_ntoa(answer[20:24])]
    found = []
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        fields = line.split()
        if fields[5] == name:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return found
