"""Values that travel in lines between a bench and a peer's process: the work, and the answers.

    N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes

A peer fetches N chunk objects of L*S bytes. Layer-major: every layer's slices of all chunks, layer after layer, into
one contiguous buffer. Chunk-major: the chunks as they are.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.beds.processes import answer_lines, say, take_answers
from bench.core.lines import from_line, to_line
from descriptors.layout import ChunkLayout
from objectcache.calibration.content import Bytes, Content, VerificationError, make_content, verify_slices


@dataclass(frozen=True, slots=True)
class S3Target:
    """An S3 server and the bucket the objects are in."""

    url: str
    access_key: str
    secret_key: str
    bucket: str
    region: str

    @property
    def address(self) -> str:
        """BUCKET.localhost:PORT, for LMCache, which addresses a bucket by Host name alone."""
        return f"{self.bucket}.localhost:{urlsplit(self.url).port}"

    def proxy(self) -> dict[str, str]:
        """Variables with which that name is reached: where it does not resolve, the server itself is the proxy."""
        try:
            socket.getaddrinfo(f"{self.bucket}.localhost", urlsplit(self.url).port)
        except socket.gaierror:
            return {"HTTP_PROXY": self.url}
        return {}


@dataclass(frozen=True, slots=True)
class Work:
    """The chunks, in prefix order, and where they are; `s3` is None for a peer that stores them itself.

    `slices_max` bounds the sample that peers take which ask for one slice at a time.
    """

    keys: tuple[str, ...]
    layout: ChunkLayout
    seed: int
    slices_max: int
    s3: S3Target | None = None

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.layout.delivery_bytes(len(self.keys))

    def content(self) -> Content:
        """The bytes of the chunks, which the seed makes."""
        return make_content(len(self.keys), self.layout, self.seed)

    @property
    def sampled_layers(self) -> int:
        """Whole layers of which a sample of slices consists: at least one, at most all."""
        return min(self.layout.num_layers, max(1, self.slices_max // len(self.keys)))


@dataclass(frozen=True, slots=True)
class Capability:
    """One configuration of a peer: `nbytes` is what a run of it moves, `note` what is not obvious about it."""

    name: str
    nbytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: seconds until everything was there, and until the first layer was, where that can be told.

    `problem` is the first failure or wrong byte; times beside a problem are worth nothing.
    """

    duration_s: float
    first_layer_s: float | None = None
    problem: str | None = None


Run = Callable[[], tuple[float, float | None]]
"""One run: seconds in all and until the first layer. Raises VerificationError for wrong bytes."""


def sampled(work: Work) -> str:
    """For a note: how many slices the sample has, of all."""
    slice_count, total = (count * len(work.keys) for count in (work.sampled_layers, work.layout.num_layers))
    return f"{'all' if slice_count == total else f'a sample of {slice_count} of'} {total} slices"


def verify_first_layers(payload: Bytes, content: Content, layer_count: int) -> None:
    """Compare the first layers of a layer-major payload. Raises VerificationError."""
    layers = payload.reshape(-1, content.chunk_count, content.layout.per_layer_chunk_bytes)[:layer_count]
    for layer_index, layer in enumerate(layers):
        verify_slices(layer, content, layer_index)


def serve(start: Callable[[Work], Sequence[tuple[Capability, Run]]], file: str) -> None:
    """Serve the runs that `start` offers for the work described in the file.

    Standard output belongs to the answers: what libraries print goes to a log beside that file.
    """
    answers = take_answers(log_of(Path(file)))
    found = start(from_line(Work, Path(file).read_text()))
    runs = {capability.name: run for capability, run in found}
    say(to_line([capability for capability, _ in found]), answers)

    def failed(error: Exception) -> str:
        wrong = isinstance(error, VerificationError)
        return to_line(Outcome(0.0, problem=str(error) if wrong else f"{type(error).__name__}: {error}"))

    answer_lines(answers, lambda name: to_line(Outcome(*runs[name]())), failed)


def log_of(work: Path) -> Path:
    """Where a peer with that file of work writes what it has to say."""
    return work.with_suffix(".log")
