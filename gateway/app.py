"""The gateway's one handler: parse, authenticate, route, authorise, run, and translate every failure."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from adapters.response_sink import abort_if_begun, cutting
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.storage_api import StorageApi
from gateway import sigv4, xml
from gateway.call import CONTINUED, Call, expects_continue
from gateway.credentials import CredentialBook, authorize
from gateway.operations import buckets, layerwise, objects
from gateway.request import SERVICE_PREFIX, S3Request, parse_target
from gateway.routing import Operation, route

HEADER_BYTES_MAX = 16_384
RETRY_AFTER_S = 1
HEALTH_PATH = "/_objectcache/health"
_log = logging.getLogger(__name__)

_HANDLERS: dict[Operation, Callable[[Call], Awaitable[web.StreamResponse]]] = {
    Operation.LIST_BUCKETS: buckets.list_buckets,
    Operation.CREATE_BUCKET: buckets.create_bucket,
    Operation.HEAD_BUCKET: buckets.head_bucket,
    Operation.LIST_OBJECTS_V2: buckets.list_objects_v2,
    Operation.PUT_OBJECT: objects.put_object,
    Operation.GET_OBJECT: objects.get_object,
    Operation.HEAD_OBJECT: objects.head_object,
    Operation.DELETE_OBJECT: objects.delete_object,
    Operation.LAYERWISE: layerwise.layerwise,
    Operation.LAYERWISE_HEADER: layerwise.layerwise_header,
    Operation.LOOKUP: layerwise.lookup,
    Operation.REGISTER_AGENT: layerwise.register_agent,
    Operation.RENEW_AGENT: layerwise.renew_agent,
    Operation.DELETE_AGENT: layerwise.delete_agent,
    Operation.CANCEL_REQUEST: layerwise.cancel_request,
}
_PRESIGNABLE = frozenset(
    operation for operation, handler in _HANDLERS.items() if handler.__module__ != layerwise.__name__
)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`region` is what signatures must name."""

    region: str = "us-east-1"


class Gateway:
    """S3 in, StorageApi out. Holds no state but its settings and credentials."""

    def __init__(self, storage: StorageApi, credentials: CredentialBook, settings: GatewaySettings) -> None:
        self._storage = storage
        self._credentials = credentials
        self._settings = settings

    def server(self) -> web.Server:
        """The aiohttp server. A client that disconnects cancels its handler; bodies arrive as they were sent."""
        return web.Server(
            cutting(self.handle),
            handler_cancellation=True,
            auto_decompress=False,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            access_log=None,
        )

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; every ObjectCacheError becomes its S3 answer, anything else InternalError."""
        if http.path == HEALTH_PATH and http.method == "GET":
            return web.Response(body=b'{"status":"ok"}', content_type="application/json")
        trace_id = secrets.token_hex(8).upper()
        started = time.perf_counter()
        try:
            response = await self._answer(http, trace_id)
        except ObjectCacheError as error:
            abort_if_begun(http)
            response = self._refusal(http, error, trace_id)
        except ConnectionError:
            raise
        except Exception:
            _log.exception("request %s failed", trace_id)
            abort_if_begun(http)
            unknown = ServerError(ErrorCode.INTERNAL_ERROR, "we failed; quote the request id", retryable=True)
            response = self._refusal(http, unknown, trace_id)
        if not response.prepared:
            response.headers["x-amz-request-id"] = trace_id
            if expects_continue(http) and CONTINUED not in http:
                response.force_close()  # the body may or may not come: nothing after it could be told apart
        _log.debug(
            "%s %s %s %d %.1f ms",
            trace_id,
            http.method,
            http.raw_path,
            response.status,
            1e3 * (time.perf_counter() - started),
        )
        return response

    async def _answer(self, http: web.BaseRequest, trace_id: str) -> web.StreamResponse:
        request = parse_target(http.method, http.raw_path, _joined_headers(http))
        claim = sigv4.read_claim(request)
        credential = self._credentials.find(claim.access_key)
        sigv4.verify(request, claim, credential.secret_key, self._settings.region, time.time())
        operation = route(request)
        if claim.presigned_s is not None and operation not in _PRESIGNABLE:
            problem = "this request must be signed in its headers: a presigned one could be replayed for days"
            raise CallerError(ErrorCode.ACCESS_DENIED, problem, field="X-Amz-Signature")
        authorize(credential, operation.action, _policy_bucket(request))
        return await _HANDLERS[operation](Call(request, http, claim, self._storage, trace_id))

    def _refusal(self, http: web.BaseRequest, error: ObjectCacheError, trace_id: str) -> web.StreamResponse:
        if isinstance(error, ServerError):
            _log.warning("request %s: %s", trace_id, error)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if error.code is ErrorCode.SLOW_DOWN else {}
        body = b"" if http.method == "HEAD" else xml.error_document(error, http.path, trace_id)
        return web.Response(status=error.http_status, body=body, content_type="application/xml", headers=headers)


def _joined_headers(http: web.BaseRequest) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in http.headers.items():
        lower = name.lower()
        joined[lower] = f"{joined[lower]},{value}" if lower in joined else value
    return joined


def _policy_bucket(request: S3Request) -> str:
    return "" if request.bucket == SERVICE_PREFIX else request.bucket
