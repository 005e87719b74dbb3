"""Chunks that are put into ObjectCache by boto3, as any S3 client may."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
from tqdm import tqdm

from objectcache.calibration.servers import LocalServer, s3_client

PUT_THREADS = 4


def put_objects(server: LocalServer, bucket: str, keys: Sequence[str], objects: np.ndarray) -> None:
    """Make the bucket and put row i of `objects` (chunk_count, L*S) under key i, with boto3 and a progress bar."""
    server.make_bucket(bucket)
    with (
        closing(s3_client(server.url, server.access_key, server.secret_key, connections=PUT_THREADS)) as s3,
        tqdm(total=objects.nbytes, desc="PUT chunks (boto3)", unit="B", unit_scale=True, unit_divisor=1024) as bar,
        ThreadPoolExecutor(PUT_THREADS) as pool,
    ):

        def put(index: int) -> int:
            s3.put_object(Bucket=bucket, Key=keys[index], Body=objects[index].tobytes())
            return int(objects[index].nbytes)

        for nbytes in pool.map(put, range(len(keys))):
            bar.update(nbytes)
