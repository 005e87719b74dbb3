"""The options of our connector in vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nixl_client.connectors.vllm.options import PROMISED


def extra_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options where they belong: those that users have, and the others in `internals`."""
    internals = {name: value for name, value in options.items() if name not in PROMISED}
    promised = {name: value for name, value in options.items() if name in PROMISED}
    return promised | ({"internals": internals} if internals else {})
