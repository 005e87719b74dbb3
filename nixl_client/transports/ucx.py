"""The client's side of ucx: one thread owns the client's NIXL agent, registers memory, and passes arriving notices to
the fetches that wait for them.

While fetches are under way the thread polls for notices with a short sleep; otherwise it sleeps on its queue.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from descriptors.messages import AgentRegistration, AgentRenewal, Region
from descriptors.notices import GREETING, Notice, NoticeError, decode_notice
from nixl_client.transports.buffers import Buffer
from objectcache.adapters.interfaces import interface_towards, ucx_devices
from objectcache.adapters.nixl_agent import Agent, NixlFailure, Registration, host_id
from objectcache.adapters.nixl_memory import Memory

POLL_INTERVAL_S = 100e-6
BUSY_POLL_S = 50e-6
"""A poll that takes this long has moved bytes itself, as over TCP: there are likely to be more."""
GREETING_S = 1.0
_GREETING_ID = ""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class UcxReceiver:
    """A NIXL agent on the interface that leads to the server, `host` and `port`: nobody on another network can reach
    the memory of this process. Raises ImportError, OSError or NixlFailure where UCX cannot run.
    """

    def __init__(self, host: str, port: int) -> None:
        self._thread = NixlThread(ucx_devices([interface_towards(host, port)]))
        self._registrations: dict[str, Registration] = {}
        self.call_and_connect = self._thread.call_and_connect
        self.listen = self._thread.listen
        self.stop_listening = self._thread.stop_listening
        self.stop = self._thread.stop

    def offer(self, region_id: str, buffer: Buffer) -> None:
        self._registrations[region_id] = self._thread.register(buffer.memory)

    def withdraw(self, region_id: str) -> None:
        self._thread.deregister(self._registrations.pop(region_id))

    def registration(self, regions: Sequence[Region], lifetime_s: float) -> AgentRegistration:
        return AgentRegistration(self._thread.metadata(), tuple(regions), lifetime_s, host_id=host_id())

    def introduction(self, regions: Sequence[Region], lifetime_s: float, names: Sequence[str]) -> AgentRegistration:
        return replace(self.registration(regions, lifetime_s), members=tuple(names))

    def renewal(self, regions: Sequence[Region], lifetime_s: float) -> AgentRenewal:
        return AgentRenewal(lifetime_s, self._thread.metadata(), tuple(regions))

    def ended_ids(self) -> list[str]:
        """None: UCX does not tell."""
        return []

    def writers(self) -> Callable[[], bool]:
        """Nothing here tells that a server has ended."""
        return lambda: False

    def on_forgotten(self) -> None:
        """The NIXL agent can be registered again as it is."""


class NixlThread:
    """The thread with the NIXL agent. `devices` are those UCX uses, None for all. Raises ImportError or NixlFailure
    where UCX cannot run.
    """

    def __init__(self, devices: str | None = None) -> None:
        self._devices = devices
        self._agent: Agent | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Callable[[Notice], None]] = {}
        self._greeted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="objectcache-receiver", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # NIXL aborts a process that ends with an agent in a running thread
        try:
            self._call(self._start)
        except BaseException:
            self._commands.put(self._stop)
            raise

    def register(self, memory: Memory) -> Registration:
        """Register memory for the server to write into."""
        return self._call(lambda: self._running_agent().register(memory))

    def deregister(self, registration: Registration) -> None:
        """Undo `register`."""
        self._call(registration.close)

    def metadata(self) -> bytes:
        """The agent's metadata as it is now."""
        return self._call(lambda: self._running_agent().metadata())

    def call_and_connect(self, register: Callable[[], _T]) -> _T:
        """Call `register`, polling meanwhile, and wait at most `GREETING_S` for the server's greeting, which says that
        the connection is open.
        """
        self._greeted.clear()
        self._call(lambda: self._listeners.__setitem__(_GREETING_ID, lambda _: None))
        try:
            registered = register()
            self._greeted.wait(GREETING_S)
            return registered
        finally:
            self.stop_listening(_GREETING_ID)

    def listen(self, request_id: str, on_notice: Callable[[Notice], None]) -> None:
        """From now on hand notices of this request to `on_notice`, in this object's thread."""
        self._listeners[request_id] = on_notice
        self._commands.put(_wake_up)

    def stop_listening(self, request_id: str) -> None:
        """Drop notices of this request from now on."""
        self._listeners.pop(request_id, None)

    def stop(self) -> None:
        """End the thread; registered memory is let go with the agent."""
        self._commands.put(self._stop)
        self._thread.join(timeout=10)
        atexit.unregister(self.stop)

    def _start(self) -> None:
        self._agent = Agent(str(uuid.uuid4()), self._devices)

    def _stop(self) -> None:
        self._stopping = True

    def _call(self, action: Callable[[], _T]) -> _T:
        future: Future[_T] = Future()
        self._commands.put(lambda: _settle(future, action))
        return future.result()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._commands.get(block=not self._listeners)()
            except queue.Empty:
                began_s = time.monotonic()
                self._take_notices()
                if time.monotonic() - began_s < BUSY_POLL_S:
                    time.sleep(POLL_INTERVAL_S)
        self._agent = None

    def _running_agent(self) -> Agent:
        if self._agent is None:
            raise NixlFailure("the NIXL agent has ended")
        return self._agent

    def _take_notices(self) -> None:
        try:
            arrived = self._running_agent().notices()
        except NixlFailure as failure:
            _log.warning("reading notices failed: %s", failure)
            return
        for message in arrived:
            if message == GREETING:
                self._greeted.set()
                continue
            try:
                notice = decode_notice(message)
            except NoticeError:
                continue
            listener = self._listeners.get(notice.request_id)
            if listener is not None:
                _pass_on(listener, notice)


def _wake_up() -> None:
    """A command that does nothing: the thread may sleep on its queue."""


def _pass_on(listener: Callable[[Notice], None], notice: Notice) -> None:
    """A listener that fails must not take the thread, and every other fetch, with it."""
    try:
        listener(notice)
    except Exception:
        _log.exception("entering %r failed", notice)


def _settle(future: Future[Any], action: Callable[[], Any]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
