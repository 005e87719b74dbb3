"""One vLLM engine that lives as long as its standard input: a JSON command a line, a line with its answer for each.

The first line holds the engine's arguments. Run with the engines' interpreter by `tests.engines.multi_engine`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from contextlib import suppress
from typing import Any

ANSWER = "ANSWER "
SETTLE_S = 30.0
_PREFIX = "vllm:objectcache_"
_ENDED = ("stored_chunks", "stored_already_chunks", "dropped_chunks")


def generate(llm: Any, work: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of the prompts, one after the other."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    transfer = work.get("transfer")
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=work["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    lora = LoRARequest(*work["lora"]) if work.get("lora") else None
    outputs = []
    for prompt in work["prompts"]:
        text = TokensPrompt(prompt_token_ids=prompt["tokens"])
        if prompt["salt"]:
            text["cache_salt"] = prompt["salt"]
        outputs += llm.generate([text], sampling, use_tqdm=False, lora_request=lora)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "transfer": [output.kv_transfer_params for output in outputs],
    }


def settle(llm: Any, work: dict[str, Any]) -> dict[str, float]:
    """The connector's Prometheus counters, once so many chunks have been written, found stored or dropped."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        sums: dict[str, float] = {}
        for metric in llm.get_metrics():
            if metric.name.startswith(_PREFIX):
                name = metric.name[len(_PREFIX) :]
                sums[name] = sums.get(name, 0) + metric.value
        if sum(sums.get(name, 0) for name in _ENDED) >= work["chunks"] or time.monotonic() > deadline_s:
            return sums
        _step(llm)


def held_blocks(llm: Any, work: dict[str, Any]) -> int:
    """Blocks that are not free although there is no request, after a while. Engines in this process only."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    deadline_s = time.monotonic() + SETTLE_S
    while (held := pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) and time.monotonic() < deadline_s:
        _step(llm)
    return int(held)


def groups(llm: Any, work: dict[str, Any]) -> list[list[Any]]:
    """Kind, window and layers of each of the engine's cache groups. Engines in this process only."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return [
        [type(spec).__name__, getattr(spec, "sliding_window", None), len(group.layer_names)]
        for group in config.kv_cache_groups
        for spec in [group.kv_cache_spec]
    ]


def keys(llm: Any, work: dict[str, Any]) -> list[list[str]]:
    """For each rank the keys of the prompt's whole chunks, in order. Engines in this process only."""
    from nixl_client.connectors.vllm.naming import KeyChain

    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    deployment, chunk_tokens = connector._ledger.deployment, connector._setup.grid.chunk_tokens
    chains = [KeyChain(deployment.namespace(rank, "", ""), chunk_tokens) for rank in range(deployment.rank_count)]
    return [list(chain.keys(work["tokens"], len(work["tokens"]) // chunk_tokens)) for chain in chains]


def forget(llm: Any, work: dict[str, Any]) -> bool:
    """Empty the engine's own prefix cache."""
    return bool(llm.reset_prefix_cache())


def main() -> None:
    """Answer until there are no more commands, then shut down."""
    _name_nixl()
    from vllm import LLM

    commands = {each.__name__: each for each in (generate, settle, held_blocks, groups, keys, forget)}
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "block_size": 32,
        "dtype": "float32",
        "max_model_len": 1024,
        "num_gpu_blocks_override": 400,
        "seed": 0,
        "enforce_eager": True,
        "disable_log_stats": False,
        "async_scheduling": False,
    }
    llm = LLM(**(arguments | json.loads(sys.stdin.readline())))
    _answer("started")
    for line in sys.stdin:
        work = json.loads(line)
        _answer(commands[work["do"]](llm, work))
    llm.llm_engine.engine_core.shutdown()


def _step(llm: Any) -> None:
    """The engine takes a step only for a request; one of fewer tokens than a block leaves nothing behind."""
    generate(llm, {"prompts": [{"tokens": [1, 2], "salt": ""}], "max_tokens": 2})
    time.sleep(0.02)  # other threads go on meanwhile


def _name_nixl() -> None:
    """vLLM looks for NIXL by a name that only a package of names brings; the wheel itself is enough."""
    for part in ("", "._api", "._bindings"):
        with suppress(ImportError):
            sys.modules.setdefault(f"nixl{part}", importlib.import_module(f"nixl_cu12{part}"))


def _answer(value: object) -> None:
    print(ANSWER + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
