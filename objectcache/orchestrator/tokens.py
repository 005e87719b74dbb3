"""The tokens of prompts: from an engine's own `/tokenize`, or from the model's tokenizer file with its chat template.
They are kept, since the same beginnings come again and again.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import aiohttp

from objectcache.adapters.breaker import Breaker
from objectcache.adapters.whole_answers import LongAnswerError, read_whole
from objectcache.orchestrator.body_pieces import body_in_pieces
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.readers import Readers, ReadingError
from objectcache.orchestrator.rules.openai_requests import Asked, TokenIds
from objectcache.orchestrator.tokenizer import NoTokensError

TOKENIZE_S = 2.0
"""For each engine that is asked, and TOKENIZE_S_FOR_MIB more for each MiB of the prompt."""
TOKENIZE_S_FOR_MIB = 4.0
ENGINES_ASKED_MAX = 3
PAUSE_S, PAUSE_S_MAX = 1.0, 30.0
"""An engine that has not answered is not asked for a while: every prompt would wait for it."""
TEMPLATE_TOKENS_MAX = 4096
"""A prompt has fewer tokens than bytes, but for those of its template."""
AT_ONCE_BYTES_MAX = 4 << 20
"""The prompts that one engine makes tokens of at once have no more bytes, half of them one caller's. Others go without.
"""
BLAMED_BYTES_MAX = 64 << 10
"""An engine that has no more than this to make tokens of, and does not answer, has failed."""
ENTRY_BYTES = 300
"""An entry of the cache takes so much more than its key and its tokens."""
_OF_CLIENTS = b'"chat_template'
"""A prompt with a template of its own, or with arguments of one, may take any time, and give any number of tokens."""
ANSWER_BYTES_MIN, ANSWER_BYTES_EACH = 1 << 16, 16
"""An answer has about ten bytes for each token, and a prompt has more bytes than tokens."""


class TokenCache:
    """Tokens by what they were made of. Takes `bytes_max` bytes; what was used longest ago leaves."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._tokens: OrderedDict[bytes, TokenIds] = OrderedDict()
        self._used_bytes = 0
        self.hit_count = 0
        self.miss_count = 0

    def find(self, key: bytes) -> TokenIds | None:
        """The tokens; None where they are not known."""
        found = self._tokens.get(key)
        if found is None:
            self.miss_count += 1
            return None
        self.hit_count += 1
        self._tokens.move_to_end(key)
        return found

    def keep(self, key: bytes, tokens: TokenIds) -> None:
        """Keep the tokens, if they are not too many."""
        nbytes = _kept_bytes(key, tokens)
        if nbytes > self._bytes_max // 4 or key in self._tokens:
            return
        self._tokens[key] = tokens
        self._used_bytes += nbytes
        while self._used_bytes > self._bytes_max:
            old, left = self._tokens.popitem(last=False)
            self._used_bytes -= _kept_bytes(old, left)


def _kept_bytes(key: bytes, tokens: TokenIds) -> int:
    return tokens.nbytes + len(key) + ENTRY_BYTES


