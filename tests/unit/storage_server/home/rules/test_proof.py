"""Proofs: what was not put is not proved, at every length, and what was is, as far as it has come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_server.home.rules.proof import HEADER, PROOF_WORDS_MAX, make_proof, parse_proof, proof_within, proved_bytes
from storage_server.planning.block_checksums import BLOCK_BYTES, BlockChecksums

LONG = BLOCK_BYTES * PROOF_WORDS_MAX * 2 + 5 * BLOCK_BYTES + 77


def packed(data: bytes) -> bytes:
    blocks = BlockChecksums()
    blocks.update(data)
    return blocks.packed()


def data_of(nbytes: int) -> bytes:
    return bytes(range(251)) * (nbytes // 251 + 1)


@pytest.mark.parametrize("nbytes", [1, BLOCK_BYTES, BLOCK_BYTES + 1, 100_000, LONG])
def test_a_proof_fits_the_metadata_and_is_read_back(nbytes: int) -> None:
    proof = make_proof(nbytes, packed(data_of(nbytes)[:nbytes]))
    assert len(proof.words) <= PROOF_WORDS_MAX
    assert len(HEADER.removeprefix("x-amz-meta-")) + len(proof.header()) < 2048
    assert parse_proof(proof.header(), nbytes) == proof


@given(st.integers(0, 1500), st.sampled_from([1, BLOCK_BYTES, 100_000, LONG]))
def test_a_proof_takes_no_more_room_than_it_is_given(room_bytes: int, nbytes: int) -> None:
    """It proves less finely then, and the whole all the same."""
    data = data_of(nbytes)[:nbytes]
    proof = proof_within(make_proof(nbytes, packed(data)), room_bytes)
    if proof is None:
        assert room_bytes < 32
        return
    assert len(proof.header()) <= room_bytes
    assert parse_proof(proof.header(), nbytes) == proof
    assert proved_bytes(proof, packed(data), nbytes) == nbytes


@given(st.data())
def test_what_has_come_is_proved_unit_by_unit(data: st.DataObject) -> None:
    nbytes = data.draw(st.sampled_from([1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, LONG]))
    whole = data_of(nbytes)[:nbytes]
    proof = make_proof(nbytes, packed(whole))
    arrived = min(nbytes, data.draw(st.integers(0, -(-nbytes // BLOCK_BYTES))) * BLOCK_BYTES)
    expected = nbytes if arrived == nbytes else arrived // proof.unit_bytes * proof.unit_bytes
    assert proved_bytes(proof, packed(whole[:arrived]), arrived) == expected
    if expected:
        at = data.draw(st.integers(0, expected - 1))
        changed = bytearray(whole[:arrived])
        changed[at] ^= 1 << data.draw(st.integers(0, 7))
        assert proved_bytes(proof, packed(bytes(changed)), arrived) is None


@pytest.mark.parametrize(
    "value",
    [None, "", "16384", "16384:", "16384:!!", "0:AAAAAA==", "12345:AAAAAA==", "16384:AAAA", "9" * 40 + ":AAAAAA=="],
)
def test_what_is_no_proof_proves_nothing(value: str | None) -> None:
    assert parse_proof(value, 100) is None
