"""Fetches over ucx and shm: the server writes into the registered buffer, notices say which layers are there, and the
answer to the request comes last.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from nixl_client.answers import RDMA_BYTES_HEADER, payload_shape
from nixl_client.fetch import LayerFetch
from nixl_client.http import Answer, SignedHttp, UnansweredError
from nixl_client.links import Link
from nixl_client.registration import GONE, AgentSession

_log = logging.getLogger(__name__)


class OneSidedFetches:
    """Runs fetches over one link. `session` is who we are to the server."""

    def __init__(self, http: SignedHttp, link: Link, session: AgentSession) -> None:
        self._http = http
        self.link = link
        self.session = session

    def run(self, fetch: LayerFetch) -> None:
        """POST the descriptor; its answer comes when every write is done. What may have started is never sent twice."""
        self.link.listen(fetch.request_id, fetch.on_notice)
        try:
            answer = self._post(fetch)
            headers = answer.headers
            fetch.on_answer(*payload_shape(headers), int(headers[RDMA_BYTES_HEADER]), headers)
        except UnansweredError as error:
            self._end_unanswered(fetch, error)
        except ObjectCacheError as error:
            fetch.on_failure(error)
            fetch.settle()
        except Exception as error:
            _log.exception("fetch %s", fetch.request_id)
            self._end_unanswered(fetch, ServerError(ErrorCode.INTERNAL_ERROR, f"the client failed: {error}"))
        finally:
            self.link.forget(fetch.request_id)

    def _end_unanswered(self, fetch: LayerFetch, error: ObjectCacheError) -> None:
        """A server that has said `done` does not touch the buffer any more; any other is asked to stop."""
        fetch.on_failure(error)
        if fetch.is_complete:
            fetch.settle()
            return
        with contextlib.suppress(ObjectCacheError):  # the caller's own cancel meets the error again
            self.cancel(fetch)

    def cancel(self, fetch: LayerFetch) -> None:
        """The server answers when nothing is in flight. Raises ObjectCacheError when it cannot be asked."""
        self._http.request("DELETE", f"/_objectcache/requests/{fetch.request_id}")
        fetch.settle()

    def close(self) -> None:
        """Deregister, which waits for writes in flight, and end the link."""
        try:
            self.session.close()
        finally:
            self.link.stop()

    def _post(self, fetch: LayerFetch) -> Answer:
        """Where the server has forgotten our agent (it restarted, or we were suspended), register anew and ask again:
        such a refusal comes before anything is planned.
        """
        try:
            return self._post_once(fetch)
        except ObjectCacheError as error:
            target = fetch.descriptor.rdma_target
            if error.code not in GONE or target is None:
                raise
            self.session.forget(target.agent_id)
            renamed = replace(target, agent_id=self.session.agent_id())
            fetch.descriptor = replace(fetch.descriptor, rdma_target=renamed)
            return self._post_once(fetch)

    def _post_once(self, fetch: LayerFetch) -> Answer:
        body = encode_binary(fetch.descriptor)
        return self._http.request("POST", f"/{fetch.bucket}", {"layerwise": ""}, body, fetch.timeout_s)
