"""The options in `kv_connector_extra_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from descriptors.chunk_flags import CONTENT_CLASS, CONTENT_CLASS_RULE
from descriptors.descriptor import CHUNK_TOKENS_MAX, Delivery
from nixl_client.lossy import MAX_ERROR, Lossy
from nixl_client.options import BUCKET, connector_arguments, require_downlink
from nixl_client.transports.transport import HTTP_CONNECTIONS_MAX, Transport

STAGING_BYTES_MAX = 1 << 30
PROMISED = frozenset(
    {
        "endpoint", "bucket", "transport", "downlink_bytes_per_s", "chunk_tokens", "model", "staging_bytes", "staging",
        "load_timeout_s", "lossy", "content_class", "store", "native",
    }
)  # fmt: skip
"""The options that users have. The others are in `internals`, and may change with each version."""
WAIT_MAX_S = 120
"""vLLM takes a step of five minutes for a worker that hangs."""


class StagingMemory(Enum):
    """Which memory a buffer is in."""

    HOST = "host"
    DEVICE = "device"


class LoadPolicy(Enum):
    """How much of what is stored is loaded."""

    ADVISED = "advised"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """The connector's options, checked. Every time is in seconds and bounds a wait of the engine."""

    endpoint: str
    bucket: str = BUCKET
    """Made as a cache where it is missing."""
    transport: Transport = Transport.AUTO
    http_connections: int = 1
    """How many connections a large load over http uses, each for some of its chunks."""
    downlink_bytes_per_s: float = 0.0
    """Over shm and ucx all storage servers together write no faster into this process's memory. 0: not limited."""
    chunk_tokens: int = 0
    """G; 0 is one chunk to a block of the engine."""
    model: str = ""
    """Names the weights in the keys; empty is the model's name and configuration as the engine knows them."""
    delivery: Delivery = Delivery.AUTO
    """Layer by layer under the computation, in chunks as they lie, or as the server finds better for the size."""
    staging_bytes: int = 0
    """The buffer layers arrive in; what one step of the engine loads fits into it. 0 is room for the longest prompt, at
    most STAGING_BYTES_MAX.
    """
    staging: StagingMemory = StagingMemory.HOST
    """Where that buffer is: in host memory, or on the GPU where UCX can write there."""
    load_timeout_s: float = 30.0
    """From a load's start to its last layer; past it the blocks are recomputed. With synchronous steps a whole step
    waits so long.
    """
    lookup_timeout_s: float = 2.0
    """A lookup that takes longer is a miss."""
    retry_s: float = 5.0
    """After a lookup or a load that failed nothing is looked up for so long; twice as long each time, to a minute."""
    lease_s: float = 60.0
    """For so long chunks that a lookup matched are kept from eviction."""
    load: LoadPolicy = LoadPolicy.ADVISED
    """Load the prefix that is sooner there than computed, at the rate the server offers; or all that is stored."""
    lossy: Lossy = Lossy.OFF
    """Whether chunks may come encoded with a loss: never, with an error of at most `max_error`, or as the server finds
    best for all its readers (docs/guides/compression.md).
    """
    max_error: float = MAX_ERROR
    """The relative error of keys or values that a chunk's worst layer may have where `lossy` is bounded."""
    max_loss: float = math.inf
    """The most KL a token, in nats, that the form of a chunk was measured to cost this model: a bound in
    `lossy`. Infinite for no bound. Where the server has no calibration of the model, chunks come exactly.
    """
    content_class: str = ""
    """The kind of this engine's content, `code` or `chat`: what a codec costs in quality is told by class
    (docs/guides/compression.md). Empty for none.
    """
    native: bool = False
    """Read and write the tier's objects: pages of the engine's own blocks, named by vLLM's hashes."""
    min_load_tokens: int = 0
    """Fewer tokens than these are recomputed, not loaded."""
    store: bool = True
    """Whether to write what is missing."""
    store_queue_chunks: int = 1024
    """Chunks that may wait to be written; past it stores are dropped."""
    store_wait_s: float = 10.0
    """A store that has waited so long is dropped: it keeps blocks from being reused."""
    store_timeout_s: float = 30.0
    drain_s: float = 10.0
    """How long a shutdown waits for stores under way."""

    def __post_init__(self) -> None:
        if not self.endpoint or not self.bucket:
            raise ValueError("kv_connector_extra_config needs endpoint: where ObjectCache listens, http://HOST:PORT")
        if not 0 <= self.chunk_tokens <= CHUNK_TOKENS_MAX:
            raise ValueError(f"chunk_tokens must be from 1 to {CHUNK_TOKENS_MAX}, or 0 for the engine's block size")
        if self.native and (self.chunk_tokens or self.lossy is not Lossy.OFF):
            raise ValueError(
                "native: objects of the tier are one block each, and exact: leave chunk_tokens and lossy out"
            )
        for name in ("load_timeout_s", "lookup_timeout_s", "store_wait_s", "store_timeout_s"):
            if not 0 < getattr(self, name) <= WAIT_MAX_S:
                raise ValueError(f"{name} must be more than 0 and at most {WAIT_MAX_S}")
        for name in ("retry_s", "lease_s", "drain_s"):
            if not 0 <= getattr(self, name) <= 3600:
                raise ValueError(f"{name} must be from 0 to 3600")
        if not 1 <= self.http_connections <= HTTP_CONNECTIONS_MAX:
            raise ValueError(f"http_connections must be from 1 to {HTTP_CONNECTIONS_MAX}")
        if self.content_class and not CONTENT_CLASS.fullmatch(self.content_class):
            raise ValueError(f"content_class has {CONTENT_CLASS_RULE}")
        if not 0 <= self.max_error <= 10:
            raise ValueError("max_error must be from 0 to 10")
        if not self.max_loss >= 0:
            raise ValueError("max_loss must be a number from 0")
        require_downlink(self.downlink_bytes_per_s)
        if self.staging_bytes < 0 or self.store_queue_chunks < 1 or self.min_load_tokens < 0:
            raise ValueError("store_queue_chunks must be at least 1, staging_bytes and min_load_tokens at least 0")

    def with_staging_for(self, prompt_bytes: int) -> VllmOptions:
        """These, with `staging_bytes` chosen where it was left open."""
        return self if self.staging_bytes else replace(self, staging_bytes=min(prompt_bytes, STAGING_BYTES_MAX))

    @property
    def loss_bound(self) -> float | None:
        """The bound of the loss; None for none."""
        return self.max_loss if math.isfinite(self.max_loss) else None

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> VllmOptions:
        """Options from the engine's JSON. Raises ValueError for unknown names and for values that cannot be."""
        enums = {"transport": Transport, "delivery": Delivery, "staging": StagingMemory, "load": LoadPolicy}
        enums["lossy"] = Lossy
        return cls(**{"endpoint": "", **connector_arguments(cls, extra, enums, PROMISED)})
