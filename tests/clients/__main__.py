"""Run the clients: `python -m tests.clients [--client NAME] [--endpoint URL ...] [--write FILE]`.

Without an endpoint it starts servers of its own, which --write needs: it makes the compatibility table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.clients.catalogue import CLIENTS, OVER_TLS, Client
from tests.clients.drivers.contract import Target
from tests.clients.install import install
from tests.clients.runner import Run, describe, run
from tests.clients.server import make_bucket, plain_server, tls_server, upstream_server
from tests.clients.table import render
from tests.support.requests import OWNER


def main() -> int:
    """Exit status 0 when every client did everything."""
    names = [client.name for client in CLIENTS]
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--client", action="append", choices=names, help="only this one; may be repeated")
    arguments.add_argument("--endpoint", help="of a running server")
    arguments.add_argument("--access-key", default=OWNER[0])
    arguments.add_argument("--secret-key", default=OWNER[1])
    arguments.add_argument("--write", type=Path, metavar="FILE", help="write the compatibility table")
    options = arguments.parse_args()
    if options.write and options.endpoint:
        arguments.error("--write starts servers of its own: leave --endpoint out")
    chosen = [client for client in CLIENTS if client.name in (options.client or names)]
    key = (options.access_key, options.secret_key)
    if options.endpoint:
        runs = _run_all(chosen, options.endpoint, key)
    else:
        with tempfile.TemporaryDirectory() as folder, plain_server(Path(folder)) as endpoint:
            runs = _run_all(chosen, endpoint, key)
    over_tls: list[Run] = []
    in_front: list[Run] = []
    if options.write:
        with tempfile.TemporaryDirectory() as folder, upstream_server(Path(folder)) as endpoint:
            in_front = _run_all(chosen, endpoint, key)
        with tempfile.TemporaryDirectory() as folder, tls_server(Path(folder)) as (endpoint, ca_file):
            over_tls = _run_all(OVER_TLS, endpoint, key, str(ca_file))
    failed = [run for run in (*runs, *in_front, *over_tls) if run.failures]
    print(describe(failed))
    if options.write and not failed:
        plain, fronted = [run.results for run in runs], [run.results for run in in_front]
        options.write.write_text(render(plain, fronted, [run.client.name for run in over_tls]))
    return 1 if failed else 0


def _run_all(clients: Sequence[Client], endpoint: str, key: tuple[str, str], ca_file: str | None = None) -> list[Run]:
    runs = []
    for client in clients:
        target = Target(endpoint, *key, client.bucket, ca_file=ca_file)
        if client.environment is not None:
            install(client.environment)
        make_bucket(target)
        start = time.monotonic()
        runs.append(run(client, target))
        print(f"{client.name}: {'failed' if runs[-1].failures else 'ok'}, {time.monotonic() - start:.1f} s", flush=True)
    return runs


if __name__ == "__main__":
    sys.exit(main())
