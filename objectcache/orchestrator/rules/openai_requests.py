"""OpenAI requests: the parts that decide where a request goes. Everything else passes through as it came."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from objectcache.orchestrator.rules.chains import TOKEN_MAX

TokenIds: TypeAlias = npt.NDArray[np.uint32]
"""The token ids of a prompt, [tokens]."""
OUTPUT_TOKENS_DEFAULT = 256
"""The tokens that a request is taken to put out where it does not say."""
OUTPUT_TOKENS_MAX = 1 << 20
PROMPTS_MAX = 16_384
SESSION_CHARACTERS_MAX = 256
NAME_CHARACTERS_MAX = 1024
"""Names of models and salts have no more characters: receipts, sessions and caches keep them."""
NUMBER_OF_ANSWERS_MAX = 16_384
"""vLLM's own bound."""
NUMBER_CHARACTERS_MAX = 20


class RequestKind(Enum):
    """The paths that are routed by their prompts."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    TOKENIZE = "/tokenize"
    OTHER = "other"
    """One of PASSED_ON, whose prompts are not looked at."""


PASSED_ON = frozenset(
    {
        "/v1/messages", "/v1/messages/count_tokens", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank",
        "/pooling", "/classify", "/detokenize", "/v1/audio/transcriptions", "/v1/audio/translations",
        "/v1/audio/speech", "/v1/images/generations", "/v1/moderations",
    }
)  # fmt: skip
"""Paths of engines that go on to one that serves the model. Others do not: engines have paths that load weights, sleep
or shut down, which no client may reach.
"""
SALTED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
"""The paths that are known to obey `cache_salt` in vLLM, so that tenants share no blocks there."""
WITHOUT_BLOCKS = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""The paths that compute no KV, so that tenants have nothing to share."""
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""The paths that take forms."""


_OUTPUT_FIELDS = {
    RequestKind.CHAT: ("max_completion_tokens", "max_tokens"),
    RequestKind.RESPONSES: ("max_output_tokens",),
}


class WrongRequestError(ValueError):
    """A request that no engine could answer; `field` is what is wrong with it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. Exactly one is given of `tokens`, a prompt of token ids, and `to_tokenize`, the JSON that has the
    engine's `/tokenize` give them; neither where the prompt has no tokens that could be known (images, earlier
    responses, a batch). `output_tokens` are those of all answers, `sequence_tokens` those of the largest one, and its
    prompt's where that is not among `tokens`.
    """

    kind: RequestKind
    model: str
    tokens: TokenIds | None
    to_tokenize: bytes | None
    output_tokens: int
    is_stream: bool
    session: str
    salt: str
    is_deterministic: bool
    sequence_tokens: int = 0
    prompt_tokens: int = 0
    """About how many tokens the prompt has, where they are not looked at."""
    document_digest: str = ""
    """The SHA-256 of `to_tokenize`, in hex, made where the body is read: of megabytes it takes a while."""
    previous: str = ""
    """The earlier response that it goes on from, which only the engine has that gave it."""
    is_counted_by_engine: bool = False
    """Whether an engine has given `tokens`: what it says must not have others refuse the request."""

    @property
    def nbytes(self) -> int:
        """The memory of its prompt."""
        return len(self.to_tokenize or b"") + (0 if self.tokens is None else self.tokens.nbytes)

    @property
    def is_generating(self) -> bool:
        """Whether tokens are put out."""
        return self.kind in (RequestKind.COMPLETIONS, RequestKind.CHAT, RequestKind.RESPONSES)


def read_request(kind: RequestKind, body: Mapping[str, Any], headers: Mapping[str, str]) -> Asked:
    """The parts of a request that decide. `headers` have lower-case names. Raises WrongRequestError."""
    model = _text(body, "model")
    output_tokens = _output_tokens(body, kind)
    answers = _number(body, "n", 1, NUMBER_OF_ANSWERS_MAX) or 1
    computed = max(answers, _number(body, "best_of", 1, NUMBER_OF_ANSWERS_MAX) or 1)
    tokens, document = _prompt(kind, body, model)
    to_tokenize = None if document is None else _canonical(document)
    lengths = _lengths(body) if tokens is None and document is None else []
    if kind is RequestKind.RESPONSES and body.get("background"):
        problem = "background is not passed on: its work would count for nobody, and its result could not be fetched"
        raise WrongRequestError(problem, "background")
    is_stream = body.get("stream", False)
    if not isinstance(is_stream, bool | None):
        raise WrongRequestError("stream must be true or false", "stream")
    return Asked(
        kind=kind,
        model=model,
        tokens=tokens,
        to_tokenize=to_tokenize,
        output_tokens=output_tokens * computed * max(1, len(lengths)),
        is_stream=bool(is_stream),
        session=_session(body, headers),
        salt=_text(body, "cache_salt"),
        is_deterministic=computed == 1 and body.get("temperature") == 0,
        sequence_tokens=output_tokens + max(lengths, default=0),
        prompt_tokens=sum(lengths),
        document_digest="" if to_tokenize is None else hashlib.sha256(to_tokenize).hexdigest(),
        previous=_text(body, "previous_response_id") if kind is RequestKind.RESPONSES else "",
    )


def read_form(fields: Sequence[tuple[str, bytes]], refused: Collection[str]) -> Asked:
    """A form by its fields (`forms.fields_of`), of which the model decides. Raises WrongRequestError for a field that
    only we may give.
    """
    for name, _ in fields:
        if name in refused:
            raise WrongRequestError(f"a form must not have {name}", name)
    model = next((value.decode(errors="replace") for name, value in fields if name == "model"), "")
    return Asked(RequestKind.OTHER, model, None, None, 0, is_stream=False, session="", salt="", is_deterministic=False)


def token_ids(values: Sequence[object]) -> TokenIds:
    """Token ids as an array. Raises ValueError for others than whole numbers in [0, 2^32)."""
    if not all(type(each) is int and 0 <= each <= TOKEN_MAX for each in values):
        raise ValueError("token ids must be whole numbers from 0 to 2^32 - 1")
    return np.asarray(values, dtype=np.uint32)


def _lengths(body: Mapping[str, Any]) -> list[int]:
    """About how many tokens each prompt of a list has, whose tokens are not looked at: ids count one each, and four
    characters of a text count as one.
    """
    prompts = body.get("prompt")
    if not isinstance(prompts, list):
        return []
    return [len(each) if isinstance(each, list) else len(str(each)) // 4 for each in prompts]


def response_key(tenant: str, kind: RequestKind, body: Mapping[str, Any]) -> str:
    """The name of a request's answer in the response cache: everything that the client sent, and whose it is."""
    return hashlib.sha256(_canonical([tenant, kind.value, body])).hexdigest()


