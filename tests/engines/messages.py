"""What a test and an engine's process tell each other, a line of JSON each. Imported on both sides."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class Operation(Enum):
    """What an engine can be asked."""

    GENERATE = "generate"
    FORGET = "forget"
    """Empty the engine's own prefix cache."""
    KEYS = "keys"
    WATCH = "watch"
    """Digest what loads leave in the blocks, from now on."""
    LOADED = "loaded"
    STOP = "stop"


class Moment(Enum):
    """When the engine waits for the test to disturb it, once."""

    LOOKUP = "lookup"
    """Before a lookup is sent."""
    MATCHED = "matched"
    """After a lookup that found something, before the load."""
    LAYER = "layer"
    """After the first layer of a load is in its blocks."""
    PUT = "put"
    """Before the first chunks are put."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, the tenant's salt, and the seed of an image that stands before the text; 0: none."""

    tokens: tuple[int, ...]
    salt: str = ""
    image: int = 0
    lora: tuple[str, int, str] | None = None
    """Name, number and path of an adapter."""

    transfer: str = ""
    """`kv_transfer_params`, as JSON."""

    def to_json(self) -> Json:
        lora = None if self.lora is None else list(self.lora)
        transfer = json.loads(self.transfer or "null")
        return {
            "tokens": list(self.tokens),
            "salt": self.salt,
            "image": self.image,
            "lora": lora,
            "transfer": transfer,
        }


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """A vLLM engine: `options` go to `LLM`, `connector` is its kv_connector_extra_config; None is a plain engine. With
    `is_tier` it is that of vLLM's own OffloadingConnector. `is_asynchronous` has the steps overlap, which vLLM does on
    GPUs only.
    """

    model: str
    options: dict[str, Json] = field(default_factory=dict)
    connector: dict[str, Json] | None = None
    is_multiprocess: bool = False
    is_tier: bool = False
    is_asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a generation gave. `counters` are the connector's, `prometheus` vLLM's metrics of the connector, both
    counted during this generation; `lost_blocks` are those not free when all is over.
    """

    tokens: list[list[int]]
    counters: dict[str, float]
    prometheus: dict[str, float]
    preemptions: int
    lost_blocks: int
    has_happened: bool
    """Whether the moment asked for has come."""

    def count(self, name: str) -> int:
        """A counter, 0 when nothing was counted."""
        return int(self.counters.get(name, 0))
