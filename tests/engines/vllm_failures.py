"""vLLM over an ObjectCache server that fails: tokens stay right, requests end, the log says what happened.

python -m tests.engines.vllm_failures [--only NAME]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm_roundtrip import BUCKET, check, client, different, in_process, make_model, make_prompts, server


def keys_in_order(endpoint: str, prompt: list[int], log: dict[str, Any]) -> list[str]:
    """The stored keys of a prompt, in prefix order."""
    from nixl_client.connectors.vllm.naming import Deployment, KeyChain

    deployment = Deployment(**log["deployment"])
    return list(KeyChain(deployment.namespace(0, "", ""), 32).keys(prompt, len(prompt) // 32))


def overwrite(endpoint: str, keys: list[str]) -> None:
    """Put the bytes of the third chunk under the second chunk's key: what checksums cannot see."""
    with client(endpoint) as store:
        chunk = store._http.request("GET", f"/{BUCKET}/{keys[2]}").body
        store.put_chunks([keys[1]], [bytearray(chunk)])


def shorten(endpoint: str, keys: list[str]) -> None:
    """A chunk of the wrong size."""
    with client(endpoint) as store:
        store.put_chunks([keys[4]], [bytearray(100)])


def main() -> int:
    """Run everything; the number of failed checks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        make_model(root / "model")
        prompts = make_prompts()
        base: dict[str, Any] = {"model": str(root / "model"), "groups": [[prompt] for prompt in prompts]}
        wanted = in_process(base | {"engine": {"enable_prefix_caching": False}})["tokens"]
        cases: dict[str, Callable[..., int]] = {
            "wrong chunk": wrong_chunk,
            "chunk of the wrong size": chunk_of_wrong_size,
            "bytes flipped on disk": flipped,
            "deleted between lookup and load": deleted,
            "server killed before load": killed,
            "preemption": preemption,
        }
        for name, run in cases.items():
            if arguments.only in name:
                with server(root / f"data-{name}") as (endpoint, process):
                    extra = {"endpoint": endpoint, "bucket": BUCKET, "model": "tiny"}
                    work = base | {"extra": extra}
                    failures += run(name, work, wanted, prompts, endpoint, process, root / f"data-{name}")
    print(f"{failures} failed")
    return failures


def report(name: str, run: dict[str, Any], wanted: list[list[int]], is_wrong_wanted: bool = False) -> int:
    """Compare tokens; show counters and warnings."""
    bad = different(run["tokens"], wanted)
    is_right = bool(bad) if is_wrong_wanted else not bad
    result = not check(
        name,
        is_right,
        {
            "different": bad,
            **run["counters"],
            "async": run["async_scheduling"],
            "times": [round(t, 2) for t in run["times"]],
        },
    )
    lines = [line for line in run["log"].splitlines() if "recomputed" in line or "KV load failure" in line]
    print("     " + "\n     ".join(line[:230] for line in lines[:4]), flush=True)
    return int(result)


def wrong_chunk(name, work, wanted, prompts, endpoint, process, data) -> int:
    cold = in_process(work)
    overwrite(endpoint, keys_in_order(endpoint, prompts[0], cold))
    return report(name, in_process(work), wanted, is_wrong_wanted=True)


def chunk_of_wrong_size(name, work, wanted, prompts, endpoint, process, data) -> int:
    cold = in_process(work)
    shorten(endpoint, keys_in_order(endpoint, prompts[0], cold))
    failures = report(name, in_process(work), wanted)
    shorten(endpoint, keys_in_order(endpoint, prompts[0], cold))
    asynchronous = work | {"engine": {"async_scheduling": True}}
    failures += report(name + ", asynchronous", in_process(asynchronous), wanted)
    shorten(endpoint, keys_in_order(endpoint, prompts[0], cold))
    return failures + report(
        name + ", asynchronous, together", in_process(asynchronous | {"groups": [prompts]}), wanted
    )


def flipped(name, work, wanted, prompts, endpoint, process, data) -> int:
    in_process(work)
    import time

    time.sleep(2)
    files = [path for path in data.rglob("*") if path.is_file() and "reserve" not in path.name]
    files = sorted((path for path in files if "index" not in path.name), key=lambda path: path.stat().st_size)
    with files[-1].open("r+b") as stream:
        stream.seek(files[-1].stat().st_size // 3)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 255]))
    print("     flipped a byte of", files[-1].name)
    return report(name, in_process(work), wanted) + report(name + ", repaired", in_process(work), wanted)


def deleted(name, work, wanted, prompts, endpoint, process, data) -> int:
    cold = in_process(work)
    keys = keys_in_order(endpoint, prompts[0], cold)
    return report(name, in_process(work | {"delete_after_lookup": keys[7]}), wanted)


def killed(name, work, wanted, prompts, endpoint, process, data) -> int:
    in_process(work)
    quick = work | {"extra": work["extra"] | {"load_timeout_s": 5.0}, "kill_after_lookup": process.pid}
    return report(name, in_process(quick), wanted)


def preemption(name, work, wanted, prompts, endpoint, process, data) -> int:
    small = work | {"engine": {"num_gpu_blocks_override": 40, "max_model_len": 1024}, "groups": [prompts]}
    failures = report(name + ", cold", in_process(small), wanted)
    return failures + report(name + ", warm", in_process(small), wanted)


if __name__ == "__main__":
    sys.exit(main())
