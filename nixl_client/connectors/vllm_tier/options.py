"""The options of the tier, from its entry in `secondary_tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from descriptors.chunk_flags import CONTENT_CLASS, CONTENT_CLASS_RULE
from nixl_client.options import BUCKET, connector_arguments, require_downlink
from nixl_client.transports.transport import HTTP_CONNECTIONS_MAX, Transport

PROMISED = frozenset(
    {"endpoint", "bucket", "transport", "downlink_bytes_per_s", "load_timeout_s", "content_class", "store", "epoch"}
)
"""The options that users have. The others are in `internals`, and may change with each version."""
HAS_ADAPTERS = "objectcache_has_adapters"
"""Our connector sets this beside the options: whether the engine has LoRA. It also tells each request's adapter."""
WAIT_MAX_S = 600
EPOCH_CHARACTERS_MAX = 64


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The tier's options, checked. Every time is in seconds."""

    endpoint: str
    bucket: str = BUCKET
    """Made as a cache where it is missing."""
    transport: Transport = Transport.AUTO
    http_connections: int = 1
    """How many connections a large load over http uses, each for some of its chunks."""
    downlink_bytes_per_s: float = 0.0
    """Over shm and ucx all storage servers together write no faster into this process's memory. 0: not limited."""
    load_timeout_s: float = 10.0
    """A load that takes longer is given up; what has not come is computed."""
    lookup_timeout_s: float = 2.0
    """A lookup that takes longer is a miss."""
    retry_s: float = 5.0
    """After a request that was not answered nothing is asked for so long; twice as long each time, to a minute."""
    lease_s: float = 60.0
    """For so long chunks that a lookup found are kept from eviction."""
    content_class: str = ""
    """The kind of this engine's content, `code` or `chat` (docs/guides/compression.md). Empty for none."""
    epoch: str = ""
    """Part of the names. Change it where the weights change and the model's name does not, and they are not in files
    that can be told apart.
    """
    store: bool = True
    """Whether to write what is missing."""
    store_queue_chunks: int = 4096
    """Chunks that may wait to be written; past it stores are dropped."""
    store_wait_s: float = 10.0
    """A store that has waited so long is dropped: it keeps slots of the primary tier."""
    store_timeout_s: float = 30.0
    staging_bytes: int = 64 << 20
    """A buffer for objects that do not lie in a row as they are stored; a larger load goes in several requests."""
    drain_s: float = 10.0
    """How long a shutdown waits for stores under way."""

    def __post_init__(self) -> None:
        if not self.endpoint or not self.bucket:
            raise ValueError("the tier needs endpoint: where ObjectCache listens, http://HOST:PORT")
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
        if len(self.epoch) > EPOCH_CHARACTERS_MAX:
            raise ValueError(f"epoch has at most {EPOCH_CHARACTERS_MAX} characters")
        if self.store_queue_chunks < 1 or self.staging_bytes < 1:
            raise ValueError("store_queue_chunks and staging_bytes must be at least 1")
        require_downlink(self.downlink_bytes_per_s)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> TierOptions:
        """Options from the engine's JSON. Raises ValueError for unknown names and for values that cannot be."""
        arguments = connector_arguments(cls, given, {"transport": Transport}, PROMISED)
        return cls(**{"endpoint": "", **arguments})
