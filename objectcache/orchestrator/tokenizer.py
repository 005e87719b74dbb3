"""A model's own tokenizer, from its files. It runs in a reading process: a long prompt takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objectcache.adapters.regular_file import read_regular

FILE_BYTES_MAX = 1 << 28
TEMPLATE_CHARACTERS_MAX = 4 << 20
PROMPT_CHARACTERS_MAX = 8 << 20
"""A prompt that is made into tokens has no more characters: two million tokens."""


class NoTokensError(Exception):
    """The tokens of a prompt cannot be had; the request is routed without them."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A model's `tokenizer.json`, and its `tokenizer_config.json` and `chat_template.jinja`, empty where it has none.
    Processes that begin later use the files as they were at the start: somebody may replace the model meanwhile, and
    its files are half written for a while, or gone. `name` is the first one's path.
    """

    name: str
    tokenizer: bytes
    config: bytes = b""
    template: bytes = b""

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Those in a folder, or beside a `tokenizer.json`. Raises ValueError."""
        file = folder if folder.is_file() else folder / "tokenizer.json"
        beside = [file.with_name(name) for name in ("tokenizer_config.json", "chat_template.jinja")]
        try:
            others = [read_regular(each, FILE_BYTES_MAX) if each.exists() else b"" for each in beside]
            return cls(str(file), read_regular(file, FILE_BYTES_MAX), *others)
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from None


class LocalTokenizer:
    """A model's tokenizer, and its chat template where it has one. The template is run in jinja2's sandbox. Raises
    ValueError for files that are none.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise ValueError(
                f"a tokenizer needs the package {error.name}: install the extra objectcache[orchestrator]"
            ) from None

        try:
            self._tokenizer = Tokenizer.from_str(files.tokenizer.decode())
        except Exception as error:  # the library's own errors have no class of their own
            raise ValueError(f"{files.name}: {error}") from None
        self._template: Any = None
        self._names: Mapping[str, Any] = {}
        config = json.loads(files.config) if files.config else {}
        template = files.template.decode() if files.template else config.get("chat_template")
        if isinstance(template, str) and len(template) <= TEMPLATE_CHARACTERS_MAX:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
            environment.globals["raise_exception"] = _refuse
            self._template = environment.from_string(template)
            self._names = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}

    def tokens(self, document: Mapping[str, Any]) -> list[int]:
        """The tokens of a `/tokenize` document. Raises NoTokensError where the template refuses, or is missing."""
        if "prompt" in document:
            return self._encoded(document["prompt"], adds=bool(document.get("add_special_tokens", True)))
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
        return self._encoded(text, adds=bool(document.get("add_special_tokens", False)))

    def _encoded(self, text: str, *, adds: bool) -> list[int]:
        if len(text) > PROMPT_CHARACTERS_MAX:
            raise NoTokensError(f"the prompt has more than {PROMPT_CHARACTERS_MAX} characters")
        return list(self._tokenizer.encode(text, add_special_tokens=adds).ids)


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
