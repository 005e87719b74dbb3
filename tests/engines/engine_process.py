"""An engine, in the engines' environment, driven by a test over a loopback connection.

python -m tests.engines.engine_process PORT
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from typing import IO, Any

from tests.engines.disturb import hooked, hooked_tier, overlap_steps, watched
from tests.engines.image_model import seeded_image
from tests.engines.messages import EngineSettings, Moment, Operation

SETTLE_S = 60.0
_PREFIX = "vllm:objectcache_"


def drive(port: int) -> None:
    """Start the engine the test describes and do what it asks, until it says stop or goes away."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as stream:
        _answer(stream, {"pid": os.getpid()})
        try:
            engine = RunningEngine(EngineSettings(**json.loads(stream.readline())), stream)
            _answer(stream, {})
            for line in stream:
                request = json.loads(line)
                operation = Operation(request.pop("operation"))
                _answer(stream, getattr(engine, operation.value)(**request))
                if operation == Operation.STOP:
                    return
        except Exception:
            _answer(stream, {"error": traceback.format_exc()})


class RunningEngine:
    """`vllm.LLM`; the methods that answer are named as operations are."""

    def __init__(self, settings: EngineSettings, stream: IO[str]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(settings.is_multiprocess))
        from vllm import LLM

        if settings.is_asynchronous:
            overlap_steps()

        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "block_size": 32,
            "dtype": "float32",
            "max_model_len": 1024,
            "num_gpu_blocks_override": 400,
            "seed": 0,
            "enforce_eager": True,
            "disable_log_stats": False,
            "async_scheduling": settings.is_asynchronous,
        }
        if settings.is_tier:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": settings.connector,
            }
        elif settings.connector is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "ObjectCacheConnector",
                "kv_connector_module_path": "nixl_client.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": settings.connector,
            }
        self._stream = stream
        self._llm = LLM(model=settings.model, **(options | settings.options))
        self._core = None if settings.is_multiprocess else self._llm.llm_engine.engine_core.engine_core
        self._has_connector = settings.connector is not None
        self._digests: dict[str, str] = {}

    @property
    def _is_tier(self) -> bool:
        """Whether vLLM's OffloadingConnector runs, under its own name or ours."""
        return self._core is not None and hasattr(self._core.scheduler.connector, "connector_scheduler")

    def generate(self, prompts: list[dict[str, Any]], max_tokens: list[int], moment: str | None) -> dict[str, Any]:
        """Greedy tokens of these prompts, all at once, and what was counted. `max_tokens` is for each."""
        before = self._metrics(), self._counters()
        has_happened = False
        if moment is None:
            tokens = self._generate(prompts, max_tokens)
            lost_blocks = self._settle()
        else:
            hook = hooked_tier if self._is_tier else hooked
            with hook(Moment(moment), *self._connectors(), self._reach) as once:
                tokens = self._generate(prompts, max_tokens)
                lost_blocks = self._settle()
            has_happened = once.has_happened
        metrics, counters = _since(before[0], self._metrics()), _since(before[1], self._counters())
        return {
            "tokens": tokens,
            "counters": counters,
            "prometheus": {name[len(_PREFIX) :]: value for name, value in metrics.items() if name.startswith(_PREFIX)},
            "preemptions": int(metrics.get("vllm:num_preemptions", 0)),
            "lost_blocks": lost_blocks,
            "has_happened": has_happened,
        }

    def forget(self, is_store_too: bool) -> dict[str, Any]:
        """Empty the engine's prefix cache, and reset the connector with `is_store_too`."""
        return {"is_done": bool(self._llm.reset_prefix_cache(reset_connector=is_store_too))}

    def keys(self, tokens: list[int], salt: str) -> dict[str, Any]:
        """The keys of the whole chunks of a prompt without an image, in order; those of the tier by what vLLM's metrics
        say of it, as a router has them.
        """
        from nixl_client.connectors.vllm.naming import KeyChain
        from nixl_client.connectors.vllm_tier.rules.published import TIER_INFO, parse_names

        published = [metric.labels for metric in self._llm.get_metrics() if metric.name == TIER_INFO]
        if self._is_tier or published:
            (labels,) = published
            chunk_tokens = int(labels["chunk_tokens"])
            count = len(tokens) // chunk_tokens
            return {"keys": list(parse_names(labels).prompt_keys(0, tokens, chunk_tokens, count, salt))}
        scheduler, _ = self._connectors()
        chunk_tokens = scheduler._setup.grid.chunk_tokens
        chain = KeyChain(scheduler._ledger.deployment.namespace(0, "", salt), chunk_tokens)
        return {"keys": list(chain.keys(tokens, len(tokens) // chunk_tokens))}

    def watch(self) -> dict[str, Any]:
        """Digest what loads leave in the blocks."""
        self._digests = watched(self._connectors()[1]._worker)
        return {}

    def loaded(self) -> dict[str, Any]:
        """The digests so far."""
        return {"digests": self._digests}

    def stop(self) -> dict[str, Any]:
        """Shut the engine down."""
        self._llm.llm_engine.engine_core.shutdown()
        return {}

    def _generate(self, prompts: list[dict[str, Any]], max_tokens: list[int]) -> list[list[int]]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest

        texts = []
        for prompt in prompts:
            text = TokensPrompt(prompt_token_ids=prompt["tokens"])
            if prompt["salt"]:
                text["cache_salt"] = prompt["salt"]
            if prompt["image"]:
                text["multi_modal_data"] = {"image": seeded_image(prompt["image"])}
            texts.append(text)
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": prompt["transfer"]} if prompt["transfer"] else None,
            )
            for prompt, count in zip(prompts, max_tokens, strict=True)
        ]
        loras = [LoRARequest(*prompt["lora"]) if prompt["lora"] else None for prompt in prompts]
        adapters = {"lora_request": loras} if any(loras) else {}
        outputs = self._llm.generate(texts, sampling, use_tqdm=False, **adapters)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _settle(self) -> int:
        """Step until nothing is left to do, as the engine's own loop does, and everything is written. The blocks that
        are not free then.
        """
        if self._core is None:
            return 0
        scheduler, deadline_s = self._core.scheduler, time.monotonic() + SETTLE_S
        while (scheduler.has_requests() or not self._is_written()) and time.monotonic() < deadline_s:
            self._llm.llm_engine.step()
            time.sleep(0.002)  # other threads go on meanwhile
        pool = scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def _is_written(self) -> bool:
        if not self._has_connector:
            return True
        if self._is_tier:
            scheduler, traffic = self._connectors()
            return not scheduler._jobs and not scheduler.manager.has_pending_work() and not traffic.book.running_count
        worker = self._connectors()[1]._worker
        writer = getattr(worker, "_writer", None)  # where nothing can be cached there is none
        return writer is None or bool(writer._ledger.is_idle)

    def _connectors(self) -> tuple[Any, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        assert self._core is not None
        if self._is_tier:
            offloading = self._core.scheduler.connector.connector_scheduler
            return offloading, offloading.manager.secondary_tiers[0].traffic
        return self._core.scheduler.connector, get_kv_transfer_group()

    def _counters(self) -> dict[str, float]:
        if self._core is None or not self._has_connector:
            return {}
        scheduler, worker = self._connectors()
        if self._is_tier:
            return dict(worker.counters.totals)
        return {**scheduler.counters.totals, **worker.counters.totals}

    def _metrics(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                sums[metric.name] = sums.get(metric.name, 0) + metric.value
        return sums

    def _reach(self) -> None:
        """Tell the test that the moment has come, and wait for it."""
        _answer(self._stream, {"is_reached": True})
        if not self._stream.readline():
            raise ConnectionError("the test has gone away")


def _since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def _answer(stream: IO[str], answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    drive(int(sys.argv[1]))
