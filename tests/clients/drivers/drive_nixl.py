"""NIXL's OBJ plugin, plain; with a limit in CRT_MIN_LIMIT, larger objects go through the AWS CRT."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from typing import ClassVar

# NIXL's libraries end the process at exit where the system's libibverbs is loaded too
os.environ.setdefault("UCX_MODULES", "^ib")

import numpy as np
from contract import Target
from nixl_cu12._api import nixl_agent, nixl_agent_config
from suite import SMALL, Driver, main

CRT_MIN_LIMIT = os.environ.get("CRT_MIN_LIMIT")
_AGENT = "client"
_WAIT_S = 60


class NixlObj(Driver):
    version = version("nixl-cu12")
    small: ClassVar = {key: size for key, size in SMALL.items() if size > 0}
    lacks: ClassVar = {
        "list": "the plugin has no such verb",
        "delete": "the plugin has no such verb",
        **({} if CRT_MIN_LIMIT else {"multipart": "one PUT, whatever the size, without `crtMinLimit`"}),
    }
    notes: ClassVar = {"get": "with HEAD through `query_memory`"}

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._agent = nixl_agent(_AGENT, nixl_agent_config(backends=[]))
        settings = {
            "endpoint_override": target.endpoint,
            "scheme": target.endpoint.partition(":")[0],
            "access_key": target.access_key,
            "secret_key": target.secret_key,
            "bucket": target.bucket,
            "region": target.region,
            "use_virtual_addressing": "false",
            **({"ca_bundle": target.ca_file} if target.ca_file else {}),
            **({"crtMinLimit": CRT_MIN_LIMIT} if CRT_MIN_LIMIT else {}),
        }
        self._agent.create_backend("OBJ", settings)

    def put(self, key: str, data: bytes) -> None:
        self._transfer("WRITE", key, np.frombuffer(bytearray(data), np.uint8))

    def get(self, key: str) -> bytes:
        known = self._agent.query_memory([(0, 0, 0, key), (0, 0, 0, key + "-absent")], "OBJ", "OBJ")
        assert [answer is not None for answer in known] == [True, False], known
        return self._read(key, 0, self.small.get(key, self.large_bytes))

    def get_range(self, key: str, first: int, last: int) -> bytes:
        return self._read(key, first, last - first + 1)

    multipart = put

    def _read(self, key: str, first: int, count: int) -> bytes:
        into = np.zeros(count, np.uint8)
        self._transfer("READ", key, into, first)
        return into.tobytes()

    def _transfer(self, operation: str, key: str, memory: np.ndarray, first: int = 0) -> None:
        local = self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM", backends=["OBJ"])
        remote = self._agent.register_memory([(first, memory.nbytes, 1, key)], "OBJ", backends=["OBJ"])
        handle = self._agent.initialize_xfer(operation, local.trim(), remote.trim(), _AGENT)
        state = self._agent.transfer(handle)
        deadline = time.monotonic() + _WAIT_S
        while state == "PROC":
            assert time.monotonic() < deadline, f"{operation} of {key!r} did not end"
            time.sleep(0.001)  # NIXL is asked for the state of a transfer, and tells nobody
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        self._agent.deregister_memory(local)
        self._agent.deregister_memory(remote)
        assert state == "DONE", f"{operation} of {key!r}: {state}"


if __name__ == "__main__":
    main("NIXL OBJ, crtMinLimit" if CRT_MIN_LIMIT else "NIXL OBJ", NixlObj)
