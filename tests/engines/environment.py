"""Finds the interpreters that have vLLM, LMCache, SGLang and llama.cpp. This project is not installed there: it is
found by PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path

from bench.beds.kv_peers.install import ENGINES, LLAMA_CPP, SGLANG
from tests.support.requests import OWNER
from tests.support.tree import repository

OVERRIDE = "OBJECTCACHE_ENGINES_PYTHON"


class EnvironmentMissingError(Exception):
    """The engines are not installed."""


def engine_python() -> Path:
    """The interpreter engines run in. Raises EnvironmentMissingError."""
    if named := os.environ.get(OVERRIDE):
        if not Path(named).exists():
            raise EnvironmentMissingError(f"{OVERRIDE} names {named}, which is not there")
        return Path(named)
    if not ENGINES.is_installed:
        raise EnvironmentMissingError("the engines' environment is missing or out of date: run `make engines`")
    return ENGINES.python


def sglang_python() -> Path:
    """The interpreter that has SGLang. Raises EnvironmentMissingError."""
    if not SGLANG.is_installed:
        raise EnvironmentMissingError("SGLang's environment is missing or out of date: run `make engines`")
    return SGLANG.python


def llama_cpp_python() -> Path:
    """The interpreter that has llama.cpp. Raises EnvironmentMissingError."""
    if not LLAMA_CPP.is_installed:
        raise EnvironmentMissingError("llama.cpp's environment is missing or out of date: run `make engines`")
    return LLAMA_CPP.python


def engine_variables() -> dict[str, str]:
    """The environment of an engine's process: one thread each, nothing from the network, the engine in the process."""
    return {
        **os.environ,
        "PYTHONPATH": str(repository()),
        "AWS_ACCESS_KEY_ID": OWNER[0],
        "AWS_SECRET_ACCESS_KEY": OWNER[1],
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",  # the next vLLM does not say so by its name
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
