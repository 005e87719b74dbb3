"""How much memory the server needs for large bodies: several clients put an object each, and get it back, at once.

python -m tests.support.memory --bytes 5368709120 --clients 8
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.requests import OWNER, signed
from tests.support.servers import Stack, stack

MIB = 1 << 20
PEAK_BYTES_MAX = 512 * MIB
_BLOCK = hashlib.shake_128(b"memory").digest(MIB)


def pieces(client: int, nbytes: int) -> Iterator[bytes]:
    """The client's object: blocks that differ by their number."""
    for start in range(0, nbytes, MIB):
        head = (client << 48 | start).to_bytes(8, "little")
        yield (head + _BLOCK[8:])[: min(MIB, nbytes - start)]


def put_and_get(server: Stack, client: int, nbytes: int) -> None:
    """Raises AssertionError where what comes back is not what was put."""
    path = f"/large/object-{client}"
    md5 = hashlib.md5()
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=600)
    url = server.s3().generate_presigned_url("put_object", Params={"Bucket": "large", "Key": f"object-{client}"})
    connection.putrequest("PUT", url.removeprefix(server.url))
    connection.putheader("Content-Length", str(nbytes))
    connection.endheaders()
    for piece in pieces(client, nbytes):
        md5.update(piece)
        connection.send(piece)
    answer = connection.getresponse()
    assert (answer.status, answer.headers["ETag"]) == (200, f'"{md5.hexdigest()}"'), answer.read()
    answer.read()
    connection.request("GET", path, headers=signed(server.url, "GET", path, b"", {}, OWNER))
    answer = connection.getresponse()
    back = hashlib.md5()
    while piece := answer.read(MIB):
        back.update(piece)
    assert back.hexdigest() == md5.hexdigest()
    connection.close()


def peak_bytes(pid: int) -> int:
    """The most memory a process has had in use (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def measure(folder: Path, clients: int, nbytes: int) -> int:
    """Peak memory of the server, in bytes, for `clients` objects of `nbytes` put and got at once."""
    with stack("together", folder) as server:
        server.s3().create_bucket(Bucket="large")
        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(put_and_get, server, client, nbytes) for client in range(clients)]:
                done.result()
        return peak_bytes(server.storage_pid)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bytes", type=int, default=5 << 30, help="of each object; default: 5 GiB")
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--folder", type=Path, help="for the store; needs clients times bytes")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        peak = measure(Path(folder), options.clients, options.bytes)
    print(f"{options.clients} clients, {options.bytes} bytes each: the server's peak is {peak / MIB:.0f} MiB")
    return 0 if peak < PEAK_BYTES_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
