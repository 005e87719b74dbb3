"""Real `vllm serve` processes on CPUs, with a small seeded model, a trained tokenizer, a chat template, KV events
and our connector.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.beds.connector_extra import extra_config
from bench.beds.kv_peers.install import ENGINES
from bench.beds.kv_peers.work import S3Target
from bench.beds.processes import BaselineError, end, free_port, last_words
from objectcache.calibration.origin import python_path

MODEL = "tiny"
START_S = 300.0
CONTEXT_TOKENS = 4096
BLOCK_TOKENS = 32
"""vLLM on CPUs takes multiples of 32."""
TIER_MEMORY_BYTES = 64 << 20
VOCABULARY = 1024
SEED = 7
NICE = 15
"""The niceness of the engines' process groups. Engines elsewhere compute on GPUs; here they take the cores that the
store, the orchestrator and the clients need, too, which therefore get their turn first.
"""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEXT = Path(__file__).resolve().parents[2] / "objectcache" / "demo" / "document.txt"


def make_model(folder: Path, *, hidden_size: int = 256, layers: int = 4) -> None:
    """Write a small Llama with seeded weights, its tokenizer (BPE, trained on a text of this project), and a chat
    template, as transformers writes them.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.15,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(TEXT)], trainer)
    wrapped: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


@dataclass
class VllmServer:
    """A running one. `log` has everything it said."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    command: Sequence[str]
    environment: dict[str, str] = field(repr=False)

    def get(self, path: str, timeout_s: float = 10.0) -> str:
        """The answer to a GET. Raises OSError, HTTPException."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def post(self, path: str, document: Any = None, timeout_s: float = 120.0) -> Any:
        """The answer to a POST. Raises OSError, HTTPException."""
        body = json.dumps(document or {}).encode()
        asked = urllib.request.Request(f"{self.url}{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def forget(self) -> None:
        """Empty its prefix cache."""
        self.post("/reset_prefix_cache")

    def await_ready(self) -> None:
        """Return when it serves. Raises BaselineError."""
        until_s = time.monotonic() + START_S
        while True:
            try:
                self.get("/health", 2.0)
                return
            except (OSError, http.client.HTTPException, urllib.error.URLError):
                if self.process.poll() is not None or time.monotonic() >= until_s:
                    raise BaselineError(f"vLLM does not start:\n{last_words(self.log)}") from None
                time.sleep(0.2)

    def kill(self) -> None:
        """With everything it started."""
        with_group(self.process, signal.SIGKILL)
        self.process.wait()

    def start_again(self) -> None:
        """After a kill."""
        self.process = _spawn(self.command, self.environment, self.log)
        self.await_ready()


def with_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and those that it started."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


@contextmanager
def vllm_servers(
    folder: Path,
    model: Path,
    count: int,
    store: S3Target | None = None,
    *options: str,
    extra: Mapping[str, object] | None = None,
    has_tier: bool = False,
) -> Iterator[list[VllmServer]]:
    """Some servers at once, each with one thread, until the block ends; `extra` are options of our connector, or with
    `has_tier` of our tier. Raises BaselineError.
    """
    if not ENGINES.is_installed:
        raise BaselineError("the engines' environment is missing or out of date: run `make engines`")
    servers: list[VllmServer] = []
    try:
        for at in range(count):
            transfer = None if store is None else _transfer(store, extra or {}, has_tier=has_tier)
            servers.append(_started(folder, model, at, store, options, transfer))
        for server in servers:
            server.await_ready()
        yield servers
    finally:
        for server in servers:
            with_group(server.process, signal.SIGTERM)
        for server in servers:
            end(server.process)
            with_group(server.process, signal.SIGKILL)


def _transfer(store: S3Target, extra: Mapping[str, object], *, has_tier: bool) -> dict[str, object]:
    """vLLM's kv_transfer_config."""
    where = {"endpoint": store.url, "bucket": store.bucket}
    if has_tier:
        spec = {"spec_name": "ObjectCacheTieringSpec", "spec_module_path": "nixl_client.connectors.vllm_tier"}
        options = {**spec, "cpu_bytes_to_use": TIER_MEMORY_BYTES, **where, **extra}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    return {
        "kv_connector": "ObjectCacheConnector", "kv_connector_module_path": "nixl_client.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra_config({**where, **extra}),
    }  # fmt: skip


def _started(
    folder: Path,
    model: Path,
    at: int,
    store: S3Target | None,
    options: Sequence[str],
    transfer: Mapping[str, object] | None,
) -> VllmServer:
    port, events, replay = free_port(), free_port(), free_port()
    kv_events = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
        "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}",
    }  # fmt: skip
    command = [
        str(ENGINES.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
        MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len",
        str(CONTEXT_TOKENS), "--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "16", "--max-num-batched-tokens",
        "2048", "--no-async-scheduling", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(kv_events),
        *options,
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(at % 2),
        "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    if store is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment |= {"AWS_ACCESS_KEY_ID": store.access_key, "AWS_SECRET_ACCESS_KEY": store.secret_key}
    log = folder / f"vllm-{at}.log"
    return VllmServer(f"http://127.0.0.1:{port}", _spawn(command, environment, log), log, command, environment)


def _spawn(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True
        )
    os.setpriority(os.PRIO_PGRP, process.pid, NICE)
    with suppress(OSError):  # Linux weighs sessions against each other by this, where it groups them
        Path(f"/proc/{process.pid}/autogroup").write_text(str(NICE))
    return process
