"""`objectcache doctor --endpoint`: a server as a client here finds it, by the way there, the clock, the key, the
bucket, the transports and the rate.
"""

from __future__ import annotations

import argparse
import http.client
import secrets
import statistics
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import numpy as np

from descriptors.descriptor import Delivery
from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.headers import HEALTH_PATH, STATUS_PATH
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from nixl_client.client import Client, Transport
from nixl_client.session.check import said
from nixl_client.session.retries import Retries
from nixl_client.session.signed_http import SignedHttp
from nixl_client.transports.http import ServerAddress, reason_of
from objectcache.adapters.trust import client_context
from objectcache.cli.doctor_findings import Finding, FindingState
from objectcache.cli.remote import endpoint_of, keys_of, region

ANSWER_S = 10.0
ROUND_TRIPS = 9
CLOCK_S_MAX = 60.0
"""Signatures are good for 15 minutes; a clock that is off by one may be off by more tomorrow."""
LAYOUT = ChunkLayout(num_layers=16, chunk_tokens=16, per_layer_chunk_bytes=64 * 1024)
CHUNKS = 16
FETCHES = 5
SEED = 7


def client_findings(options: argparse.Namespace) -> Iterator[Finding]:
    """One finding after the other, until one says that the next make no sense. With --bucket, 16 chunks of 1 MiB are
    put there, fetched layer by layer, compared and deleted. Raises ConfigError.
    """
    endpoint = endpoint_of(options.endpoint)
    address = ServerAddress.parse(endpoint)
    reached = _way_there(address)
    yield from reached
    if reached[0].state is FindingState.PROBLEM:
        return
    access_key, secret_key = keys_of(options.credentials)
    signed = SignedHttp(
        endpoint=endpoint,
        access_key=access_key,
        secret_key=secret_key,
        region=region(),
        timeout_s=ANSWER_S,
        retries=Retries(1),
    )
    try:
        yield _version(signed)
    finally:
        signed.close()
    if options.bucket is None:
        yield Finding("bucket and rate", FindingState.MISSING, "not tried", "--bucket NAME tries them")
        return
    with Client(endpoint, options.bucket, access_key=access_key, secret_key=secret_key, region=region()) as client:
        checked = client.check()
        yield Finding("key and bucket", FindingState.GOOD if checked.is_good else FindingState.PROBLEM, checked.text)
        if checked.is_good:
            yield _rate(client, checked.transports)


def _way_there(address: ServerAddress) -> list[Finding]:
    """Connect, ask for health, and compare clocks."""
    seconds: list[float] = []
    date = ""
    connection = (
        http.client.HTTPSConnection(address.host, address.port, timeout=ANSWER_S, context=client_context())
        if address.is_tls
        else http.client.HTTPConnection(address.host, address.port, timeout=ANSWER_S)
    )
    try:
        for _ in range(ROUND_TRIPS):
            started_s = time.monotonic()
            connection.request("GET", HEALTH_PATH)
            answer = connection.getresponse()
            answer.read(MIB)
            seconds.append(time.monotonic() - started_s)
            date = answer.headers.get("Date", "")
    except (OSError, http.client.HTTPException) as error:
        return [
            Finding("server", FindingState.PROBLEM, f"no ObjectCache at {address.url}: {reason_of(error, address)}")
        ]
    finally:
        connection.close()
    if answer.status != 200:
        found = f"{address.url} answers {answer.status} to {HEALTH_PATH}"
        return [Finding("server", FindingState.PROBLEM, found, "that is another service, or a proxy in front of none")]
    found = f"{address.url}: {statistics.median(seconds) * 1e3:.2f} ms there and back, median of {ROUND_TRIPS}"
    return [Finding("server", FindingState.GOOD, found), clock(date, time.time())]


def clock(date: str, now_s: float) -> Finding:
    """This host's clock against the Date of an answer. Pure."""
    try:
        ahead_s = now_s - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return Finding("clock", FindingState.MISSING, "the server says no time")
    found = f"within {max(1, round(abs(ahead_s)))} s of the server's"
    if abs(ahead_s) > CLOCK_S_MAX:
        word = "ahead of" if ahead_s > 0 else "behind"
        found = f"{abs(ahead_s):.0f} s {word} the server's"
        return Finding(
            "clock", FindingState.PROBLEM, found, "signatures are good for 15 minutes: set both clocks by NTP"
        )
    return Finding("clock", FindingState.GOOD, found)


def _version(signed: SignedHttp) -> Finding:
    try:
        status = signed.request_once("GET", STATUS_PATH, timeout_s=ANSWER_S).json()
        return Finding("version", FindingState.GOOD, f"ObjectCache {status['gateway']['version']}")
    except ObjectCacheError as error:
        if error.code is ErrorCode.ACCESS_DENIED:
            return Finding("version", FindingState.MISSING, "this key may not ask (GetMetrics, all buckets)")
        return Finding("version", FindingState.PROBLEM, said(error))
    except (ValueError, KeyError, TypeError):
        return Finding("version", FindingState.PROBLEM, "the answer is none of ObjectCache")


def _rate(client: Client, transports: tuple[str, ...]) -> Finding:
    """Put, fetch, compare, delete."""
    keys = [f"{secrets.token_hex(32)}" for _ in range(CHUNKS)]
    chunks = np.random.default_rng(SEED).integers(0, 256, (CHUNKS, LAYOUT.chunk_bytes), dtype=np.uint8)
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(CHUNKS))
    try:
        client.put_chunks(keys, list(chunks))
        used = client.register_buffer(buffer)
        firsts, wholes = [], []
        for _ in range(FETCHES):
            started_s = time.monotonic()
            with client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR) as fetch:
                fetch.wait_layer(0, ANSWER_S)
                firsts.append(time.monotonic() - started_s)
                fetch.wait(ANSWER_S)
                wholes.append(time.monotonic() - started_s)
        size = LAYOUT.per_layer_chunk_bytes
        wanted = chunks.reshape(CHUNKS, LAYOUT.num_layers, size).transpose(1, 0, 2).reshape(-1)
        if not np.array_equal(buffer.reshape(-1)[: wanted.size], wanted):
            return Finding("rate", FindingState.PROBLEM, "other bytes came than were put")
    except (ObjectCacheError, TimeoutError) as error:
        return Finding("rate", FindingState.PROBLEM, str(error))
    finally:
        client.delete(keys)
    rate = LAYOUT.delivery_bytes(CHUNKS) / statistics.median(wholes) / 1e9
    first_ms = statistics.median(firsts) * 1e3
    found = f"{used.value}: {rate:.2f} GB/s, first layer after {first_ms:.1f} ms (16 MiB, median of {FETCHES})"
    if used is Transport.HTTP and "shm" in transports:
        return Finding(
            "rate", FindingState.MISSING, found, "the server offers shm, which only clients of its host reach"
        )
    return Finding("rate", FindingState.GOOD, found)
