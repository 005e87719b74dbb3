"""Every role of a cluster killed, stopped and cut off, in mid-delivery over every transport, in mid-put, and while a
storage server joins: `python -m tests.faults.cluster_faults`.

Two beds are used: processes of this host, and, for what is cut off, hosts on a network of their own (network
namespaces). In each of them etcd, a home of objects, three storage servers and two gateways are processes. In every
cell no byte may be wrong, no write that was acknowledged may be lost, nothing may take longer than DEADLINE_S, and
everything must work again when the fault has passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM
from typing import Any

import numpy as np
from botocore.exceptions import BotoCoreError, ClientError
from tqdm import tqdm

from bench.beds.processes import free_port
from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from nixl_client.fetch.layer_fetch import LayerFetch
from objectcache.calibration.origin import describe_commit, describe_machine
from tests.support.chunks import make_chunks
from tests.support.clusters import Cluster, Process, cluster
from tests.support.etcd import EtcdServer
from tests.support.networks import Host, Network, NoNetworksError, network
from tests.support.requests import OWNER, s3_client
from tests.support.servers import CONFIG
from tests.support.waiting import eventually

LAYOUT, N = ChunkLayout(8, 16, 64 * 1024), 36
KEYS, CHUNKS = make_chunks(N, LAYOUT)
PAYLOAD = np.ascontiguousarray(CHUNKS.reshape(N, LAYOUT.num_layers, -1).transpose(1, 0, 2)).ravel()
BUCKET = "chunks"
LINK_BYTES_PER_S = 6_000_000
"""A delivery takes a second, so that there is a middle."""
DEADLINE_S = 20.0
HELD_S = 3.0
"""So long a fault lasts at least: longer than a lease of membership."""
SETTLED_S = 60.0
PUT_CHUNKS = 40
SERVER_CONFIG = f"[internals.cluster]\nlease_s = 2\n[scheduler]\nlink_bytes_per_s = {LINK_BYTES_PER_S}\n"


class Role(Enum):
    STORAGE_SERVER = "storage server"
    GATEWAY = "gateway"
    ETCD = "etcd"
    HOME = "home"


class Fault(Enum):
    KILLED = "SIGKILL"
    STOPPED = "SIGSTOP"
    CUT_OFF = "cut off"


class Moment(Enum):
    HTTP = "delivery over http"
    SHM = "delivery over shm"
    UCX = "delivery over ucx"
    PUT = "puts"
    JOIN = "a storage server joins"

    @property
    def transport(self) -> str:
        return self.value.rpartition(" ")[2] if self in (Moment.HTTP, Moment.SHM, Moment.UCX) else "http"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix. `outcome` says how the request under way ended for the client, after `seconds`;
    everything was well `well_again_s` after the fault had passed.
    """

    moment: str
    role: str
    fault: str
    outcome: str
    seconds: float
    well_again_s: float


class MatrixFailure(AssertionError):
    """A promise that was not kept; the message says where."""


class Bed:
    """A running cluster whose processes can be harmed."""

    def __init__(self, stack: ExitStack, directory: Path, net: Network | None) -> None:
        self._net = net
        host = self._host("etcd")
        self._etcd = EtcdServer(directory / "etcd", *((host.address, host.prefix) if host else ()))
        stack.callback(self._etcd.kill)
        self._etcd.start()
        host = self._host("home")
        (directory / "home.toml").write_text(CONFIG)
        arguments = ["serve", "--data", str(directory / "home"), "--config", str(directory / "home.toml")]
        where = ["--host", host.address, "--port", "9000"] if host else ["--port", str(free_port())]
        self._home = Process([*arguments, *where], {}, host.prefix if host else ())
        stack.callback(self._home.kill)
        self._home.start()
        address = self._etcd.url.replace("http", "etcd")
        interface = "eth0" if net is not None else "lo"
        made = cluster(
            directory / "kv", self._home.url, config=SERVER_CONFIG, where=f"{address}/kv", network=net,
            storage_options=("--ucx", interface),
        )  # fmt: skip
        self.kv: Cluster = stack.enter_context(made)
        s3_client(self._home.url).create_bucket(Bucket=BUCKET)
        self.acknowledged: dict[str, int] = {}
        """Keys of chunks that were put, and which of CHUNKS they have."""
        self.joined = ""
        self._added = 0
        self._put_count = 0

    def _host(self, name: str) -> Host | None:
        return None if self._net is None else self._net.host(name)

    def joining(self) -> str:
        """The name of a new storage server, which is not started yet."""
        self._added += 1
        self.joined = f"d{self._added}"
        self.kv.add_member(self.joined, "--ucx", "eth0" if self._net is not None else "lo")
        return self.joined

    def end_join(self) -> None:
        """See that the new server has joined, starting it again where its start failed, and let it leave."""
        joined = self.kv.members[self.joined]
        if joined.process is not None and not joined.url:
            try:
                joined.wait_ready()
            except AssertionError:
                joined.kill()
        if joined.process is None:
            joined.start()
        joined.send(SIGTERM)
        assert joined.process is not None
        joined.process.wait(60)
        del self.kv.members[self.joined]
        joined.kill()
        self.joined = ""

    def victim(self, role: Role) -> tuple[str, Any]:
        """The name of the role's host and its process."""
        if role is Role.STORAGE_SERVER:
            return "b", self.kv.members["b"]
        if role is Role.GATEWAY:
            return "gateway0", self.kv.gateways[0]
        return (role.value, self._etcd if role is Role.ETCD else self._home)

    def harm(self, name: str, process: Any, fault: Fault) -> None:
        if fault is Fault.KILLED:
            process.kill()
        elif fault is Fault.STOPPED:
            process.send(SIGSTOP)
        else:
            assert self._net is not None
            self._net.cut(name)

    def heal(self, name: str, process: Any, fault: Fault) -> None:
        if fault is Fault.KILLED:
            process.start()
        elif fault is Fault.STOPPED:
            process.send(SIGCONT)
        else:
            assert self._net is not None
            self._net.mend(name)

    def client(self, transport: str, gateway: int = 0) -> Client:
        url = self.kv.gateways[gateway].url
        return Client(
            url, BUCKET, access_key=OWNER[0], secret_key=OWNER[1], transport=transport, timeout_s=DEADLINE_S,
            fetch_timeout_s=DEADLINE_S,
        )  # fmt: skip

    def new_keys(self, count: int) -> list[str]:
        """Keys of chunks that nobody has put yet."""
        first, self._put_count = self._put_count, self._put_count + count
        return [f"{1:08x}{index:056x}" for index in range(first, first + count)]