def json_of(document: object, *, is_canonical: bool = False) -> bytes:
    """A document as JSON in UTF-8, as short as clients write it: escapes would make six bytes of two. Halves of
    surrogate pairs, which UTF-8 cannot have, are escaped, and all else then, too. Equal documents have one canonical
    form. Raises RecursionError.
    """
    separators = (",", ":") if is_canonical else None
    try:
        return json.dumps(document, ensure_ascii=False, sort_keys=is_canonical, separators=separators).encode()
    except UnicodeEncodeError:
        return json.dumps(document, sort_keys=is_canonical, separators=separators).encode()


def _canonical(document: object) -> bytes:
    return json_of(document, is_canonical=True)


def _prompt(kind: RequestKind, body: Mapping[str, Any], model: str) -> tuple[TokenIds | None, Mapping[str, Any] | None]:
    match kind:
        case RequestKind.CHAT | RequestKind.TOKENIZE if "messages" in body:
            return None, _chat(body, model)
        case RequestKind.COMPLETIONS | RequestKind.TOKENIZE:
            return _completion(body, model)
        case RequestKind.CHAT:
            raise WrongRequestError("messages: missing", "messages")
        case RequestKind.RESPONSES:
            return None, _responses(body, model)
    return None, None


def _completion(body: Mapping[str, Any], model: str) -> tuple[TokenIds | None, Mapping[str, Any] | None]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        document: dict[str, Any] = {"model": model, "prompt": prompt}
        if "add_special_tokens" in body:
            document["add_special_tokens"] = body["add_special_tokens"]
        return None, document
    if not isinstance(prompt, list):
        if prompt is None and "prompt_embeds" in body:
            return None, None
        raise WrongRequestError("prompt must be a text, a list of token ids, or a list of these", "prompt")
    if prompt and type(prompt[0]) is int:
        try:
            return token_ids(prompt), None
        except ValueError as error:
            raise WrongRequestError(f"prompt: {error}", "prompt") from None
    if not prompt or len(prompt) > PROMPTS_MAX:
        raise WrongRequestError(f"prompt must have from 1 to {PROMPTS_MAX} prompts", "prompt")
    return None, None


