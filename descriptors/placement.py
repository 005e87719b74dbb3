"""Which members of a cluster keep a key: weighted rendezvous hashing. Pure.

Every member scores every key, and the members in the order of their scores are the key's order: the first is its
keeper, the next stands in where the keeper cannot be reached. A score depends on the key and on that member alone, so a
member that joins or leaves moves its own share of the keys and no other. (Thaler and Ravishankar, "A Name-Based Mapping
Scheme for Rendezvous", 1996; weights by the logarithmic method of Schindler and others.)

    score = -weight / ln(u),  u a hash of (member, key) in (0, 1)
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from descriptors.cluster import Member, View

CELLS_MAX = 1 << 16
"""So many scores are computed at once: those of a long prefix for many members would take gigabytes."""
Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def key_words(bucket: str, keys: Sequence[str]) -> _Words:
    """64 bits for each key, the same in every process: uint64 of shape (len(keys),)."""
    salt = hashlib.blake2b(bucket.encode(), digest_size=16).digest()
    blake2b = hashlib.blake2b
    digests = b"".join([blake2b(key.encode(), digest_size=8, key=salt).digest() for key in keys])
    return np.frombuffer(digests, dtype="<u8")


def _mixed(words: _Words) -> _Words:
    """The finalizer of SplitMix64, a bijection whose output bits depend on all input bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Placement:
    """Places keys on the members of one view that take keys. Raises ValueError for a view without members."""

    def __init__(self, view: View) -> None:
        if not view.members:
            raise ValueError("the cluster has no members")
        self.view = view
        self.members: tuple[Member, ...] = view.placed

    @cached_property
    def _member_words(self) -> _Words:
        names = [hashlib.blake2b(member.name.encode(), digest_size=8).digest() for member in self.members]
        return np.frombuffer(b"".join(names), dtype="<u8")

    @cached_property
    def _weights(self) -> npt.NDArray[np.float64]:
        return np.array([member.weight for member in self.members], dtype=np.float64)

    def scores(self, words: _Words) -> npt.NDArray[np.float64]:
        """The score of each key for each member: float64 of shape (keys, members)."""
        mixed = _mixed(_mixed(words)[:, None] ^ self._member_words[None, :])
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return -self._weights / np.log(uniform)

    def keepers(self, bucket: str, keys: Sequence[str], without: Collection[str] = ()) -> Indices:
        """The index in `members` of each key's keeper, or of the next in its order that is not in `without`: int64 of
        shape (len(keys),). Raises ValueError where `without` names every member.
        """
        if len(self.members) == 1 and not without:
            return np.zeros(len(keys), dtype=np.int64)
        return self.keepers_of(key_words(bucket, keys), without)

    def keepers_of(self, words: _Words, without: Collection[str] = ()) -> Indices:
        """As `keepers`, of keys whose `key_words` these are."""
        left_out = np.array([member.name in without for member in self.members])
        if left_out.all():
            raise ValueError("every member is left out")
        nearest = np.empty(len(words), dtype=np.int64)
        step = max(1, CELLS_MAX // len(self.members))
        for start in range(0, len(words), step):
            scores = self.scores(words[start : start + step])
            scores[:, left_out] = -1.0
            nearest[start : start + step] = scores.argmax(axis=1)
        return nearest

    def order(self, bucket: str, key: str) -> list[Member]:
        """All members, the key's keeper first."""
        scores = self.scores(key_words(bucket, [key]))[0]
        return [self.members[index] for index in np.argsort(-scores, kind="stable")]
