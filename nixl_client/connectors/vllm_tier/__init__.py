"""vLLM's tier over ObjectCache: `ObjectCacheTier` under vLLM's OffloadingConnector, and `ObjectCacheTieringSpec`, which
makes the primary tier so that storage servers on this host may fill it.

The classes are imported when they are asked for, so that the parts that decide can be used where vLLM is not installed.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {"ObjectCacheTier": "tier", "ObjectCacheTieringSpec": "spec"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
