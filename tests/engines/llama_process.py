"""llama.cpp's own server in a process of its own: `llama_process.py MODEL FOLDER OPTION=VALUE...`. It prints its
address and serves until its input ends.
"""

from __future__ import annotations

import sys

import xllamacpp


def main() -> None:
    """Serve."""
    model, folder, *options = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.slot_save_path = folder
    params.port = 0
    params.n_ctx = 4096
    params.n_parallel = 2
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    for option in options:
        name, _, value = option.partition("=")
        if name == "flash_attention":
            params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{value}")
        elif name == "lora":
            params.lora_adapters = [_adapter(value)]
        else:
            setattr(params, name, int(value))
    server = xllamacpp.Server(params)
    print(f"\nlistening on {server.listening_address}", flush=True)
    sys.stdin.read()


def _adapter(path: str) -> xllamacpp.CommonAdapterLoraInfo:
    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path, adapter.scale = path, 1.0
    return adapter


if __name__ == "__main__":
    main()
