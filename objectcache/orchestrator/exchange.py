"""One client's request on its way to an engine and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aiohttp import web

from objectcache.orchestrator.bodies import BudgetedBody
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.gate import Place
from objectcache.orchestrator.receipts import Receipt
from objectcache.orchestrator.relay import HeldBytes
from objectcache.orchestrator.response_cache import Collected
from objectcache.orchestrator.router import Prompt
from objectcache.orchestrator.rules.kept_responses import LOOKED_AT_BYTES, response_id
from objectcache.orchestrator.rules.openai_requests import Asked, RequestKind
from objectcache.orchestrator.under_way import UnderWay

ENGINE_HEADER, REQUEST_HEADER = "x-objectcache-engine", "x-objectcache-request-id"


@dataclass(slots=True)
class AnswerProgress:
    """When the last piece of an answer came, by the steady clock."""

    at_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Exchange:
    """One client's request on its way."""

    http: web.BaseRequest
    path: str
    asked: Asked
    body: BudgetedBody
    """The body as it goes on. The maker of the exchange has read it."""
    tenant: str
    headers: Mapping[str, str]
    receipt: Receipt
    began_s: float
    under_way: UnderWay
    cors: Mapping[str, str]
    """Headers for the browser that the answer goes to."""
    held: HeldBytes
    """The bytes of the answer that the client has not taken. The maker of the exchange drops them at its end."""
    place: Place | None = None
    """Its place among the running requests, until an engine has done its work."""
    handed_over: bytes = b""
    """The parameters in a prefill engine's answer, as JSON, for one attempt of the engine that goes on."""
    kept: Collected | None = None
    """The pieces of the answer, where they may be kept."""
    prompt: Prompt | None = None
    """Its prompt, once its tokens are known, until the client has some of the answer."""
    is_begun: bool = False
    """Whether the client has some of the answer, so that its status is out."""
    is_broken: bool = False
    progress: AnswerProgress = field(default_factory=AnswerProgress)
    response_id: str = ""
    """The id of the response that was answered, where the engine keeps it."""
    _beginning: bytes = b""

    def begin(self) -> None:
        """The client gets an answer: no other engine will be asked, so nothing of the request is needed any more. A
        client that reads slowly must not keep the memory that others need for theirs.
        """
        self._beginning = b""
        self.is_begun = True
        self.prompt = None
        self.asked = replace(self.asked, tokens=None, to_tokenize=None)
        self.body.drop()

    def note_response(self, piece: bytes) -> None:
        """Note the id of a response, at the beginning of its answer, which may come in pieces."""
        before = self._beginning if self.is_begun else b""  # else it is of an engine that has failed
        if self.asked.kind is RequestKind.RESPONSES and not self.response_id and len(before) < LOOKED_AT_BYTES:
            self._beginning = before + piece[:LOOKED_AT_BYTES]
            self.response_id = response_id(self._beginning)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether the answer came whole: a stream to its end mark, without an error in it."""
        if self.kept is None or not self.kept.pieces or self.is_broken:
            return False
        pieces = self.kept.pieces
        if not self.asked.is_stream:
            return True
        whole = b"".join(pieces)
        return whole.rstrip().endswith(b"data: [DONE]") and b'data: {"error"' not in whole

    def keep(self, piece: bytes) -> None:
        """Note a piece of the answer; an answer that is too large is not kept at all."""
        self.progress.at_s = time.monotonic()
        if self.kept is not None:
            self.kept.add(piece)

    def computed(self, engine: Engine, status: int) -> None:
        """The engine has done its work: others may have the place, however slowly the client reads."""
        engine.books.end(self.receipt.request_id, time.monotonic(), is_complete=status == 200)
        if self.place is not None:
            self.place.give_back()

    def break_off(self) -> None:
        """The answer is not whole, and is not kept."""
        self.is_broken = True
        self.keep_not()

    def keep_not(self) -> None:
        """Do not keep the answer, whatever comes of it."""
        if self.kept is not None:
            self.kept.drop()

    def drop(self) -> None:
        """The request is over: nothing of its answer is held or collected any more."""
        self.held.drop()
        self.keep_not()
