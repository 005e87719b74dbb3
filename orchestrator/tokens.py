"""The tokens of prompts: from the engine's own `/tokenize`, or from the model's tokenizer file with its chat template.
They are kept, since the same beginnings come again and again.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from orchestrator.rules.openai_requests import are_tokens, tokenize_key

TOKENS_MAX = 4 << 20
TOKENIZE_S = 10.0
TEMPLATE_CHARACTERS_MAX = 4 << 20


class NoTokensError(Exception):
    """The tokens of a prompt cannot be had; the request is routed without them."""


class TokenCache:
    """Tokens by what they were made of. Takes `bytes_max` bytes; what was used longest ago leaves."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._tokens: OrderedDict[str, np.ndarray[Any, np.dtype[np.uint32]]] = OrderedDict()
        self._used_bytes = 0
        self.hit_count = 0
        self.miss_count = 0

    def find(self, key: str) -> list[int] | None:
        """The tokens; None where they are not known."""
        found = self._tokens.get(key)
        if found is None:
            self.miss_count += 1
            return None
        self.hit_count += 1
        self._tokens.move_to_end(key)
        return [int(each) for each in found.tolist()]

    def keep(self, key: str, tokens: Sequence[int]) -> None:
        """Keep the tokens, if they are not too many."""
        packed = np.asarray(tokens, dtype=np.uint32)
        nbytes = packed.nbytes + len(key)
        if nbytes > self._bytes_max // 4 or key in self._tokens:
            return
        self._tokens[key] = packed
        self._used_bytes += nbytes
        while self._used_bytes > self._bytes_max:
            old, left = self._tokens.popitem(last=False)
            self._used_bytes -= left.nbytes + len(old)


class LocalTokenizer:
    """A model's `tokenizer.json`, and its chat template where it has one, from a directory. The template is run in
    jinja2's sandbox. Raises OSError or ValueError where they cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        file = folder if folder.is_file() else folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library's own errors have no class of their own
            raise ValueError(f"{file}: {error}") from None
        self._template: Any = None
        self._names: Mapping[str, Any] = {}
        config_file = file.with_name("tokenizer_config.json")
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        template_file = file.with_name("chat_template.jinja")
        template = template_file.read_text() if template_file.is_file() else config.get("chat_template")
        if isinstance(template, str) and len(template) <= TEMPLATE_CHARACTERS_MAX:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
            environment.globals["raise_exception"] = _refuse
            self._template = environment.from_string(template)
            self._names = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}

    def tokens(self, document: Mapping[str, Any]) -> list[int]:
        """The tokens of a `/tokenize` document. Raises NoTokensError where the template refuses, or is missing."""
        if "prompt" in document:
            adds = bool(document.get("add_special_tokens", True))
            return list(self._tokenizer.encode(document["prompt"], add_special_tokens=adds).ids)
        if self._template is None or document.get("chat_template") is not None:
            raise NoTokensError("there is no chat template for these messages")
        extra = document.get("chat_template_kwargs") or {}
        try:
            text = self._template.render(
                **{
                    **self._names,
                    "messages": [_flattened(message) for message in document["messages"]],
                    "tools": document.get("tools"),
                    "add_generation_prompt": document.get("add_generation_prompt", True),
                    **extra,
                }
            )
        except Exception as error:  # a template may raise anything
            raise NoTokensError(f"the chat template: {error}") from None
        adds = bool(document.get("add_special_tokens", False))
        return list(self._tokenizer.encode(text, add_special_tokens=adds).ids)


class Tokens:
    """Tokens of prompts. With `local` no engine is asked."""

    def __init__(self, http: aiohttp.ClientSession, cache: TokenCache, local: LocalTokenizer | None = None) -> None:
        self._http = http
        self._cache = cache
        self._local = local
        self._timeout = aiohttp.ClientTimeout(total=TOKENIZE_S)

    async def of(
        self, document: Mapping[str, Any], urls: Sequence[str], headers: Mapping[str, str], *, is_large: bool = False
    ) -> Sequence[int]:
        """The tokens of a prompt, from the first of these engines that answers. Raises NoTokensError."""
        key = await asyncio.to_thread(tokenize_key, document) if is_large else tokenize_key(document)
        known = self._cache.find(key)
        if known is not None:
            return known
        if self._local is not None:
            tokens: Sequence[int] = await asyncio.to_thread(self._local.tokens, document)
        else:
            tokens = await self._from_engines(document, urls, headers)
        self._cache.keep(key, tokens)
        return tokens

    async def _from_engines(
        self, document: Mapping[str, Any], urls: Sequence[str], headers: Mapping[str, str]
    ) -> Sequence[int]:
        problem = "no engine can be asked"
        for url in urls[:2]:
            try:
                async with self._http.post(
                    f"{url}/tokenize", json=document, timeout=self._timeout, headers=headers, allow_redirects=False
                ) as answer:
                    if answer.status != 200:
                        problem = f"/tokenize answers {answer.status}"
                        continue
                    tokens = (await answer.json(content_type=None)).get("tokens")
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError) as error:
                problem = f"/tokenize: {type(error).__name__} {error}"
                continue
            if isinstance(tokens, list) and len(tokens) <= TOKENS_MAX and are_tokens(tokens):
                return tokens
            problem = "/tokenize gives no tokens"
        raise NoTokensError(problem)


def _flattened(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its content as one text, as templates expect it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))}


def _token_text(token: object) -> str:
    """A special token, which the config has as a text or as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _refuse(message: str) -> None:
    raise ValueError(message)
