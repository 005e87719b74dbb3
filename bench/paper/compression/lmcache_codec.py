"""LMCache's codec on layers in a file: encode, decode, and tell the times as JSON. Runs in LMCache's environment, and
imports nothing of ours: `python -P lmcache_codec.py FOLDER TOKENS WIDTH RUNS`.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from lmcache.v1.kv_codec.asym_k16_v8 import AsymK16V8Codec

folder, tokens, width, runs = Path(sys.argv[1]), *map(int, sys.argv[2:5])
torch.set_num_threads(1)
data = np.load(folder / "layers.npy")
states = torch.from_numpy(data).view(torch.bfloat16).reshape(len(data), 2, tokens, 8, width // 8)
codec = AsymK16V8Codec()
times: dict[str, list[float]] = {"encode_s": [], "decode_s": []}
blobs, back = [], []
for _ in range(runs + 1):
    began_s = time.perf_counter()
    blobs = [codec.to_bytes(codec.encode(keys, values)) for keys, values in states]
    middle_s = time.perf_counter()
    back = [
        codec.decode(codec.from_bytes(blob), out_k_dtype=torch.bfloat16, out_v_dtype=torch.bfloat16) for blob in blobs
    ]
    times["encode_s"].append(middle_s - began_s)
    times["decode_s"].append(time.perf_counter() - middle_s)
layers = torch.stack([torch.stack([keys, values]) for keys, values, *_ in back])
np.save(folder / "decoded.npy", layers.contiguous().view(torch.uint8).numpy().reshape(data.shape))
print(json.dumps({name: taken[1:] for name, taken in times.items()} | {"encoded_bytes": sum(map(len, blobs))}))