def run_cell(bed: Bed, moment: Moment, role: Role, fault: Fault) -> Cell:
    """Harm the role in that moment. Raises MatrixFailure."""
    name, process = bed.victim(role)
    act = {Moment.PUT: _puts, Moment.JOIN: _join}.get(moment, _delivery)
    if moment is Moment.JOIN and role is Role.STORAGE_SERVER:
        name = bed.joining()
        process = bed.kv.members[name]
    began_s = time.monotonic()
    try:
        outcome, seconds = act(bed, moment, lambda: bed.harm(name, process, fault), began_s)
        time.sleep(max(0.0, HELD_S - seconds))  # the fault outlasts a lease
    finally:
        bed.heal(name, process, fault)
    healed_s = time.monotonic()
    _await_well(bed, moment)
    well_again_s = time.monotonic() - healed_s
    if moment is Moment.JOIN:
        bed.end_join()
        _await_well(bed, moment)
    return Cell(moment.value, role.value, fault.value, outcome, round(seconds, 2), round(well_again_s, 2))


def _delivery(bed: Bed, moment: Moment, harm: Callable[[], None], began_s: float) -> tuple[str, float]:
    """The fault comes when the first layer is there. What the client needs to say goodbye is not counted."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(_closing(bed.client(moment.transport)))
        buffer = client.allocate_buffer(PAYLOAD.nbytes)
        fetch = client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
        fetch.wait_layer(0, DEADLINE_S)
        harm()
        harmed_s = time.monotonic()
        try:
            fetch.wait(DEADLINE_S)
        except (ObjectCacheError, TimeoutError) as error:
            if time.monotonic() - harmed_s > 3 * DEADLINE_S:
                raise MatrixFailure(f"the fetch ended after {time.monotonic() - harmed_s:.1f} s: {error!r}") from error
            return f"{_right_layers(fetch)} layers, then {_name_of(error)}", time.monotonic() - began_s
        seconds = time.monotonic() - began_s
        if not np.array_equal(np.asarray(buffer)[: PAYLOAD.nbytes], PAYLOAD):
            raise MatrixFailure("wrong bytes")
    return "right bytes", seconds


def _right_layers(fetch: LayerFetch) -> int:
    """How many layers of a fetch that failed are there. Raises MatrixFailure for wrong bytes in one."""
    for index in range(LAYOUT.num_layers):
        try:
            layer = fetch.wait_layer(index, 0.0)
        except (ObjectCacheError, TimeoutError):
            return index
        if not np.array_equal(np.asarray(layer.data).ravel(), PAYLOAD.reshape(LAYOUT.num_layers, -1)[index]):
            raise MatrixFailure(f"wrong bytes in layer {index}, which was told")
    return LAYOUT.num_layers


def _name_of(error: Exception) -> str:
    return error.code.value if isinstance(error, ObjectCacheError) else type(error).__name__


def _puts(bed: Bed, moment: Moment, harm: Callable[[], None], began_s: float) -> tuple[str, float]:
    """The fault comes when half of the chunks are put. A put that fails is made again through the other gateway."""
    keys = bed.new_keys(PUT_CHUNKS)
    failed = 0
    clients = [s3_client(gateway.url, connect_timeout=2, read_timeout=3) for gateway in bed.kv.gateways]
    for index, key in enumerate(keys):
        if index == PUT_CHUNKS // 2:
            harm()
        for s3 in clients:
            if time.monotonic() - began_s > DEADLINE_S:
                break
            try:
                s3.put_object(Bucket=BUCKET, Key=key, Body=CHUNKS[index % N].tobytes())
            except (BotoCoreError, ClientError):
                failed += 1
                continue
            bed.acknowledged[key] = index % N
            break
    outcome = f"{len(bed.acknowledged)} of {PUT_CHUNKS} acknowledged, {failed} tries failed"
    return outcome, time.monotonic() - began_s


def _join(bed: Bed, moment: Moment, harm: Callable[[], None], began_s: float) -> tuple[str, float]:
    """The fault comes a moment after the start of the server that joins, which may be the victim."""
    bed.kv.members[bed.joined or bed.joining()].spawn()
    time.sleep(1.0)  # somewhere in its start
    harm()
    with _closing(bed.client("http", 1)) as client:
        buffer = client.allocate_buffer(PAYLOAD.nbytes)
        try:
            client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(DEADLINE_S)
        except (ObjectCacheError, TimeoutError) as error:
            return _name_of(error), time.monotonic() - began_s
        if not np.array_equal(np.asarray(buffer)[: PAYLOAD.nbytes], PAYLOAD):
            raise MatrixFailure("wrong bytes while a server joins")
        return "right bytes", time.monotonic() - began_s


def _await_well(bed: Bed, moment: Moment) -> None:
    """Return when a fetch comes right through each gateway, and every acknowledged put is there."""
    for gateway in range(len(bed.kv.gateways)):
        errors: list[Exception] = []
        if not eventually(partial(_comes_right, bed, moment, gateway, errors), SETTLED_S):
            raise MatrixFailure(f"not well {SETTLED_S:.0f} s after the fault: {errors[-1]!r}")
        s3 = s3_client(bed.kv.gateways[gateway].url)
        for key, index in bed.acknowledged.items():
            if s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() != CHUNKS[index].tobytes():
                raise MatrixFailure(f"the acknowledged chunk {key} has other bytes")
    bed.acknowledged.clear()


def _comes_right(bed: Bed, moment: Moment, gateway: int, errors: list[Exception]) -> bool:
    """Whether a fetch comes right; its error is added otherwise."""
    try:
        with _closing(bed.client(moment.transport, gateway)) as client:
            buffer = client.allocate_buffer(PAYLOAD.nbytes)
            client.fetch(KEYS, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR).wait(DEADLINE_S)
            if not np.array_equal(np.asarray(buffer)[: PAYLOAD.nbytes], PAYLOAD):
                raise MatrixFailure("wrong bytes after the fault")
    except (ObjectCacheError, TimeoutError) as error:
        errors.append(error)
        return False
    return True


@contextlib.contextmanager
def _closing(client: Client) -> Iterator[Client]:
    """Close it, however the servers are: a client that cannot say goodbye is closed all the same."""
    try:
        yield client
    finally:
        with contextlib.suppress(ObjectCacheError):
            client.close()


def cells(fault: Fault) -> Iterator[tuple[Moment, Role]]:
    """Over shm a client shares its host with all servers, so nobody can be cut off there."""
    for moment in Moment:
        if moment is Moment.SHM and fault is Fault.CUT_OFF:
            continue
        for role in Role:
            yield moment, role


def run(faults: tuple[Fault, ...], wanted: Callable[[Moment, Role, Fault], bool]) -> list[Cell]:
    """Every cell that is wanted. Raises MatrixFailure, NoNetworksError."""
    plan = [(moment, role, fault) for fault in faults for moment, role in cells(fault) if wanted(moment, role, fault)]
    found: list[Cell] = []
    with tqdm(total=len(plan), unit="cell", disable=not sys.stderr.isatty()) as bar:
        for on_network in (False, True):
            mine = [cell for cell in plan if (cell[2] is Fault.CUT_OFF) is on_network]
            if not mine:
                continue
            with ExitStack() as stack:
                net = stack.enter_context(network()) if on_network else None
                name = stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-faults-"))
                bed = Bed(stack, Path(name), net)
                with _closing(bed.client("http")) as client:
                    client.put_chunks(KEYS, list(CHUNKS))
                for moment, role, fault in mine:
                    try:
                        found.append(run_cell(bed, moment, role, fault))
                    except MatrixFailure as error:
                        raise MatrixFailure(f"{moment.value}, {role.value}, {fault.value}: {error}") from error
                    print(*asdict(found[-1]).values(), sep=" | ", flush=True)
                    bar.update()
    return found


def main() -> int:
    """Exit status 0 when every cell kept its promises."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cluster_faults", description=__doc__)
    parser.add_argument("--faults", default=",".join(fault.name for fault in Fault), help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was met there")
    options = parser.parse_args()
    origin = {**describe_commit(), "machine": describe_machine()}
    faults = tuple(Fault[name] for name in options.faults.split(","))
    failure, found = None, []
    try:
        found = run(faults, lambda *_: True)
    except (MatrixFailure, NoNetworksError) as error:
        failure = str(error)
        print(f"FAILED: {failure}", file=sys.stderr)
    if options.json is not None:
        result = {**origin, "failure": failure, "cells": [asdict(cell) for cell in found]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
