"""The names of stored objects, for clearing a cache."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from nixl_client.client import Client

PAGE_BYTES_MAX = 8 << 20
"""A listing of a thousand names of a thousand bytes each, with what stands around them."""


def object_names(client: Client, prefix: str) -> Iterator[list[str]]:
    """The names that begin with `prefix`, some at a time; names that a caller deletes meanwhile do not matter. Raises
    ObjectCacheError.
    """
    after = ""
    while True:
        query = {"list-type": "2", "prefix": prefix} | ({"start-after": after} if after else {})
        body = client.http.request("GET", f"/{client.bucket}", query, bytes_max=PAGE_BYTES_MAX).body
        names = [each.text or "" for each in ElementTree.fromstring(body).iterfind("{*}Contents/{*}Key")]
        names = [name for name in names if name.startswith(prefix) and name > after]
        if not names:
            return
        yield names
        after = names[-1]
