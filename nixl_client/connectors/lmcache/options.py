"""The options that LMCache's configuration may give us, the same for both modes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from descriptors.chunk_flags import CONTENT_CLASS, CONTENT_CLASS_RULE
from descriptors.descriptor import CHUNK_TOKENS_MAX
from descriptors.recompute import PrefillCosts
from nixl_client.lossy import MAX_ERROR, Lossy
from nixl_client.options import BUCKET, connector_arguments, require_downlink
from nixl_client.transports.transport import HTTP_CONNECTIONS_MAX, Transport

PROMISED = frozenset(
    {
        "endpoint", "bucket", "transport", "downlink_bytes_per_s", "chunk_tokens", "staging_bytes", "load_timeout_s",
        "lossy", "content_class", "store", "prefill",
    }
)  # fmt: skip
"""The options that users have. The others are in `internals`, and may change with each version."""
COSTS = ("token_us", "token_pair_us", "request_us")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LMCacheOptions:
    """The options, checked. Every time is in seconds and bounds a wait."""

    endpoint: str
    bucket: str = BUCKET
    """Made as a cache where it is missing."""
    transport: Transport = Transport.AUTO
    http_connections: int = 1
    """How many connections a large load over http uses, each for some of its chunks."""
    downlink_bytes_per_s: float = 0.0
    """Over shm and ucx all storage servers together write no faster into this process's memory. 0: not limited."""
    staging_bytes: int = 256 << 20
    """A buffer that chunks arrive in; a larger batch is fetched in several requests."""
    loads_max: int = 2
    """Loads at a time, each with a buffer of its own."""
    load_timeout_s: float = 8.0
    """One batch has so long, whatever its size."""
    lookup_timeout_s: float = 2.0
    """A lookup that takes longer is a miss."""
    retry_s: float = 5.0
    """After a request that was not answered nothing is asked for so long."""
    prefill_token_us: float = 0.0
    """The time of computing, as `objectcache calibrate model` finds it: for each token,"""
    prefill_token_pair_us: float = 0.0
    """for each pair of tokens that attend to each other,"""
    prefill_request_us: float = 0.0
    """and for each step. With any of them only what is sooner loaded than computed counts as stored."""
    chunk_tokens: int = 0
    """Tokens of a chunk. The plug-in knows them; the L2 adapter must be told, to compare loading with computing."""
    lossy: Lossy = Lossy.OFF
    """Whether chunks may come encoded with a loss: never, with an error of at most `max_error`, or as the server finds
    best for all its readers (docs/guides/compression.md).
    """
    max_error: float = MAX_ERROR
    """The relative error of a chunk's keys or values, over all layers together, where `lossy` is bounded."""
    max_loss: float = math.inf
    """The most KL a token, in nats, that the form of a chunk was measured to cost this model: a bound in
    `lossy`. Infinite for no bound. Where the server has no calibration of the model, chunks come exactly.
    """
    content_class: str = ""
    """The kind of this engine's content, `code` or `chat` (docs/guides/compression.md). Empty for none."""
    lease_s: float = 60.0
    """For so long chunks that a lookup matched are kept from eviction."""
    store: bool = True
    """Whether to write what is missing, and to delete what is damaged."""
    store_queue_chunks: int = 256
    """Chunks that may wait to be written; past it stores are dropped."""
    store_timeout_s: float = 30.0
    drain_s: float = 10.0
    """How long a shutdown waits for stores under way."""

    def __post_init__(self) -> None:
        if not self.endpoint or not self.bucket:
            raise ValueError("endpoint is needed: where ObjectCache listens, http://HOST:PORT")
        for name in ("load_timeout_s", "lookup_timeout_s", "store_timeout_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise ValueError(f"{name} must be more than 0 and at most 3600")
        for name in ("retry_s", "lease_s", "drain_s"):
            if not 0 <= getattr(self, name) <= 3600:
                raise ValueError(f"{name} must be from 0 to 3600")
        for name in ("prefill_token_us", "prefill_token_pair_us", "prefill_request_us"):
            if not 0 <= getattr(self, name) < 3.6e9:
                raise ValueError(f"{name} must be from 0 to an hour")
        if not 0 <= self.chunk_tokens <= CHUNK_TOKENS_MAX:
            raise ValueError(f"chunk_tokens must be from 0 to {CHUNK_TOKENS_MAX}")
        for name in ("staging_bytes", "store_queue_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 1 <= self.http_connections <= HTTP_CONNECTIONS_MAX:
            raise ValueError(f"http_connections must be from 1 to {HTTP_CONNECTIONS_MAX}")
        if not 0 <= self.max_error <= 10:
            raise ValueError("max_error must be from 0 to 10")
        if not self.max_loss >= 0:
            raise ValueError("max_loss must be a number from 0")
        if self.content_class and not CONTENT_CLASS.fullmatch(self.content_class):
            raise ValueError(f"content_class has {CONTENT_CLASS_RULE}")
        require_downlink(self.downlink_bytes_per_s)
        if not 1 <= self.loads_max <= 64:
            raise ValueError("loads_max must be from 1 to 64")

    @property
    def prefill(self) -> PrefillCosts | None:
        """The cost of computing; None where the options do not give it."""
        costs = PrefillCosts(self.prefill_token_us, self.prefill_token_pair_us, self.prefill_request_us)
        return costs if costs != PrefillCosts(0.0) else None

    @property
    def loss_bound(self) -> float | None:
        """The bound of the loss; None for none."""
        return self.max_loss if math.isfinite(self.max_loss) else None

    @classmethod
    def of(cls, given: Mapping[str, object]) -> LMCacheOptions:
        """Options from JSON or YAML. Raises ValueError for unknown names and for values that cannot be."""
        enums = {"transport": Transport, "lossy": Lossy}
        values = dict(given)
        costs = values.pop("prefill", {})
        if not isinstance(costs, Mapping) or not set(costs) <= set(COSTS):
            raise ValueError(f"prefill must be a table of some of {', '.join(COSTS)}, not {costs!r}")
        for name in sorted(set(values) & {f"prefill_{name}" for name in COSTS}):
            _log.warning("the option %s is prefill.%s now", name, name.removeprefix("prefill_"))
        values |= {f"prefill_{name}": value for name, value in costs.items()}
        promised = PROMISED | {f"prefill_{name}" for name in COSTS}
        return cls(**{"endpoint": "", **connector_arguments(cls, values, enums, promised)})
