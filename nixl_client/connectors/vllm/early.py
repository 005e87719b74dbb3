"""The options and the store are checked before vLLM loads its weights, which takes minutes.

vLLM asks a connector's class early, when it makes its configuration, whether CUDA graphs must end at layers: the first
call that has the connector's options. It does not ask where no graphs are used (CPUs, `--enforce-eager`); there the
scheduler's side is the first to say whether the store is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from nixl_client.client import Client
from nixl_client.connectors.startup import say
from nixl_client.connectors.vllm.options import VllmOptions

_checked: set[str] = set()


def check_early(extra_config: Mapping[str, object]) -> None:
    """Check the options, and say whether the store is there, once for the same options. Raises ValueError for options
    that cannot be.
    """
    options = VllmOptions.of(extra_config)
    same = json.dumps(extra_config, sort_keys=True, default=str)
    if same in _checked:
        return
    _checked.add(same)
    with Client(options.endpoint, options.bucket, timeout_s=options.lookup_timeout_s) as client:
        say(client)
