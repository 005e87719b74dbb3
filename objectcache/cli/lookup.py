"""`objectcache lookup`: how much of a prompt an engine would find in the store.

The engine says how it names chunks (its connector publishes that in the engine's metrics), and what the prompt's tokens
are; the store is asked for those keys.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from descriptors.recompute import PrefillCosts
from descriptors.tiers import Tier, counts_of
from descriptors.units import format_bytes
from objectcache.cli.config_values import ConfigError, NoServerError
from objectcache.cli.remote import connected, remote_options, told

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
ANSWER_S = 30.0
PIECE_BYTES = 1 << 20
ANSWER_BYTES_MAX = 64 << 20
PROMPT_BYTES_MAX = 16 << 20
PLACES = {Tier.DRAM: "memory", Tier.DISK: "the data directory", Tier.SERVICE: "the service behind the cache"}
TOKENIZED = (
    "prompt", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "cache_salt"
)  # fmt: skip
"""Fields of a request, of which the engine's /tokenize takes all but the last."""


def add_lookup(commands: Commands, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the command."""
    lookup = commands.add_parser(
        "lookup",
        help="say how much of a prompt is stored for an engine",
        usage="%(prog)s --engine URL [--prompt-file FILE] [options]",
        description="Ask an engine that has the connector for a prompt's tokens and for the way in which it names "
        "chunks, and the store for those chunks. Nothing is computed.",
        parents=parents,
    )
    lookup.add_argument("--engine", required=True, metavar="URL", help="vLLM's address, http://HOST:PORT")
    lookup.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="a prompt's text, or the body of a request as clients send it, with messages or a prompt, and cache_salt "
        "if it has one; default: standard input",
    )
    remote_options(lookup)
    lookup.set_defaults(command=run_lookup)


def run_lookup(options: argparse.Namespace) -> int:
    """0: the store was asked. Raises ConfigError, NoServerError."""
    from objectcache.orchestrator.rules.engine_metrics import METRICS_BYTES_MAX, read_metrics
    from objectcache.orchestrator.store_lookups import named_chunks

    asked = request_of(_prompt(options.prompt_file))
    salt = asked.pop("cache_salt", "")
    published = read_metrics(_asked(options.engine, "/metrics", None, METRICS_BYTES_MAX)).published
    if published is None:
        raise NoServerError(
            f"{options.engine} publishes no names of chunks: it has none of ours that publishes them, or has computed"
            " nothing yet"
        )
    tokens = _tokens(options.engine, asked)
    layout = published.layout
    count = len(tokens) // layout.chunk_tokens
    options.endpoint = options.endpoint or published.endpoint
    found: dict[str, Any] = {
        "engine": options.engine,
        "endpoint": options.endpoint,
        "bucket": published.bucket,
        "tokens": len(tokens),
        "chunk_tokens": layout.chunk_tokens,
        "chunks": count,
        "stored_chunks": 0,
        "tiers": {},
    }
    if count:
        ranks = [keys for keys in named_chunks(published, tokens, salt) if keys]
        with connected(options, published.bucket) as client:
            runs = [client.tiers(keys, accept=published.accept) for keys in ranks]
        # a chunk is loaded where all ranks have it
        shortest = min(runs, key=lambda each: sum(many for _, many in each), default=())
        found["tiers"] = counts_of(shortest)
        found["stored_chunks"] = sum(found["tiers"].values())
    found["stored_tokens"] = found["stored_chunks"] * layout.chunk_tokens
    found["stored_bytes"] = found["stored_chunks"] * layout.chunk_bytes * published.names.rank_count
    costs: PrefillCosts | None = published.prefill
    stored_tokens = found["stored_tokens"]
    found["compute_s"] = None if costs is None else float(costs.prefill_s(stored_tokens, np.zeros(1))[0])
    told(options.json, found, lines_of(found))
    return 0


def lines_of(found: dict[str, Any]) -> list[str]:
    """The answer for people."""
    where = f"{found['bucket']} at {found['endpoint']}"
    share = found["stored_tokens"] / found["tokens"] if found["tokens"] else 0.0
    lines = [
        f"prompt      {found['tokens']:,} tokens, {found['chunks']:,} whole chunks of {found['chunk_tokens']}",
        f"stored      {found['stored_chunks']:,} chunks from the first: {found['stored_tokens']:,} tokens"
        f" ({share:.0%}), {format_bytes(found['stored_bytes'])}, in {where}",
    ]
    if found["tiers"]:
        lines.append(
            f"from        {', '.join(f'{count:,} in {PLACES[tier]}' for tier, count in found['tiers'].items())}"
        )
    if found["stored_tokens"] and found["compute_s"]:
        lines.append(f"computing   {found['compute_s']:.2f} s for these tokens, as the engine has measured")
    return lines


def _prompt(file: Path | None) -> str:
    try:
        data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1) if file is None else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompt-file {file}: {error.strerror}") from None
    if len(data) > PROMPT_BYTES_MAX:
        raise ConfigError(f"the prompt has more than {PROMPT_BYTES_MAX >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt must be UTF-8, and byte {error.start} is not") from None


def request_of(text: str) -> dict[str, Any]:
    """The fields of a request that decide its tokens and keys; a text that is no request is a prompt. Raises
    ConfigError.
    """
    document = _json(text.encode()) if text.lstrip().startswith("{") else None
    if not isinstance(document, dict) or not {"messages", "prompt"} & set(document):
        return {"prompt": text}
    if not isinstance(document.get("cache_salt", ""), str):
        raise ConfigError("cache_salt must be a text")
    prompt = document.get("prompt", "")
    if not isinstance(prompt, str) and not _are_tokens(prompt):
        raise ConfigError("prompt must be one text, or the tokens of one")
    return {name: document[name] for name in TOKENIZED if name in document}


def _tokens(engine: str, asked: dict[str, Any]) -> list[int]:
    if isinstance(asked.get("prompt"), list):
        return list(asked["prompt"])
    document = dict(asked)
    model = _json(_asked(engine, "/v1/models", None, ANSWER_BYTES_MAX))
    try:
        document["model"] = str(model["data"][0]["id"])
        tokens = _json(_asked(engine, "/tokenize", document, ANSWER_BYTES_MAX))["tokens"]
    except (KeyError, IndexError, TypeError):
        raise NoServerError(f"{engine} answers, but not as an engine does") from None
    if not _are_tokens(tokens):
        raise NoServerError(f"{engine}: its /tokenize answers no tokens")
    return list(tokens)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in value)


def _asked(engine: str, path: str, document: Any, bytes_max: int) -> bytes:
    """The body of an answer. Raises NoServerError."""
    url = engine.rstrip("/") + path
    body = None if document is None else json.dumps(document).encode()
    try:
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"} if body else {})
        until_s = time.monotonic() + ANSWER_S
        data = b""
        with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
            while len(data) <= bytes_max and (piece := answer.read1(min(PIECE_BYTES, bytes_max + 1 - len(data)))):
                data += piece
                if time.monotonic() > until_s:
                    raise TimeoutError(f"no whole answer in {ANSWER_S:.0f} s")
    except urllib.error.HTTPError as error:
        raise NoServerError(f"{url} answers {error.code}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise NoServerError(f"no engine at {engine}: {getattr(reason, 'strerror', None) or reason}") from None
    if len(data) > bytes_max:
        raise NoServerError(f"{url} answers more than {bytes_max >> 20} MiB")
    return data


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
