"""The options of SGLang's back-end, from `--hicache-storage-backend-extra-config`."""

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
FACTORY_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""The names that SGLang itself reads of the same table, and leaves there."""
WAIT_MAX_S = 600


@dataclass(frozen=True, slots=True)
class HiCacheOptions:
    """The back-end's options, checked. Every time is in seconds."""

    endpoint: str
    bucket: str = BUCKET
    """Made as a cache where it is missing."""
    transport: Transport = Transport.AUTO
    http_connections: int = 1
    """How many connections a large load over http uses, each for some of its pages."""
    downlink_bytes_per_s: float = 0.0
    """Over shm and ucx all storage servers together write no faster into this process's memory. 0: not limited."""
    load_timeout_s: float = 10.0
    """A batch that takes longer is given up; what has not come is computed."""
    lookup_timeout_s: float = 2.0
    """A lookup that takes longer is a miss."""
    retry_s: float = 5.0
    """After a request that was not answered nothing is asked for so long; twice as long each time, to a minute."""
    lease_s: float = 60.0
    """For so long pages that a lookup found are kept from eviction."""
    content_class: str = ""
    """The kind of this engine's content, `code` or `chat` (docs/guides/compression.md). Empty for none."""
    epoch: str = ""
    """Part of the names. Change it where the weights change and the model's name does not, and they are not in files
    that can be told apart.
    """
    store: bool = True
    """Whether to write what is missing."""
    store_timeout_s: float = 10.0
    """A batch that takes longer to store is dropped: it keeps pages of the host pool from other requests."""
    staging_bytes: int = 64 << 20
    """A buffer for pages that do not go straight into the host pool; a larger batch goes in several requests."""

    def __post_init__(self) -> None:
        if not self.endpoint or not self.bucket:
            raise ValueError("the back-end needs endpoint: where ObjectCache listens, http://HOST:PORT")
        for name in ("load_timeout_s", "lookup_timeout_s", "store_timeout_s"):
            if not 0 < getattr(self, name) <= WAIT_MAX_S:
                raise ValueError(f"{name} must be more than 0 and at most {WAIT_MAX_S}")
        for name in ("retry_s", "lease_s"):
            if not 0 <= getattr(self, name) <= 3600:
                raise ValueError(f"{name} must be from 0 to 3600")
        if not 1 <= self.http_connections <= HTTP_CONNECTIONS_MAX:
            raise ValueError(f"http_connections must be from 1 to {HTTP_CONNECTIONS_MAX}")
        if self.content_class and not CONTENT_CLASS.fullmatch(self.content_class):
            raise ValueError(f"content_class has {CONTENT_CLASS_RULE}")
        if len(self.epoch) > 64:
            raise ValueError("epoch has at most 64 characters")
        if self.staging_bytes < 1:
            raise ValueError("staging_bytes must be at least 1")
        require_downlink(self.downlink_bytes_per_s)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> HiCacheOptions:
        """Options from SGLang's table. Raises ValueError for unknown names, for values that cannot be, and where SGLang
        would copy each page through tensors of its own.
        """
        if not given.get("interface_v1"):
            raise ValueError('set "interface_v1": 1 in --hicache-storage-backend-extra-config: pages go without copies')
        own = {name: value for name, value in given.items() if name not in FACTORY_KEYS}
        arguments = connector_arguments(cls, own, {"transport": Transport}, PROMISED)
        return cls(**{"endpoint": "", **arguments})
