"""The orchestrator's HTTP surface: OpenAI's paths, health, metrics, and `/_orchestrator`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from descriptors.descriptor import is_request_id
from descriptors.errors import ObjectCacheError
from descriptors.header_bytes import is_secret
from objectcache.adapters.deadlines import ConnectionLimits
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.leave_to_send import give_leave
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.metrics import CONTENT_TYPE
from objectcache.orchestrator.answers import Refusal
from objectcache.orchestrator.dispatch import (
    ATTEMPTS_MAX,
    ENGINE_HEADER,
    REQUEST_HEADER,
    AttemptFailed,
    Exchange,
    forwarded_headers,
    is_refusal,
    scope_of,
)
from objectcache.orchestrator.gate import TooBusyError
from objectcache.orchestrator.metadata import MetadataError, NameTakenError
from objectcache.orchestrator.pages import status_pages
from objectcache.orchestrator.readers import ReadingError
from objectcache.orchestrator.receipts import Receipt
from objectcache.orchestrator.relay import Held, send_whole
from objectcache.orchestrator.response_cache import Collected
from objectcache.orchestrator.router import NoEngineError, Prompt
from objectcache.orchestrator.rules.admission import Tenant
from objectcache.orchestrator.rules.cross_origin import answer_headers, preflight_headers
from objectcache.orchestrator.rules.forms import WrongFormError, form_steps
from objectcache.orchestrator.rules.media_type import media_type_of
from objectcache.orchestrator.rules.openai_requests import (
    FORMS,
    PASSED_ON,
    SALTED,
    WITHOUT_BLOCKS,
    RequestKind,
    TokenIds,
    WrongRequestError,
    read_form,
)
from objectcache.orchestrator.rules.reading import (
    ENGINE_ARGUMENTS,
    ENGINES_OWN,
    OF_TENANTS,
    READ_HEADERS,
    Order,
    ReadBody,
    document_of,
)
from objectcache.orchestrator.service import Orchestrator
from objectcache.orchestrator.settings import OrchestratorSettings
from objectcache.orchestrator.tokenizer import NoTokensError
from objectcache.orchestrator.under_way import UnderWay, stopping

ANYBODY = Tenant("")
READ_BYTES = 1 << 18
KEPT_REQUEST_BYTES_MAX = 1 << 18
ADMIN_BYTES_MAX = 1 << 16
TOKEN_CHARACTERS = 4
"""About so many characters of a body are a token: fair shares need no more before a request is admitted."""
_KINDS = {kind.value: kind for kind in RequestKind if kind is not RequestKind.OTHER}
_log = logging.getLogger(__name__)


class App:
    """Answers requests. `server` makes the aiohttp server on the running event loop."""

    def __init__(self, orchestrator: Orchestrator, settings: OrchestratorSettings, engine_key: str | None) -> None:
        self._orchestrator = orchestrator
        self._settings = settings
        self._engine_key = engine_key
        self.under_way = UnderWay()
        self._pages = status_pages()
        self._budget = DocumentBudget(settings.bodies_bytes_max, settings.bodies_bytes_max // 2)

    def server(self) -> web.Server:
        """The aiohttp server."""
        settings = self._settings
        limits = ConnectionLimits(
            settings.header_timeout_s,
            settings.keepalive_timeout_s,
            settings.send_idle_timeout_s,
            settings.connections_max,
        )
        return LimitedServer(self.handle, _refuse_unparsed, limits)

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Pages of other origins have no access to `/_orchestrator`."""
        origins = () if http.path.startswith("/_orchestrator") else self._settings.cors_origins
        preflight = preflight_headers(origins, http.method, http.headers)
        if preflight is not None:
            return web.Response(status=204, headers=preflight)
        response = await self._refused_or_routed(http)
        if not response.prepared:
            response.headers.update(answer_headers(origins, http.headers))
        return response

    async def _refused_or_routed(self, http: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(http)
        except Refusal as refusal:
            return refusal.response()
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except Exception:
            _log.exception("%s %s", http.method, http.path)
            return Refusal(500, "the orchestrator failed").response()

    async def _route(self, http: web.BaseRequest) -> web.StreamResponse:
        path, method = http.path, http.method
        orchestrator = self._orchestrator
        if path in _KINDS:
            _require(method, "POST")
            return await self._generate(http, _KINDS[path])
        if path in PASSED_ON:
            _require(method, "POST")
            return await self._generate(http, RequestKind.OTHER)
        if path.startswith("/_orchestrator/"):
            if (page := self._pages.find(method, path.removeprefix("/_orchestrator/"))) is not None:
                return page
            self._require_admin(http)
            return await self._administer(http, path.removeprefix("/_orchestrator/"))
        match path:
            case "/v1/models":
                _require(method, "GET")
                self._tenant(http)
                return web.json_response({"object": "list", "data": orchestrator.models()})
            case "/health":
                _require(method, "GET")
                status = "ok" if orchestrator.is_serving() else "no engine"
                if self.under_way.is_stopping:
                    status = "stopping"
                return web.json_response({"status": status}, status=200 if status == "ok" else 503)
            case "/metrics" | "/_objectcache/metrics":
                _require(method, "GET")
                return web.Response(body=orchestrator.metrics_text(), headers={"Content-Type": CONTENT_TYPE})
        raise Refusal(404, f"there is no {path}")

    async def _generate(self, http: web.BaseRequest, kind: RequestKind) -> web.StreamResponse:
        """One of OpenAI's requests, from its body to the end of its answer."""
        with self.under_way.one():
            return await self._answered(http, kind)

    async def _answered(self, http: web.BaseRequest, kind: RequestKind) -> web.StreamResponse:
        began_s, tenant = time.monotonic(), self._tenant(http)
        said_id = http.headers.get("X-Request-Id", "")
        request_id = said_id if is_request_id(said_id) else uuid.uuid4().hex
        receipt = Receipt(request_id, tenant.name, http.path, time.time())
        orchestrator = self._orchestrator
        if not orchestrator.begin(request_id, tenant.name):
            request_id = receipt.request_id = uuid.uuid4().hex
            orchestrator.begin(request_id, tenant.name)
        exchange: Exchange | None = None
        is_replayed = False
        try:
            async with self._document(http, tenant) as document:
                read = await self._read(http, document.raw, kind, tenant)
                document.becomes(read)
                identity = orchestrator.identity(read.asked.model)
                receipt_key = f"{read.response_key} {identity}" if read.response_key and identity else None
                if receipt_key is not None:
                    kept = orchestrator.responses.find(receipt_key, time.monotonic())
                    if kept is not None:
                        receipt.reason, is_replayed = "exact hit", True
                        cors = answer_headers(self._settings.cors_origins, http.headers)
                        return await _replay(http, kept.content_type, kept.pieces, request_id, cors)
                exchange = Exchange(
                    http,
                    http.path,
                    read.asked,
                    read.raw,
                    tenant.name,
                    self._forwarded(http, request_id),
                    receipt,
                    began_s,
                    self.under_way,
                    answer_headers(self._settings.cors_origins, http.headers),
                    Held(orchestrator.answers, tenant.name),
                    kept=Collected(orchestrator.responses) if receipt_key is not None else None,
                )
                response = await self._admitted(exchange, tenant)
                if isinstance(response, web.Response):  # an engine's refusal, which no other engine has bettered
                    response = await send_whole(http, response)
                receipt.status = response.status
                if (
                    receipt_key is not None
                    and exchange.kept is not None
                    and exchange.is_worth_keeping
                    and response.status == 200
                    and orchestrator.identity(read.asked.model) == identity
                    and "Content-Encoding" not in response.headers  # a replay says nothing of it
                ):
                    content_type = response.headers.get("Content-Type", "application/json")
                    orchestrator.responses.keep(receipt_key, content_type, exchange.kept, time.monotonic())
                return response
        except Refusal as refusal:
            receipt.status, receipt.note = refusal.status, str(refusal)
            return refusal.response({REQUEST_HEADER: request_id})
        except (asyncio.CancelledError, ConnectionResetError) as error:
            is_begun = is_replayed or (exchange is not None and exchange.is_begun)
            if isinstance(error, asyncio.CancelledError) and not is_begun and self.under_way.caught():
                receipt.status, receipt.note = 503, "cut off: the orchestrator was told to stop"
                return stopping().response({REQUEST_HEADER: request_id})
            receipt.note = receipt.note or "the client went away"
            raise
        finally:
            if exchange is not None:
                exchange.held.drop()
            if exchange is not None and exchange.kept is not None:
                exchange.kept.drop()
            receipt.total_s = time.monotonic() - began_s
            orchestrator.ended(receipt)

    async def _admitted(self, exchange: Exchange, tenant: Tenant) -> web.StreamResponse:
        """The answer of an engine, whose place is had only while engines work: one is waited for without a place."""
        asked, receipt, orchestrator = exchange.asked, exchange.receipt, self._orchestrator
        known = len(asked.tokens) if asked.tokens is not None else len(exchange.raw) // TOKEN_CHARACTERS
        until_s = time.monotonic() + self._settings.admission.deadline_s
        gate = orchestrator.gate
        try:
            for _ in range(ATTEMPTS_MAX):
                await self._engine_comes(asked.model, tenant, until_s)
                needed = known + asked.output_tokens
                async with gate.admitted(receipt.request_id, tenant, needed, until_s) as exchange.place:
                    receipt.waited_s += exchange.place.waited_s
                    tokens = await self._tokens(exchange)
                    receipt.prompt_tokens = None if tokens is None else len(tokens)
                    prompt = None
                    if tokens is not None and len(tokens):
                        prompt = await orchestrator.prompt(asked, tokens, receipt)
                    response = await self._attempt(exchange, prompt)
                if response is not None:
                    return response
        except TooBusyError as error:
            raise Refusal(error.status, str(error), code="too_busy", retry_after_s=error.retry_after_s) from None
        raise Refusal(503, "every engine has failed, again and again", code="no_engine", retry_after_s=1)

    async def _tokens(self, exchange: Exchange) -> TokenIds | None:
        """The prompt's tokens; None where they cannot be known."""
        asked = exchange.asked
        if asked.tokens is not None or asked.to_tokenize is None:
            return asked.tokens
        began_s = time.monotonic()
        try:
            return await self._orchestrator.tokens_of(asked, exchange.headers, exchange.tenant)
        except NoTokensError as error:
            exchange.receipt.note = f"routed without its tokens: {error}"
            return None
        finally:
            exchange.receipt.tokenize_s = time.monotonic() - began_s

    async def _attempt(self, exchange: Exchange, prompt: Prompt | None) -> web.StreamResponse | None:
        """Send the request, to another engine where one fails before it has answered. None where all engines are gone
        and one may come back.
        """
        receipt, orchestrator = exchange.receipt, self._orchestrator
        tried: list[str] = []
        failure: AttemptFailed | None = None
        refused: list[str] = []
        prompt = await orchestrator.prefilled(exchange, prompt)
        while len(tried) < ATTEMPTS_MAX:
            began_s = time.monotonic()
            try:
                tenant = exchange.tenant
                routed = orchestrator.decide(exchange.asked, receipt.request_id, prompt, tenant, without=tried)
            except NoEngineError as error:
                if error.status == 503 and orchestrator.may_come(exchange.asked.model):
                    return None
                if failure is not None:
                    break
                retry_after_s = 1 if error.status == 503 else 0
                raise Refusal(error.status, str(error), code="no_engine", retry_after_s=retry_after_s) from None
            receipt.decide_s = time.monotonic() - began_s
            receipt.routed(routed.decision)
            tried.append(routed.engine.name)
            try:
                response = await orchestrator.send(exchange, routed, prompt)
            except AttemptFailed as error:
                receipt.attempts.append({"engine": routed.engine.name, "error": str(error)})
                failure = error
                if is_refusal(error, exchange.asked):
                    refused.append(routed.engine.name)
            else:
                if response.status == 200:
                    orchestrator.blame(refused, exchange.asked.model)
                return response
        if failure is not None and failure.answer is not None:
            return failure.answer
        raise Refusal(502, f"no engine has answered: {failure}", code="engine_lost", retry_after_s=1)

    async def _engine_comes(self, model: str, tenant: Tenant, until_s: float) -> None:
        """Wait for an engine where none takes requests, because a restart takes seconds. Raises Refusal where none has
        come, TooBusyError.
        """
        orchestrator = self._orchestrator
        if not orchestrator.may_come(model):
            return
        with orchestrator.gate.without_engine(tenant):
            while orchestrator.may_come(model):
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not await orchestrator.engine_comes(left_s):
                    waited_s = self._settings.admission.deadline_s
                    problem = f"{orchestrator.no_engine(model)}, for {waited_s:g} s"
                    raise Refusal(503, problem, code="no_engine", retry_after_s=1)

    async def _administer(self, http: web.BaseRequest, path: str) -> web.StreamResponse:
        """Answer an operator."""
        orchestrator, method = self._orchestrator, http.method
        name, _, rest = path.partition("/")
        if name == "route" and not rest:
            _require(method, "POST")
            return web.json_response(await self._explain(http))
        if name == "receipts":
            _require(method, "GET")
            receipt = orchestrator.receipts.find(rest)
            if receipt is None:
                raise Refusal(404, f"there is no receipt of {rest}")
            return web.json_response(receipt.to_json())
        if name == "engines":
            return await self._engines(http, rest)
        if name == "pins" and method in ("PUT", "DELETE"):
            document = await self._admin_document(http) if method == "PUT" else {}
            try:
                await orchestrator.orders.pin(rest, document if method == "PUT" else None)
            except ValueError as error:
                raise Refusal(400, str(error)) from None
            except MetadataError as error:
                raise Refusal(503, str(error), retry_after_s=1) from None
            return web.json_response({"prefix": rest})
        if name == "quotas" and method == "PUT":
            try:
                await orchestrator.orders.set_quota(rest, await self._admin_document(http))
            except ValueError as error:
                raise Refusal(400, str(error)) from None
            except MetadataError as error:
                raise Refusal(503, str(error), retry_after_s=1) from None
            return web.json_response({"tenant": rest})
        if name == "status" and not rest:
            _require(method, "GET")
            return web.json_response(orchestrator.status())
        raise Refusal(404, f"there is no /_orchestrator/{path}")

    async def _engines(self, http: web.BaseRequest, rest: str) -> web.StreamResponse:
        orchestrator = self._orchestrator
        name, _, action = rest.rpartition("/") if rest.endswith(("/drain", "/undrain")) else (rest, "", "")
        try:
            match http.method, bool(name), action:
                case "GET", False, "":
                    return web.json_response(orchestrator.status()["engines"])
                case "POST", False, "":
                    document = await self._admin_document(http)
                    return web.json_response(await orchestrator.register(document), status=201)
                case "DELETE", True, "":
                    await orchestrator.remove(name)
                    return web.json_response({"name": name})
                case "POST", True, "drain" | "undrain":
                    await orchestrator.drain(name, is_wanted=action == "drain")
                    return web.json_response({"name": name, "is_draining": action == "drain"})
        except KeyError:
            raise Refusal(404, f"there is no engine {name}") from None
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        except NameTakenError as error:
            raise Refusal(409, str(error)) from None
        except MetadataError as error:
            raise Refusal(503, str(error), retry_after_s=1) from None
        raise Refusal(405, f"{http.method} is not possible here")

    async def _explain(self, http: web.BaseRequest) -> dict[str, Any]:
        """Which engine a request would go to, and every engine's terms."""
        async with self._document(http, ANYBODY) as said:
            document = said.raw
        kind = RequestKind.CHAT if b'"messages"' in document else RequestKind.COMPLETIONS
        asked = (await self._read(http, document, kind, ANYBODY)).asked
        headers = self._forwarded(http, uuid.uuid4().hex)
        try:
            return await self._orchestrator.explain(asked, headers)
        except NoEngineError as error:
            raise Refusal(error.status, str(error)) from None
        except NoTokensError as error:
            raise Refusal(502, str(error)) from None

    async def _admin_document(self, http: web.BaseRequest) -> Mapping[str, Any]:
        async with self._document(http, ANYBODY) as document:
            if len(document.raw) > ADMIN_BYTES_MAX:
                raise Refusal(413, f"the body is larger than {ADMIN_BYTES_MAX} bytes")
            try:
                return document_of(document.raw)
            except WrongRequestError as error:
                raise Refusal(400, str(error)) from None

    def _document(self, http: web.BaseRequest, tenant: Tenant) -> _Document:
        return _Document(http, tenant.name, self._settings, self._budget)

    def _tenant(self, http: web.BaseRequest) -> Tenant:
        """The tenant of a request, by its API key."""
        tenants = self._settings.tenants
        if not tenants:
            return ANYBODY
        key = _bearer(http)
        tenant = tenants.get(key) if key else None
        if tenant is None:
            raise Refusal(401, "the API key is missing, or not known", code="invalid_api_key")
        return self._orchestrator.orders.tenant(tenant)

    @property
    def _sends_keys_on(self) -> bool:
        """Whether engines get the key of a client: not where it is a tenant's at this orchestrator, with which an
        engine could ask for all that is that tenant's.
        """
        return self._engine_key is None and not self._settings.tenants

    def _forwarded(self, http: web.BaseRequest, request_id: str) -> dict[str, str]:
        """An operator's token goes to no engine: whoever has it decides about all of them."""
        key = f"Bearer {self._engine_key}" if self._engine_key is not None else None
        if self._sends_keys_on and not is_secret(_bearer(http), self._settings.admin_token):
            key = http.headers.get("Authorization")
        return forwarded_headers(http.headers, request_id, key)

    def _require_admin(self, http: web.BaseRequest) -> None:
        """An operator has the token. A peer on this host proves nothing: a proxy there brings the whole world."""
        if not is_secret(_bearer(http), self._settings.admin_token):
            raise Refusal(401, "/_orchestrator needs the admin token (OBJECTCACHE_ADMIN_TOKEN) as a bearer token")

    async def _read(self, http: web.BaseRequest, raw: bytes, kind: RequestKind, tenant: Tenant) -> ReadBody:
        is_form = kind is RequestKind.OTHER and media_type_of(http.headers) == "multipart/form-data"
        if self._settings.tenant_salts and tenant.name and http.path not in SALTED | WITHOUT_BLOCKS:
            problem = (
                f"engines are not known to obey cache_salt at {http.path}, without which tenants would share blocks"
            )
            raise Refusal(501, f"{problem} (tenant_salts)")
        if is_form and http.path not in FORMS:
            raise Refusal(415, f"{http.path} takes JSON, and no form")
        if is_form:
            refused = {*ENGINES_OWN, ENGINE_ARGUMENTS, *(OF_TENANTS if tenant.name else ())}
            try:
                return ReadBody(raw, read_form(await _fields_of(http.headers.get("Content-Type", ""), raw), refused))
            except WrongFormError as error:
                raise Refusal(400, str(error)) from None
            except WrongRequestError as error:
                raise Refusal(400, str(error), param=error.field) from None
        settings, responses = self._settings, self._orchestrator.responses
        order = Order(
            kind,
            {name: value for name in READ_HEADERS if (value := http.headers.get(name))},
            tenant.name,
            settings.tenant_salts,
            scope_of(self._forwarded(http, "")),
            responses.is_on and len(raw) <= KEPT_REQUEST_BYTES_MAX,
        )
        try:
            return await self._orchestrator.readers.read(raw, order)
        except WrongRequestError as error:
            raise Refusal(400, str(error), param=error.field) from None
        except ReadingError as error:
            if error.is_busy:
                raise Refusal(503, f"the body: {error}", code="too_busy", retry_after_s=1) from None
            raise Refusal(413, f"the body: {error}") from None


class _Document:
    """A request's body, whose bytes count in the budget until the block ends."""

    def __init__(
        self, http: web.BaseRequest, tenant: str, settings: OrchestratorSettings, budget: DocumentBudget
    ) -> None:
        self._http = http
        self._tenant = tenant
        self._settings = settings
        self._budget = budget
        self._taken = 0
        self.raw = b""

    async def __aenter__(self) -> _Document:
        try:
            self.raw = await self._read()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._budget.give_back(self._tenant, self._taken)
        self._taken = 0

    def becomes(self, read: ReadBody) -> None:
        """Count from now on what was made of the body, which may be several times as large. Raises Refusal."""
        asked, self.raw = read.asked, b""
        nbytes = len(read.raw) + len(asked.to_tokenize or b"") + (0 if asked.tokens is None else asked.tokens.nbytes)
        if nbytes > self._taken:
            self._take(nbytes - self._taken)
        else:
            self._budget.give_back(self._tenant, self._taken - nbytes)
            self._taken = nbytes

    def _take(self, nbytes: int) -> None:
        try:
            self._budget.take(self._tenant, nbytes)
        except ObjectCacheError as error:
            raise Refusal(503, error.message, code="too_busy", retry_after_s=1) from None
        self._taken += nbytes

    async def _read(self) -> bytes:
        body = bytearray()
        most = self._settings.body_bytes_max
        if (self._http.content_length or 0) > most:
            raise Refusal(413, f"the body is larger than {most} bytes")
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                await give_leave(self._http)
                while piece := await self._http.content.read(READ_BYTES):
                    self._take(len(piece))
                    body += piece
                    if len(body) > most:
                        raise Refusal(413, f"the body is larger than {most} bytes")
        except TimeoutError:
            raise Refusal(408, "the body did not come in time") from None
        except web.RequestPayloadError:
            raise Refusal(400, "the body is not well-formed") from None
        return bytes(body)


async def _replay(
    http: web.BaseRequest, content_type: str, pieces: tuple[bytes, ...], request_id: str, cors: Mapping[str, str]
) -> web.StreamResponse:
    headers = {"Content-Type": content_type, ENGINE_HEADER: "response cache", REQUEST_HEADER: request_id, **cors}
    response = web.StreamResponse(headers=headers)
    await response.prepare(http)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)  # to write returns at once where the client reads as fast
    await response.write_eof()
    return response


async def _fields_of(content_type: str, raw: bytes) -> list[tuple[str, bytes]]:
    """Raises WrongFormError."""
    steps = form_steps(content_type, raw)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            fields: list[tuple[str, bytes]] = end.value
            return fields
        await asyncio.sleep(0)


def _bearer(http: web.BaseRequest) -> str:
    kind, _, key = http.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _require(method: str, wanted: str) -> None:
    """Raises Refusal for another method. HEAD is answered like GET, as health checks expect."""
    if method != wanted and (method, wanted) != ("HEAD", "GET"):
        raise Refusal(405, f"{method} is not possible here; use {wanted}")


def _refuse_unparsed(error: ObjectCacheError) -> web.Response:
    return Refusal(400, error.message).response()