def _chat(body: Mapping[str, Any], model: str) -> Mapping[str, Any] | None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise WrongRequestError("messages must be a list of at least one message", "messages")
    if not all(isinstance(message, dict) for message in messages):
        raise WrongRequestError("messages must be objects", "messages")
    if any(not _is_text(message.get("content")) for message in messages):
        return None
    document: dict[str, Any] = {"model": model, "messages": messages}
    for name in (
        "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template",
        "chat_template_kwargs", "tools", "reasoning_effort",
    ):  # fmt: skip
        if body.get(name) is not None:
            document[name] = body[name]
    return document


def _responses(body: Mapping[str, Any], model: str) -> Mapping[str, Any] | None:
    """The chat that a request for a response amounts to. One that goes on from what the engine keeps has no tokens that
    could be known here.
    """
    said = body.get("input")
    if body.get("previous_response_id") or body.get("conversation") or not isinstance(said, str | list):
        return None
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    messages: list[dict[str, Any]] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    for item in items:
        if not isinstance(item, dict) or item.get("type", "message") != "message" or not _is_text(item.get("content")):
            return None
        messages.append({"role": item.get("role"), "content": item.get("content")})
    document: dict[str, Any] = {"model": model, "messages": messages}
    if body.get("tools"):
        document["tools"] = body["tools"]
    return document


def _is_text(content: object) -> bool:
    """Whether a message's content is text alone."""
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text") for part in content
    )


def _output_tokens(body: Mapping[str, Any], kind: RequestKind) -> int:
    """The most that an engine would make. Of a path's fields the greatest counts: engines do not agree on which holds,
    and a field that an engine does not read must not make a request look small.
    """
    if kind in (RequestKind.EMBEDDINGS, RequestKind.TOKENIZE):
        return 0
    said = [_number(body, name, 0, OUTPUT_TOKENS_MAX) for name in _OUTPUT_FIELDS.get(kind, ("max_tokens",))]
    return max((value for value in said if value is not None), default=OUTPUT_TOKENS_DEFAULT)


def _session(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """The session that a client names: a header of its own, a conversation, an earlier response, or its user."""
    said = headers.get("x-session-id") or headers.get("x-objectcache-session")
    if not said:
        conversation = body.get("conversation")
        if isinstance(conversation, dict):
            conversation = conversation.get("id")
        said = conversation or body.get("prompt_cache_key") or body.get("user")
    if not isinstance(said, str) or not is_encodable(said) or "\n" in said:  # a line end is behind a tenant's name
        return ""
    return said[:SESSION_CHARACTERS_MAX]


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not is_encodable(value):
        raise WrongRequestError(f"{name} must be a text", name)
    if len(value) > NAME_CHARACTERS_MAX:
        raise WrongRequestError(f"{name} must have at most {NAME_CHARACTERS_MAX} characters", name)
    return value


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can have it: JSON may name halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    """A field as engines read it: 100, 100.0 and "100" are one number."""
    value = body.get(name)
    if value is None:
        return None
    is_whole = type(value) is float and value.is_integer()
    if is_whole or (isinstance(value, str) and len(value) <= NUMBER_CHARACTERS_MAX and value.isdecimal()):
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise WrongRequestError(f"{name} must be a whole number from {least} to {most}", name)
    return value
