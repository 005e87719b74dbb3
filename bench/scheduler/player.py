"""A client process of the live runs, one request: `python -m bench.scheduler.player JOB`, JOB being a JSON object.

It answers "ready", then to each line with the microseconds of a layer's compute window "armed", and to the line after
it, the monotonic time at which to start, with a JSON object: what it saw, or what was wrong. Windows are played by
sleeping; every byte is compared afterwards.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from adapters.nixl_agent import NixlFailure, leave
from bench.content import Bytes, Content, VerificationError, make_content, verify_payload
from bench.jobs import BUCKET
from bench.ttft.play import LAYER_TIMEOUT_S, Waits, play
from bench.ttft.sources import FetchedLayers
from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from nixl_client.client import ObjectCacheClient, Transport


@dataclass(frozen=True, slots=True)
class PlayerJob:
    """What to fetch, and where; the content has a seed of its own."""

    url: str
    access_key: str
    secret_key: str
    transport: str
    prefix: str
    chunk_count: int
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    seed: int

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S."""
        return ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.layout.payload_bytes(self.chunk_count)

    def content(self) -> Content:
        """Of the chunks."""
        return make_content(self.chunk_count, self.layout, self.seed)

    def keys(self) -> list[str]:
        """Any names do."""
        return [f"scheduler/{self.prefix}/{index:06d}" for index in range(self.chunk_count)]

    def to_line(self) -> str:
        """The form `from_line` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> PlayerJob:
        """The inverse of `to_line`."""
        return PlayerJob(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, in seconds since the common start: its first token, and each layer when it was there. The rate and
    the epoch are what the server said before layer 0.
    """

    ttft_s: float
    ready_s: tuple[float, ...]
    rate_bytes_per_s: float
    epoch: int

    @property
    def spacing_s(self) -> float:
        """Between layers, on the average."""
        return (self.ready_s[-1] - self.ready_s[0]) / max(1, len(self.ready_s) - 1)


def main() -> int:
    """Serve commands until standard input ends."""
    job = PlayerJob.from_line(sys.argv[1])
    content = job.content()
    client = ObjectCacheClient(
        job.url, BUCKET, access_key=job.access_key, secret_key=job.secret_key, transport=Transport(job.transport)
    )
    with client:
        buffer = client.allocate_buffer(job.payload_bytes)
        client.register_buffer(buffer)
        _say("ready")
        for line in sys.stdin:
            compute_us = int(line)
            buffer.fill(0)
            _say("armed")
            start_at_s = float(sys.stdin.readline())
            try:
                seen = _fetch(job, client, buffer, compute_us, start_at_s)
                verify_payload(buffer, content, Delivery.LAYER_MAJOR)
            except (ObjectCacheError, NixlFailure, TimeoutError, VerificationError) as error:
                _say(json.dumps({"problem": str(error), "wrong_bytes": isinstance(error, VerificationError)}))
                continue
            _say(json.dumps({"seen": asdict(seen)}))
    return 0


def _fetch(job: PlayerJob, client: ObjectCacheClient, buffer: Bytes, compute_us: int, start_at_s: float) -> Seen:
    keys = job.keys()
    windows_us = [compute_us] * job.num_layers
    time.sleep(max(0.0, start_at_s - time.monotonic()))
    with client.fetch(
        keys, job.layout, buffer, delivery=Delivery.LAYER_MAJOR, layer_compute_us=windows_us
    ) as fetch:  # fmt: skip
        played = play(FetchedLayers(fetch), job.num_layers, compute_us / 1e6, start_at_s, Waits.ALL)
        result = fetch.wait(LAYER_TIMEOUT_S)
        grant = fetch.grant
    if result.transferred_bytes != job.payload_bytes:
        raise VerificationError(f"{result.transferred_bytes} bytes of {job.payload_bytes} came")
    return Seen(played.ttft_s, played.ready_s, float(grant.rate_bytes_per_s), grant.epoch)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    leave(main())
