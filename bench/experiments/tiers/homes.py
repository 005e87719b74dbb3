"""Table IV's tiers behind a server's cache: a chunk that this server has never seen comes from the home of the chunks,
or from what another server has left in remote DRAM.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.beds.kv_peers.install import MOONCAKE
from bench.beds.kv_peers.running import borrowed_mooncake, running_owner
from bench.beds.processes import BaselineError
from calibration.chunks import Chunks, fetch_checked, make_chunks, store_chunks
from calibration.content import VerificationError
from calibration.servers import BUCKET, REGION, LocalServer, running_server
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from nixl_client.client import Transport

SETTLE_S = 2.0
"""Until the files of what has come are written: writing goes on behind a fetch."""
ADMITTED_WAIT_S = 60.0
LANDING_BYTES_MIN = 256 << 20
ANOTHER = "ours, in front of a second ObjectCache, cold, over shm"
DIRECTORY = "ours, a shared directory as home, its files in the page cache, cold, over shm"
REMOTE = "ours, remote DRAM: Mooncake Store over TCP on loopback, over shm"

Ways = dict[str, Callable[[], float]]


class HomeBed:
    """Servers before homes, each with an empty cache; every sample has chunks of its own, since caches keep what they
    have seen. `stack` ends the servers.
    """

    def __init__(
        self, stack: ExitStack, parent: Path | None, block_count: int, layout: ChunkLayout, runs: int, seed: int
    ) -> None:
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objectcache-homes-", dir=parent)))
        self._count, self._layout = block_count, layout
        self._nbytes = block_count * layout.chunk_bytes
        self._runs = runs
        self._seeds = itertools.count(seed + 1_000)
        self._home = stack.enter_context(running_server(self._folder))

    def ways(self) -> tuple[Ways, dict[str, str]]:
        """The seconds of a fetch, for each home; and what is not here, with the reason."""
        ways = {ANOTHER: self._cold(self._over_http("a"), self._over_http("b"))}
        shared = self._folder / "shared"
        shared.mkdir()
        one, other = (self._front(f'[upstream]\nendpoint = "file://{shared}"\n', name) for name in "cd")
        one.make_bucket(BUCKET)
        ways[DIRECTORY] = self._cold(one, other)
        try:
            ways[REMOTE] = self._remote()
        except BaselineError as error:
            return ways, {REMOTE: str(error)}
        return ways, {}

    def _over_http(self, name: str, further: str = "", python_path: Sequence[Path] = ()) -> LocalServer:
        home = self._home
        text = (
            f'[upstream]\nendpoint = "{home.url}"\naccess_key = "{home.access_key}"\n'
            f'secret_key = "{home.secret_key}"\nregion = "{REGION}"\n'
            f"landing_bytes = {self._landing_bytes}\n{further}"
        )
        return self._front(text, name, python_path)

    @property
    def _landing_bytes(self) -> int:
        """All chunks of two samples, as one bucket may have half of it."""
        return max(LANDING_BYTES_MIN, 4 * self._nbytes)

    def _front(self, text: str, name: str, python_path: Sequence[Path] = ()) -> LocalServer:
        config = self._folder / f"{name}.toml"
        config.write_text(text)
        disk_bytes = (self._runs + 2) * 2 * self._nbytes + (64 << 20)
        options = ["--config", str(config), "--dram-bytes", "0", "--disk-bytes", str(disk_bytes)]
        return self._stack.enter_context(
            running_server(self._folder, options, makes_bucket=False, python_path=python_path)
        )

    def _cold(self, writer: LocalServer, reader: LocalServer) -> Callable[[], float]:
        """What `writer` has just put comes to `reader`."""
        fetched = self._reader(reader)

        def run() -> float:
            chunks = self._chunks()
            store_chunks(writer, chunks)
            time.sleep(SETTLE_S)
            return fetched(chunks)

        return run

    def _remote(self) -> Callable[[], float]:
        """What one server has fetched from home comes to another one. Raises BaselineError."""
        borrowed = [borrowed_mooncake(self._folder)]
        room_bytes = (self._runs + 2) * 2 * self._nbytes
        master, _ = self._stack.enter_context(running_owner(MOONCAKE.folder / "bin", room_bytes, self._folder))
        further = f'[upstream.remote_dram]\nendpoint = "mooncake://{master}"\n'
        one, other = (self._over_http(name, further, borrowed) for name in "ef")
        writer = self._over_http("g")
        filled, fetched = self._reader(one), self._reader(other)
        for server in (one, other):
            _awaited(server, "joined_stores", 1)

        def run() -> float:
            chunks = self._chunks()
            store_chunks(writer, chunks)
            before = metric(one, "admitted_bytes_total"), metric(other, "hit_chunks_total")
            filled(chunks)
            _awaited(one, "admitted_bytes_total", before[0] + self._nbytes)
            time.sleep(SETTLE_S)
            seconds = fetched(chunks)
            if metric(other, "hit_chunks_total") - before[1] != self._count:
                raise VerificationError("not every chunk came from remote DRAM")
            return seconds

        return run

    def _reader(self, server: LocalServer) -> Callable[[Chunks], float]:
        client = self._stack.enter_context(server.client(Transport.SHM))
        buffer = client.allocate_buffer(self._nbytes)
        return lambda chunks: fetch_checked(client, chunks, buffer, Delivery.LAYER_MAJOR).ended_s

    def _chunks(self) -> Chunks:
        return make_chunks(self._count, self._layout, next(self._seeds))


def metric(server: LocalServer, name: str) -> float:
    """One of remote DRAM's metrics. Raises BaselineError."""
    with server.client(Transport.HTTP) as client:
        text = client.http.request("GET", "/_objectcache/metrics").body.decode()
    for line in text.splitlines():
        if line.startswith(f"objectcache_remote_dram_{name} "):
            return float(line.split()[1])
    raise BaselineError(f"the server has no metric {name}")


def _awaited(server: LocalServer, name: str, wanted: float) -> None:
    deadline_s = time.monotonic() + ADMITTED_WAIT_S
    while metric(server, name) < wanted:
        if time.monotonic() > deadline_s:
            raise BaselineError(f"remote DRAM: {name} did not become {wanted:.0f}: it holds no such chunks")
        time.sleep(0.1)
