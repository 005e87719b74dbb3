"""The gateway's one handler: parse, authenticate, route, authorise, run, and translate every failure."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from urllib.parse import unquote

from aiohttp import web

from descriptors.cluster import View
from descriptors.descriptor import is_request_id
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.headers import HEALTH_NAME, SERVICE_PREFIX
from descriptors.status import StorageStatus
from descriptors.storage_api import StorageApi
from descriptors.tracing import REQUEST_ID_HEADER, TIMING_HEADER, timing_header
from descriptors.version import __version__
from gateway.call import Call
from gateway.form_upload import HELD_BYTES_MAX, FormUpload, is_form_upload
from gateway.handlers import HANDLERS, LAYERWISE
from gateway.metrics import GatewayMeter, is_bearer
from gateway.pages import status_pages
from gateway.recent import RecentFailures
from gateway.s3 import sigv2, sigv4, xml
from gateway.s3.credentials import Credential, CredentialBook, authorize, require_all_buckets
from gateway.s3.post_policy import POLICY_FIELD
from gateway.s3.request import S3Request, parse_target, without_chunk_coding
from gateway.s3.routing import Operation, is_list_buckets, route
from gateway.settings import GatewaySettings as GatewaySettings
from gateway.trace import RequestTrace, TimedStorage, follow
from objectcache.adapters.caller import CALLER
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.leave_to_send import is_held_back
from objectcache.adapters.limited_server import LimitedServer, gives_place_up
from objectcache.adapters.metrics import CONTENT_TYPE, process_text
from objectcache.adapters.pages import HEADERS as PAGE_HEADERS
from objectcache.adapters.request_log import CLIENT_GONE, RequestLine, log_request, logs_requests
from objectcache.adapters.response_sink import abort_if_begun, begun_status, cutting, fulfil_headers, promise_headers
from objectcache.adapters.threads import computed

RETRY_AFTER_S = 1
HEALTH_KEPT_S = 1.0
HEALTH_TIMEOUT_S = 3.0
METRICS_TIMEOUT_S = 5.0
ARGUMENT_CHARACTERS_MAX = 1024
SERVER = "ObjectCache"
SANDBOX = {"Content-Security-Policy": "sandbox", "X-Content-Type-Options": "nosniff"}
"""In every answer but a page: a browser that shows an object, which may be HTML of whoever stored it, runs nothing of
it, and gives it another origin than that of the page on which operators type their keys.
"""
_BODY_LOST = frozenset({ErrorCode.REQUEST_TIMEOUT, ErrorCode.INCOMPLETE_BODY})
_WITH_BODY = frozenset(
    {
        Operation.LAYERWISE, Operation.LOOKUP, Operation.PUT_CHUNKS, Operation.REGISTER_AGENT, Operation.RENEW_AGENT,
    }
)  # fmt: skip
_VERSION_2 = frozenset({Operation.GET_OBJECT, Operation.HEAD_OBJECT, Operation.PUT_OBJECT, Operation.POST_OBJECT})
TOLD = frozenset({Operation.METRICS, Operation.STATUS})
_log = logging.getLogger(__name__)


class Gateway:
    """Takes S3 requests and calls the StorageApi. It holds settings, credentials and the budget for documents only."""

    def __init__(
        self,
        storage: StorageApi,
        credentials: CredentialBook,
        settings: GatewaySettings,
        view: Callable[[], View | None] = lambda: None,
    ) -> None:
        """`view` gives the members of the cluster that this is a gateway of; None where it is of none."""
        self._view = view
        self._storage = TimedStorage(storage)
        self._credentials = credentials
        self._settings = settings
        self._documents = DocumentBudget(settings.document_bytes, settings.document_key_bytes)
        held_key_bytes = max(HELD_BYTES_MAX, settings.document_key_bytes // 2)
        self._held_forms = DocumentBudget(max(held_key_bytes, settings.document_bytes // 2), held_key_bytes)
        self._meter = GatewayMeter()
        self._failures = RecentFailures()
        self._pages = status_pages(settings.region)
        self._started_s = time.monotonic()
        self._is_healthy = False
        self._health_known_until_s = 0.0
        self._health_asked: asyncio.Task[None] | None = None
        self._host_id = secrets.token_urlsafe(24)

    @property
    def documents(self) -> DocumentBudget:
        """The memory budget that all documents under way share."""
        return self._documents

    @property
    def held_forms(self) -> DocumentBudget:
        """The memory budget that files of HTML forms share."""
        return self._held_forms

    def server(self) -> LimitedServer:
        """The aiohttp server. Call this on the event loop that the server runs on."""
        return LimitedServer(cutting(self.handle), self._refuse_unparsed, self._settings.connection_limits)

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. An ObjectCacheError becomes its S3 answer, any other exception InternalError."""
        trace = self._traced(http)
        status = 0
        self._meter.began()
        try:
            response = await self._answer_or_refuse(http, trace)
            status = response.status
            if not response.prepared:
                response.headers[TIMING_HEADER] = timing_header(trace.timing())
                fulfil_headers(http, response)
                if is_held_back(http):
                    response.force_close()  # body bytes may still arrive; they would be read as the next request
            return response
        finally:
            status = status or begun_status(http)
            self._meter.ended(trace, status)
            if trace.code and status >= 400:
                self._failures.note(
                    time.time(),
                    trace.request_id,
                    operation=trace.operation,
                    bucket=trace.bucket,
                    status=status,
                    code=trace.code,
                )
            if logs_requests():
                log_request(_line(trace, status))

    async def _answer_or_refuse(self, http: web.BaseRequest, trace: RequestTrace) -> web.StreamResponse:
        try:
            return await self._answer(http, trace)
        except ObjectCacheError as error:
            trace.code = error.code.value
            abort_if_begun(http)
            context = xml.ErrorContext(trace.trace_id, self._settings.region, _argument_value(http, error))
            return _refusal(http.method, http.raw_path, error, context)
        except (ConnectionError, asyncio.CancelledError):
            trace.code = CLIENT_GONE
            raise
        except Exception:
            trace.code = ErrorCode.INTERNAL_ERROR.value
            _log.exception("request %s failed", trace.trace_id)
            abort_if_begun(http)
            unknown = ServerError(ErrorCode.INTERNAL_ERROR, "we failed; quote the request id", retryable=True)
            return _refusal(http.method, http.raw_path, unknown, xml.ErrorContext(trace.trace_id))

    def _traced(self, http: web.BaseRequest) -> RequestTrace:
        trace_id = _make_trace_id()
        trace = RequestTrace(trace_id, self._identity(trace_id))
        trace.client = http.remote or ""
        named = http.headers.get(REQUEST_ID_HEADER)
        if named is not None and is_request_id(named):
            trace.name(named)
        promise_headers(http, trace.headers)
        follow(trace)
        return trace

    async def _answer(self, http: web.BaseRequest, trace: RequestTrace) -> web.StreamResponse:
        request = parse_target(http.method, http.raw_path, _joined_headers(http), self._settings.domains)
        trace.bucket, trace.key = request.bucket, request.key
        if request.method in ("GET", "HEAD") and (request.bucket, request.key) == (SERVICE_PREFIX, HEALTH_NAME):
            trace.operation = HEALTH_NAME
            return await self._health()
        if request.bucket == SERVICE_PREFIX and (found := self._pages.find(request.method, request.key)) is not None:
            trace.operation = "page"
            trace.headers.update(PAGE_HEADERS)  # in place of SANDBOX
            return found
        if is_bearer(http.headers.get("Authorization"), self._settings.metrics_token):
            return await self._told(route(request), trace)
        if request.method == "OPTIONS":
            raise _refused_preflight(request)
        form = None
        if is_form_upload(request):
            with gives_place_up(http):  # whoever sends it is not known yet
                form = await FormUpload.begun(http, request, self._settings, trace.phases)
                claim, credential = self._signed_form(form)
            key = b""
        else:
            request, claim, credential, key = self._authenticated(request)
        operation = route(request)
        trace.operation, trace.access_key = operation.name.lower(), credential.access_key
        CALLER.set(credential.access_key)
        if operation in LAYERWISE:
            _demand_signature(operation, claim)
        if claim.is_version_2 and operation not in _VERSION_2:
            problem = (
                "a Version 2 signature is taken for GET, HEAD and PUT of objects and forms only; use AWS4-HMAC-SHA256"
            )
            raise CallerError(ErrorCode.ACCESS_DENIED, problem, field="Signature")
        authorize(credential, operation.action, _policy_bucket(request))
        if operation in TOLD:
            require_all_buckets(credential, operation.action)
            return await self._told(operation, trace)
        request = replace(request, headers=without_chunk_coding(request.headers))
        call = Call(
            operation=operation,
            request=request,
            http=http,
            claim=claim,
            storage=self._storage,
            trace=trace,
            documents=self._documents,
            settings=self._settings,
            signing_key=key,
            credential=credential,
            form=form,
            held_forms=self._held_forms,
        )
        return await HANDLERS[operation](call)

    async def _health(self) -> web.Response:
        """Whether requests can be served. The storage side must answer, too; it is asked at most once a second, and
        once at a time, however many clients ask and whatever it answers.
        """
        if self._health_asked is None and time.monotonic() >= self._health_known_until_s:
            self._health_asked = asyncio.create_task(self._ask_storage())
        if self._health_asked is not None:
            await asyncio.shield(self._health_asked)  # a client that goes away does not end it for the others
        if self._is_healthy:
            return web.Response(body=b'{"status":"ok"}', content_type="application/json")
        body = b'{"status":"the storage side does not answer"}'
        return web.Response(status=503, body=body, content_type="application/json")

    async def _ask_storage(self) -> None:
        is_healthy = False
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._storage.status.transports("")
            is_healthy = True
        except (ObjectCacheError, TimeoutError) as error:
            _log.warning("the storage side does not answer: %s", error)
        finally:
            self._is_healthy, self._health_asked = is_healthy, None
            self._health_known_until_s = time.monotonic() + HEALTH_KEPT_S

    async def _told(self, operation: Operation, trace: RequestTrace) -> web.Response:
        """Answer what the token, and a key of all buckets, may read."""
        if operation not in TOLD:
            problem = "the token is for metrics and the status only"
            raise CallerError(ErrorCode.ACCESS_DENIED, problem, field="Authorization")
        trace.operation = operation.name.lower()
        return await (self._metrics() if operation is Operation.METRICS else self._status())

    async def _status(self) -> web.Response:
        """GET /_objectcache/status: this gateway, and the storage servers that answer."""
        servers: list[StorageStatus] = []
        try:
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                servers = await self._storage.status.servers("")
        except (ServerError, TimeoutError) as error:
            _log.warning("the storage servers' status cannot be read: %s", error)
        gateway = {
            "version": __version__,
            "uptime_s": time.monotonic() - self._started_s,
            "region": self._settings.region,
            "failures": self._failures.told(),
        }
        told = [asdict(each) for each in servers]
        body = json.dumps({"gateway": gateway, "cluster": _told_of(self._view()), "storage_servers": told})
        return web.Response(body=body.encode(), content_type="application/json")

    async def _metrics(self) -> web.Response:
        """GET /_objectcache/metrics: the metrics of this gateway and of its storage server. If the storage server does
        not answer, its metrics are missing, and the gateway's error counters say why.
        """
        text = await computed(lambda: self._meter.text() + process_text(), is_long=True)
        try:
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                text += (await self._storage.status.metrics("")).encode()
        except (ServerError, TimeoutError) as error:
            _log.warning("the storage server's metrics cannot be read: %s", error)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    def _authenticated(self, request: S3Request) -> tuple[S3Request, sigv4.Claim, Credential, bytes]:
        """The request, its signer's claim and credential, and the key that signs its body's chunks.
        Raises CallerError.
        """
        now_s = time.time()
        if self._settings.allows_sigv2 and sigv2.is_presigned(request):
            claim = sigv2.read_claim(request)
            credential = self._credentials.find(claim.access_key)
            sigv2.verify(request, claim, credential.secret_key, now_s)
            return sigv2.with_signed_headers(request), claim, credential, b""
        claim = sigv4.read_claim(request)
        credential = self._credentials.find(claim.access_key)
        # Buckets of every region are listed everywhere, so a client may sign with its own region.
        region = claim.region if is_list_buckets(request) else self._settings.region
        return request, claim, credential, sigv4.verify(request, claim, credential.secret_key, region, now_s)

    def _signed_form(self, form: FormUpload) -> tuple[sigv4.Claim, Credential]:
        """The claim and credential of who has signed a form's policy. Raises CallerError."""
        fields = form.fields
        if self._settings.allows_sigv2 and sigv2.is_signed_form(fields):
            claim = sigv2.read_form_claim(fields)
            credential = self._credentials.find(claim.access_key)
            sigv2.verify_form(fields[POLICY_FIELD], claim, credential.secret_key)
            return claim, credential
        claim = sigv4.read_form_claim(fields)
        credential = self._credentials.find(claim.access_key)
        sigv4.verify_form(fields[POLICY_FIELD], claim, credential.secret_key, self._settings.region, time.time())
        return claim, credential

    def _identity(self, trace_id: str) -> dict[str, str]:
        return {"x-amz-request-id": trace_id, "x-amz-id-2": self._host_id, "Server": SERVER, **SANDBOX}

    def _refuse_unparsed(self, error: ObjectCacheError) -> web.Response:
        """The answer to bytes that cannot be parsed as a request."""
        trace_id = _make_trace_id()
        trace = RequestTrace(trace_id, self._identity(trace_id))
        response = _refusal("", "", error, xml.ErrorContext(trace_id))
        response.headers.update({**trace.headers, TIMING_HEADER: timing_header(trace.timing())})
        if logs_requests():
            trace.code = error.code.value
            log_request(_line(trace, response.status))
        return response


