"""A client process of the benchmark: `python -m bench.concurrency.fetcher JOB`, JOB being a JSON object.

It answers "ready", then to each line `TRANSPORT FIRST COUNT` with "armed" and to the line after it, the monotonic time
at which to start, with a JSON object: the times of each fetch, or what was wrong.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from adapters.nixl_agent import NixlFailure, leave
from bench.concurrency.waves import RequestTimes
from bench.content import Bytes, Content, VerificationError, make_content, verify_payload
from bench.jobs import BUCKET
from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from nixl_client.client import ObjectCacheClient, Transport

FETCH_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """Where to fetch what. Prefix number p has content of seed `seed` + p; fetch number i is of prefix i % count."""

    url: str
    access_key: str
    secret_key: str
    transports: tuple[str, ...]
    chunk_count: int
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    prefix_count: int
    seed: int
    fetches_max: int

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S."""
        return ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.layout.payload_bytes(self.chunk_count)

    def contents(self) -> list[Content]:
        """Of each prefix."""
        return [make_content(self.chunk_count, self.layout, self.seed + index) for index in range(self.prefix_count)]

    def keys(self, prefix_index: int) -> list[str]:
        """Of a prefix's chunks: any names do."""
        return [f"concurrency/{prefix_index:04d}/{index:06d}" for index in range(self.chunk_count)]

    def to_line(self) -> str:
        """The form `from_line` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> Job:
        """The inverse of `to_line`."""
        fields = json.loads(line)
        return Job(**{**fields, "transports": tuple(fields["transports"])})


def main() -> int:
    """Serve commands until standard input ends."""
    job = Job.from_line(sys.argv[1])
    contents = job.contents()
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(
                ObjectCacheClient(
                    job.url, BUCKET, access_key=job.access_key, secret_key=job.secret_key, transport=Transport(name)
                )
            )
            for name in job.transports
        }
        buffer = next(iter(clients.values())).allocate_buffer(job.payload_bytes * job.fetches_max)
        for client in clients.values():
            client.register_buffer(buffer)
        _say("ready")
        for line in sys.stdin:
            name, first, count = line.split()
            buffer[: int(count) * job.payload_bytes].fill(0)
            _say("armed")
            start_at_s = float(sys.stdin.readline())
            try:
                times = _wave(job, clients[name], buffer, int(first), int(count), start_at_s)
                _verify(job, contents, buffer, int(first), int(count))
            except (ObjectCacheError, NixlFailure, TimeoutError, VerificationError) as error:
                _say(json.dumps({"problem": str(error), "wrong_bytes": isinstance(error, VerificationError)}))
                continue
            _say(json.dumps({"times": [asdict(each) for each in times]}))
    return 0


def _wave(
    job: Job, client: ObjectCacheClient, buffer: Bytes, first: int, count: int, start_at_s: float
) -> list[RequestTimes]:
    time.sleep(max(0.0, start_at_s - time.monotonic()))
    fetches = []
    with ExitStack() as stack:
        for index in range(count):
            asked_s = time.monotonic() - start_at_s
            keys = job.keys((first + index) % job.prefix_count)
            fetch = client.fetch(
                keys, job.layout, buffer, offset=index * job.payload_bytes, delivery=Delivery.LAYER_MAJOR
            )
            fetches.append((asked_s, stack.enter_context(fetch)))
        times = []
        for asked_s, fetch in fetches:
            fetch.wait(FETCH_TIMEOUT_S)
            ready_s = [fetch.wait_layer(layer).ready_at_s - start_at_s for layer in range(job.num_layers)]
            times.append(RequestTimes(asked_s, ready_s[0], max(ready_s)))
    return times


def _verify(job: Job, contents: list[Content], buffer: Bytes, first: int, count: int) -> None:
    for index in range(count):
        start = index * job.payload_bytes
        content = contents[(first + index) % job.prefix_count]
        verify_payload(buffer[start : start + job.payload_bytes], content, Delivery.LAYER_MAJOR)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    leave(main())
