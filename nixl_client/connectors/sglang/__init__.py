"""SGLang's HiCache over ObjectCache: `ObjectCacheHiCache`, for `--hicache-storage-backend dynamic`.

The class is imported when it is asked for, so that the parts that decide can be used where SGLang is not installed.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ObjectCacheHiCache":
        return importlib.import_module(f"{__name__}.backend").ObjectCacheHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