def _line(trace: RequestTrace, status: int) -> RequestLine:
    nbytes = trace.nbytes if status < 400 else 0
    return RequestLine(
        by="gateway",
        request_id=trace.request_id,
        operation=trace.operation,
        status=status,
        nbytes=nbytes,
        timing=trace.timing(),
        trace_id=trace.trace_id,
        bucket=trace.bucket,
        key=trace.key,
        code=trace.code,
        client=trace.client,
        access_key=trace.access_key,
        facts=trace.facts,
    )


def _refusal(method: str, raw_path: str, error: ObjectCacheError, context: xml.ErrorContext) -> web.Response:
    if isinstance(error, ServerError):
        _log.warning("request %s: %s", context.request_id, error)
    if error.code is ErrorCode.NOT_MODIFIED:
        return web.Response(status=error.http_status)
    headers = {"Retry-After": str(error.retry_after_s or RETRY_AFTER_S)} if error.code is ErrorCode.SLOW_DOWN else {}
    resource = unquote(raw_path.partition("?")[0], errors="replace")
    body = b"" if method == "HEAD" else xml.error_document(error, resource, context)
    response = web.Response(status=error.http_status, body=body, content_type="application/xml", headers=headers)
    if error.code in _BODY_LOST:
        response.force_close()
    return response


