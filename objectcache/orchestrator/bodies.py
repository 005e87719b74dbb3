"""The bodies of requests: their memory, which counts in a budget with a part for each tenant, and how they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from descriptors.errors import CallerError, ObjectCacheError
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.adapters.leave_to_send import give_leave
from objectcache.orchestrator.access import Access
from objectcache.orchestrator.answers import Refusal
from objectcache.orchestrator.readers import Readers, ReadingError
from objectcache.orchestrator.rules.admission import Tenant
from objectcache.orchestrator.rules.forms import WrongFormError
from objectcache.orchestrator.rules.forwarded_headers import scope_of
from objectcache.orchestrator.rules.media_type import media_type_of
from objectcache.orchestrator.rules.openai_requests import (
    FORMS,
    SALTED,
    WITHOUT_BLOCKS,
    RequestKind,
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
)
from objectcache.orchestrator.settings import OrchestratorSettings

READ_BYTES = 1 << 18
KEPT_REQUEST_BYTES_MAX = 1 << 18


class BudgetedBody:
    """A request's body, whose bytes count until the block ends. `async with` reads it, and raises Refusal."""

    def __init__(
        self, http: web.BaseRequest, caller: str, settings: OrchestratorSettings, budget: DocumentBudget
    ) -> None:
        self._http = http
        self.caller = caller
        """The memory and the turns that the request takes count for this one."""
        self._settings = settings
        self._budget = budget
        self._counted_bytes = 0
        self.raw = b""

    async def __aenter__(self) -> BudgetedBody:
        try:
            self.raw = await self._read()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """The body is needed no more."""
        self.raw = b""
        self._budget.give_back(self.caller, self._counted_bytes)
        self._counted_bytes = 0

    def becomes(self, raw: bytes, others_bytes: int) -> None:
        """The body is `raw` from now on, and `others_bytes` were made of it. Raises Refusal where that is too much."""
        self.raw, nbytes = b"", len(raw) + others_bytes
        if nbytes > self._counted_bytes:
            self._take(nbytes - self._counted_bytes)
        else:
            self._budget.give_back(self.caller, self._counted_bytes - nbytes)
            self._counted_bytes = nbytes
        self.raw = raw

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Count so many bytes more within the block: another copy of the body. Raises Refusal."""
        try:
            self._budget.take(self.caller, nbytes)
        except ObjectCacheError as error:
            raise _too_busy(error) from None
        try:
            yield
        finally:
            self._budget.give_back(self.caller, nbytes)

    def _take(self, nbytes: int) -> None:
        try:
            self._budget.take(self.caller, nbytes)
        except ObjectCacheError as error:
            raise _too_busy(error) from None
        self._counted_bytes += nbytes

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
        except CallerError as error:  # it is to make place for others
            raise Refusal(408, error.message) from None
        except web.RequestPayloadError:
            raise Refusal(400, "the body is not well-formed") from None
        return bytes(body)


def _too_busy(error: ObjectCacheError) -> Refusal:
    return Refusal(503, error.message, code="too_busy", retry_after_s=1)


class Bodies:
    """Takes the bodies of requests. `keeps_answers` is whether answers are kept by what was asked."""

    def __init__(
        self, settings: OrchestratorSettings, readers: Readers, access: Access, *, keeps_answers: bool
    ) -> None:
        self._settings = settings
        self._readers = readers
        self._access = access
        self._keeps_answers = keeps_answers
        self._budget = DocumentBudget(settings.bodies_bytes_max, settings.bodies_bytes_max // 2)

    @property
    def held_bytes(self) -> int:
        """The bytes that count now."""
        return self._budget.held_bytes

    def of(self, http: web.BaseRequest, caller: str) -> BudgetedBody:
        """The body of a request, which is read when its block is entered. It counts among those of `caller`."""
        return BudgetedBody(http, caller, self._settings, self._budget)

    async def read(self, http: web.BaseRequest, body: BudgetedBody, kind: RequestKind, tenant: Tenant) -> ReadBody:
        """The parts of a body that decide, and the body as it may go on. Raises Refusal."""
        raw = body.raw
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
                fields = await self._readers.fields(body.caller, http.headers.get("Content-Type", ""), raw)
                return ReadBody(raw, read_form(fields, refused))
            except WrongFormError as error:
                raise Refusal(400, str(error)) from None
            except WrongRequestError as error:
                raise Refusal(400, str(error), param=error.field) from None
        order = Order(
            kind=kind,
            headers={name: value for name in READ_HEADERS if (value := http.headers.get(name))},
            tenant=tenant.name,
            has_salt=self._settings.tenant_salts,
            scope=scope_of(self._access.forwarded(http, "")),
            with_key=self._keeps_answers and len(raw) <= KEPT_REQUEST_BYTES_MAX,
        )
        try:
            return await self._readers.read(raw, order, body.caller)
        except WrongRequestError as error:
            raise Refusal(400, str(error), param=error.field) from None
        except ReadingError as error:
            if error.is_busy:
                raise Refusal(503, f"the body: {error}", code="too_busy", retry_after_s=1) from None
            raise Refusal(413, f"the body: {error}") from None
