"""NIXL's OBJ plugin as a client: `python -m bench.beds.kv_peers.nixl_obj_reader WORK`.

One READ for each layer, of all its slices; the plugin makes a ranged GET of every slice.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config

from bench.beds.kv_peers.work import Capability, Run, Work, sampled, serve, verify_first_layers
from bench.beds.memory import huge_page_memory

# NIXL's libraries end the process at exit where the system's libibverbs is loaded too
os.environ.setdefault("UCX_MODULES", "^ib")

AGENT = "reader"
THREADS = "16"
LAYERS_IN_FLIGHT = 2
POLL_INTERVAL_S = 200e-6
LAYER_TIMEOUT_S = 120.0


def start(work: Work) -> Sequence[tuple[Capability, Run]]:
    """Create the agent and register buffer and chunks; the chunks are stored already."""
    assert work.s3 is not None
    agent = nixl_agent(AGENT, nixl_agent_config(backends=[]))
    settings = {
        "endpoint_override": work.s3.url,
        "scheme": "http",
        "access_key": work.s3.access_key,
        "secret_key": work.s3.secret_key,
        "bucket": work.s3.bucket,
        "region": work.s3.region,
        "use_virtual_addressing": "false",
        "num_threads": THREADS,
    }
    agent.create_backend("OBJ", settings)
    content = work.content()
    layer_count = work.sampled_layers
    slice_bytes, chunk_count = work.layout.per_layer_chunk_bytes, len(work.keys)
    buffer = huge_page_memory(layer_count * chunk_count * slice_bytes)
    address = int(buffer.ctypes.data)
    agent.register_memory([(address, buffer.nbytes, 0, "")], "DRAM", backends=["OBJ"])
    chunks = [(0, work.layout.chunk_bytes, index, key) for index, key in enumerate(work.keys)]
    agent.register_memory(chunks, "OBJ", backends=["OBJ"])

    def post(layer: int) -> Any:
        first = address + layer * chunk_count * slice_bytes
        ours = [(first + index * slice_bytes, slice_bytes, 0) for index in range(chunk_count)]
        theirs = [(layer * slice_bytes, slice_bytes, index) for index in range(chunk_count)]
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(ours, "DRAM"), agent.get_xfer_descs(theirs, "OBJ"), AGENT
        )
        agent.transfer(handle)
        return handle

    def run() -> tuple[float, float | None]:
        buffer.fill(0)
        in_flight: deque[Any] = deque()
        first_layer_s = None
        started_s = time.monotonic()
        for layer in range(layer_count):
            in_flight.append(post(layer))
            while len(in_flight) >= (LAYERS_IN_FLIGHT if layer + 1 < layer_count else 1):
                _end(agent, in_flight.popleft())
                first_layer_s = first_layer_s or time.monotonic() - started_s
        duration_s = time.monotonic() - started_s
        verify_first_layers(buffer, content, layer_count)
        return duration_s, first_layer_s

    note = f"NIXL OBJ, {LAYERS_IN_FLIGHT} layers in flight, {sampled(work)}"
    return [(Capability("nixl_obj", buffer.nbytes, note), run)]


def _end(agent: Any, handle: Any) -> None:
    deadline_s = time.monotonic() + LAYER_TIMEOUT_S
    while (state := agent.check_xfer_state(handle)) == "PROC":
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a layer is not there after {LAYER_TIMEOUT_S:.0f} s")
        time.sleep(POLL_INTERVAL_S)
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise RuntimeError(f"a layer's READ ended as {state}")


if __name__ == "__main__":
    serve(start, sys.argv[1])
    sys.stderr.flush()
    os._exit(0)