def _argument_value(http: web.BaseRequest, error: ObjectCacheError) -> str | None:
    """The value of the wrong argument as the request gave it, where S3 repeats it in the error document."""
    if error.code is not ErrorCode.INVALID_ARGUMENT or error.field is None:
        return None
    for part in http.raw_path.partition("?")[2].split("&"):
        name, _, value = part.partition("=")
        if name == error.field:
            return unquote(value, errors="replace")[:ARGUMENT_CHARACTERS_MAX]
    header = http.headers.get(error.field)
    return None if header is None else header[:ARGUMENT_CHARACTERS_MAX]


def _demand_signature(operation: Operation, claim: sigv4.Claim) -> None:
    if claim.presigned_s is not None:
        problem = "this request must be signed in its headers: a presigned one could be replayed for days"
        raise CallerError(ErrorCode.ACCESS_DENIED, problem, field="X-Amz-Signature")
    if operation in _WITH_BODY and not claim.form.is_signed:
        problem = "this request's body must be signed: x-amz-content-sha256 must be its SHA-256"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="x-amz-content-sha256")


def _refused_preflight(request: S3Request) -> CallerError:
    """The answer to OPTIONS, which is never signed: no bucket of this server allows other origins."""
    if "origin" not in request.headers:
        problem = "Insufficient information. Origin request header needed."
        return CallerError(ErrorCode.BAD_REQUEST, problem, field="origin")
    return CallerError(ErrorCode.ACCESS_FORBIDDEN, "CORSResponse: CORS is not enabled for this bucket.", field="origin")


def _make_trace_id() -> str:
    return secrets.token_hex(8).upper()


def _joined_headers(http: web.BaseRequest) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in http.headers.items():
        lower = name.lower()
        joined[lower] = f"{joined[lower]},{value}" if lower in joined else value
    return joined


def _policy_bucket(request: S3Request) -> str:
    return "" if request.bucket == SERVICE_PREFIX else request.bucket


def _told_of(view: View | None) -> dict[str, object] | None:
    """The part of the status about a cluster, also about members that do not answer."""
    if view is None:
        return None
    placed = {member.name: member.weight for member in view.placed}
    whole = sum(placed.values())
    members = [
        {
            "name": member.name,
            "endpoint": member.endpoint,
            "key_share": placed.get(member.name, 0.0) / whole,
            "is_draining": member.is_draining,
        }
        for member in view.members
    ]
    return {"cluster_id": view.cluster_id, "view": view.number, "members": members}
