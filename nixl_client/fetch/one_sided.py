"""Fetches over ucx and shm: the server writes into the registered buffer, notices say which layers are there, and the
answer to the request comes last.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.headers import RDMA_BYTES_HEADER, REQUESTS_PATH, WRITERS_HEADER
from nixl_client.fetch.decoding import forms_in, is_too_new
from nixl_client.fetch.delivery_state import payload_shape
from nixl_client.fetch.fetch_ledger import FetchLedger
from nixl_client.session.agent import GONE, ClientAgent
from nixl_client.session.signed_http import SignedAnswer, SignedHttp
from nixl_client.transports.http import UnansweredError, number_in

STOP_S = 2.0
"""How long a server may take to say that a request is stopped, before the fetch is given up."""
STOP_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""The pauses after each unanswered request to stop a fetch."""
NOTICE_WAIT_S = 5.0
"""How long notices of the layers before a failed one are waited for. Each is a few bytes that were sent before the
answer, so they are late only where threads of this host are. Layers whose notices are lost count as not written.
"""
_log = logging.getLogger(__name__)


class OneSidedFetches:
    """Runs fetches into memory that `agent` has registered."""

    def __init__(self, http: SignedHttp, agent: ClientAgent) -> None:
        self._http = http
        self.agent = agent
        self._lock = threading.Lock()
        self._left_open: list[FetchLedger] = []
        """Fetches that have ended well, but for a server that was given up and may still write."""

    def run(self, fetch: FetchLedger) -> None:
        """POST the descriptor; its answer comes when every write is done. It is POSTed again, under another id, where
        no layer is ready and the server has surely nothing in flight.
        """
        try:
            self._http.retries.run(
                lambda left_s: self._try(fetch, left_s), fetch.timeout_s, fetch.begin_again, fetch.pause
            )
        except ObjectCacheError as error:
            fetch.on_failure(error)
            fetch.settle()
        except Exception as error:
            self._end_failed(fetch, error)

    def _try(self, fetch: FetchLedger, timeout_s: float) -> None:
        """Raises ObjectCacheError where the server has nothing in flight."""
        request_id = fetch.request_id
        if fetch.is_cancelling:
            raise ServerError(ErrorCode.CANCELLED, "the fetch was cancelled")
        self.agent.receiver.listen(request_id, fetch.on_notice)
        fetch.have_writers_ended = self.agent.receiver.writers()
        try:
            self._settle_before(fetch)
            answer = self._post(fetch, timeout_s)
            headers = answer.headers
            forms = forms_in(headers)
            fetch.on_answer(*payload_shape(headers), number_in(headers, RDMA_BYTES_HEADER), headers, forms=forms)
            if fetch.given_up:
                with self._lock:
                    self._left_open.append(fetch)
        except UnansweredError as error:
            if self._has_nothing_in_flight(fetch, error):
                raise
            self._end_unanswered(fetch, error)
        except ObjectCacheError as error:
            if error.layer:  # the layers before it were written: their notices came another way than this answer
                fetch.wait_reported(error.layer, NOTICE_WAIT_S)
            raise
        except Exception as error:
            self._end_failed(fetch, error)
        finally:
            self.agent.receiver.stop_listening(request_id)

    def _has_nothing_in_flight(self, fetch: FetchLedger, error: UnansweredError) -> bool:
        """Whether a request without an answer has surely nothing in flight, so that it may be made again. A server that
        is silent is not asked: the fetch has waited long enough.
        """
        if error.never_sent:
            return True
        if fetch.has_layers or isinstance(error.__cause__, TimeoutError):
            return False
        try:
            self._stop(fetch, self.agent.writers_header(), STOP_S)
        except ObjectCacheError:
            return False
        return True

    def _settle_before(self, fetch: FetchLedger) -> None:
        """Have servers that were given up drain, where they may write into this fetch's memory. Raises ServerError
        where one cannot be asked: then the memory must be given up, too.
        """
        with self._lock:
            mine = [other for other in self._left_open if not other.is_settled and other.place.overlaps(fetch.place)]
        for other in mine:
            try:
                self._cancel(other, {WRITERS_HEADER: other.given_up})
            except ObjectCacheError as error:
                problem = f"{other.given_up} may still write into this buffer, and cannot be asked; take another one"
                raise ServerError(ErrorCode.TARGET_UNREACHABLE, problem, field="rdma_target") from error
        with self._lock:
            self._left_open = [other for other in self._left_open if not other.is_settled]

    def _end_failed(self, fetch: FetchLedger, error: Exception) -> None:
        """This client has failed, and the server may not know."""
        _log.exception("fetch %s", fetch.request_id)
        self._end_unanswered(fetch, ServerError(ErrorCode.INTERNAL_ERROR, f"the client failed: {error}"))

    def _end_unanswered(self, fetch: FetchLedger, error: ObjectCacheError) -> None:
        """No answer came. A server that has sent `done` writes into the buffer no more; in a cluster another one may
        have been asked for the same. Otherwise it is asked to stop, again where the question is not answered either;
        without an answer the fetch stays unsettled.
        """
        fetch.on_failure(error)
        if fetch.is_complete and self.agent.writers_header() is None:
            fetch.settle()
            return
        for pause_s in STOP_PAUSES_S:
            if fetch.is_settled:  # the caller has cancelled meanwhile
                return
            try:
                self.cancel(fetch)
                return
            except UnansweredError:  # the network that broke the request's connection may break this one, too
                time.sleep(pause_s)
            except ObjectCacheError:
                return  # if the caller cancels, the error is raised there

    def cancel(self, fetch: FetchLedger) -> None:
        """Have the server stop the fetch; it answers when nothing is in flight. Raises ObjectCacheError when the server
        cannot be asked, unless it has surely ended.
        """
        try:
            self._cancel(fetch, self.agent.writers_header())
        except UnansweredError:
            if not fetch.have_writers_ended():
                raise
            fetch.settle()

    def _cancel(self, fetch: FetchLedger, writers: dict[str, str] | None) -> None:
        self._stop(fetch, writers)
        fetch.settle()

    def _stop(self, fetch: FetchLedger, writers: dict[str, str] | None, timeout_s: float | None = None) -> None:
        path = f"{REQUESTS_PATH}/{fetch.request_id}"
        self._http.request_once("DELETE", path, timeout_s=timeout_s, headers=writers)

    def _post(self, fetch: FetchLedger, timeout_s: float) -> SignedAnswer:
        """Where the server has forgotten our agent (it restarted, or we were suspended), register anew and ask again:
        such a refusal comes before anything is planned. So does that of a server that knows no encoded layers.
        """
        try:
            return self._post_once(fetch, timeout_s)
        except ObjectCacheError as error:
            target = fetch.descriptor.rdma_target
            if is_too_new(fetch.descriptor, error):
                fetch.descriptor = fetch.descriptor.exact
                return self._post(fetch, timeout_s)
            if error.code not in GONE or target is None:
                raise
            self.agent.mark_gone(target.agent_id)
            renamed = replace(target, agent_id=self.agent.agent_id())
            fetch.descriptor = replace(fetch.descriptor, rdma_target=renamed)
            fetch.have_writers_ended = self.agent.receiver.writers()
            return self._post_once(fetch, timeout_s)

    def _post_once(self, fetch: FetchLedger, timeout_s: float) -> SignedAnswer:
        body = encode_binary(fetch.descriptor)
        return self._http.request_once("POST", f"/{fetch.bucket}", {"layerwise": ""}, body, timeout_s)