class Tokens:
    """Tokens of prompts. Where the readers have a tokenizer, no engine is asked."""

    def __init__(self, http: aiohttp.ClientSession, cache: TokenCache, readers: Readers) -> None:
        self._http = http
        self._cache = cache
        self._readers = readers
        self._breakers: WeakKeyDictionary[Engine, Breaker] = WeakKeyDictionary()
        self._at_once: WeakKeyDictionary[Engine, Counter[str]] = WeakKeyDictionary()
        """The bytes of prompts that each engine has now, by caller."""

    @property
    def are_made_here(self) -> bool:
        """Whether the model's own tokenizer makes them, so that no engine works for them."""
        return self._readers.has_tokenizer

    async def of(
        self, asked: Asked, engines: Sequence[Engine], headers: Mapping[str, str], tenant: str, caller: str
    ) -> TokenIds:
        """The tokens of a prompt that is to be tokenized, from the first of these engines that answers. Each tenant has
        those of its own prompts only: the time of an answer would say what others have sent. The memory and the time
        that they take count for the caller. Raises NoTokensError.
        """
        document, digest = asked.to_tokenize or b"", bytes.fromhex(asked.document_digest)
        scope = b"\n".join((tenant.encode(), headers.get("Authorization", "").encode(errors="surrogateescape"), digest))
        if self.are_made_here:
            return await self._made(scope, document, caller)
        if len(document) > AT_ONCE_BYTES_MAX:
            raise NoTokensError(f"the prompt has more than {AT_ONCE_BYTES_MAX} bytes, which no engine is asked for")
        # Always the same engines for a prompt, so that each may have its own answer kept: one that lies about tokens
        # lies to requests that ask it, and no other engine's answer is taken for its own.
        able = sorted(engines, key=lambda engine: hashlib.sha256(engine.url.encode() + digest).digest())
        problem = "no engine can be asked"
        asked_count = 0
        for engine in able:
            key = hashlib.sha256(engine.url.encode() + b"\n" + scope).digest()
            known = self._cache.find(key)
            if known is not None:
                return known
            breaker = self._breakers.setdefault(engine, Breaker(1, PAUSE_S, PAUSE_S_MAX))
            if asked_count >= ENGINES_ASKED_MAX:
                break
            if breaker.wait_s(time.monotonic()) > 0:
                continue
            at_once = self._at_once.setdefault(engine, Counter())
            if at_once and max(at_once.total(), 2 * at_once[caller]) + len(document) > AT_ONCE_BYTES_MAX:
                problem = f"{engine.name} makes tokens of too many prompts at once"
                continue
            asked_count += 1
            try:
                tokens = await self._asked(engine, breaker, document, headers, caller)
            except NoTokensError as error:
                problem = str(error)
                continue
            self._cache.keep(key, tokens)
            return tokens
        raise NoTokensError(problem)

    async def _made(self, scope: bytes, document: bytes, caller: str) -> TokenIds:
        key = hashlib.sha256(scope).digest()
        known = self._cache.find(key)
        if known is not None:
            return known
        try:
            tokens = await self._readers.tokens(caller, document)
        except ReadingError as error:
            raise NoTokensError(str(error)) from None
        self._cache.keep(key, tokens)
        return tokens

    async def _asked(
        self, engine: Engine, breaker: Breaker, document: bytes, headers: Mapping[str, str], caller: str
    ) -> TokenIds:
        """Ask one engine. One that does not answer, or answers nonsense, fails a probe by that, unless it was asked for
        much: tenants choose how much that is, and must not choose which engines others have.
        """
        at_once = self._at_once.setdefault(engine, Counter())
        at_once[caller] += len(document)
        asked_bytes = at_once.total()
        timeout = aiohttp.ClientTimeout(total=TOKENIZE_S + TOKENIZE_S_FOR_MIB * len(document) / (1 << 20))
        try:
            async with self._http.post(
                f"{engine.url}/tokenize",
                data=body_in_pieces(document),
                timeout=timeout,
                headers={**headers, "Content-Type": "application/json", "Content-Length": str(len(document))},
                allow_redirects=False,
            ) as answer:
                said = await read_whole(answer, ANSWER_BYTES_MIN + ANSWER_BYTES_EACH * len(document))
            breaker.succeeded()
            if answer.status != 200:
                raise NoTokensError(f"/tokenize answers {answer.status}")
            tokens = await self._readers.answered_tokens(caller, said)
            if len(tokens) > len(document) + TEMPLATE_TOKENS_MAX:
                raise NoTokensError(f"/tokenize has {len(tokens)} tokens for {len(document)} bytes")
            return tokens
        except ReadingError as error:  # the fault is here, or the prompt's
            raise NoTokensError(f"/tokenize: {error}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"/tokenize: {type(error).__name__} {error}"
            is_small = max(asked_bytes, at_once.total()) <= BLAMED_BYTES_MAX
            if is_small and _OF_CLIENTS not in document:  # others' prompts, or templates, are not the engine's fault
                breaker.failed(time.monotonic())
                if not isinstance(error, LongAnswerError):
                    engine.failed(problem)
            raise NoTokensError(problem) from None
        finally:
            breaker.gave_up()
            at_once[caller] -= len(document)
            if not at_once[caller]:
                del at_once[caller]
