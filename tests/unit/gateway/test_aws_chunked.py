"""aws-chunked bodies: the published example, every way to split it, and every way it can be wrong."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Mapping

import pytest
from awscrt import checksums

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ChecksumAlgorithm
from gateway.s3.aws_chunked import CHUNK_HEADER_BYTES_MAX, TRAILER_BYTES_MAX, ChunkedDecoder, SignatureChain
from gateway.s3.payload_form import PayloadForm
from gateway.s3.request import S3Request, parse_target, without_chunk_coding
from gateway.s3.sigv4 import signing_key
from gateway.s3.upload import check_digests, checksum_of, plan_body, plan_document

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
DATE = "20130524T000000Z"
SCOPE = "20130524/us-east-1/s3/aws4_request"
SEED = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
TRAILER_SEED = "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
CRC32C = "x-amz-checksum-crc32c"
PIECES = (b"a" * 65536, b"a" * 1024)
SIGNATURES = (
    "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
    "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
    "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
)
TRAILER_SIGNATURES = (
    "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
    "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
    "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
)
TRAILER_SIGNATURE = "d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435"


def chain(seed: str = SEED) -> SignatureChain:
    return SignatureChain(signing_key(SECRET, SCOPE), DATE, SCOPE, seed)


def signed_body(pieces: Iterable[bytes] = PIECES, signatures: Iterable[str] = SIGNATURES) -> bytes:
    """The wire form of chunks; the last one is empty and ends in its header."""
    wire = b""
    for piece, signature in zip((*pieces, b""), signatures, strict=True):
        wire += f"{len(piece):x};chunk-signature={signature}\r\n".encode() + piece + (b"\r\n" if piece else b"")
    return wire


def unsigned_body(pieces: Iterable[bytes], trailers: str = "") -> bytes:
    chunks = b"".join(f"{len(piece):X}\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return chunks + b"0\r\n" + trailers.encode() + b"\r\n"


def decode(decoder: ChunkedDecoder, wire: bytes, step: int | None = None) -> tuple[bytes, dict[str, str]]:
    step = step or len(wire) or 1
    data = b"".join(bytes(piece) for at in range(0, len(wire), step) for piece in decoder.feed(wire[at : at + step]))
    return data, decoder.finish()


def refusal(decoder: ChunkedDecoder, wire: bytes) -> CallerError:
    with pytest.raises(CallerError) as refused:
        decode(decoder, wire)
    return refused.value


def unsigned(nbytes: int, *names: str) -> ChunkedDecoder:
    return ChunkedDecoder(nbytes, None, frozenset(names))


@pytest.mark.parametrize("step", [None, 1, 7, 65_537])
def test_published_signed_example_decodes_however_it_is_split(step: int | None) -> None:
    """S3 API reference, "Transferring Payload in Multiple Chunks": 66,560 bytes of `a`, 66,824 on the wire."""
    wire = signed_body() + b"\r\n"
    assert len(wire) == 66_824
    assert decode(ChunkedDecoder(66_560, chain(), None), wire, step) == (b"a" * 66_560, {})


@pytest.mark.parametrize("ending", ["\n\r\n", "\r\n", "\n"])
@pytest.mark.parametrize("step", [None, 1])
def test_published_signed_trailer_example_decodes_with_any_line_ending(ending: str, step: int | None) -> None:
    """Same reference, "Including Trailing Headers". Its own example ends a trailer with LF CRLF, SDKs with CRLF."""
    wire = signed_body(signatures=TRAILER_SIGNATURES)
    wire += f"{CRC32C}:sOO8/Q=={ending}x-amz-trailer-signature:{TRAILER_SIGNATURE}\r\n\r\n".encode()
    decoder = ChunkedDecoder(66_560, chain(TRAILER_SEED), frozenset({CRC32C}))
    data, trailers = decode(decoder, wire, step)
    assert trailers == {CRC32C: "sOO8/Q=="}
    assert base64.b64encode(checksums.crc32c(data).to_bytes(4, "big")).decode() == "sOO8/Q=="


@pytest.mark.parametrize("at", [100, 65_700])
def test_a_changed_byte_in_any_signed_chunk_is_a_wrong_signature(at: int) -> None:
    wire = bytearray(signed_body() + b"\r\n")
    wire[at] ^= 1
    assert refusal(ChunkedDecoder(66_560, chain(), None), bytes(wire)).code is ErrorCode.SIGNATURE_DOES_NOT_MATCH


def test_signed_chunks_cannot_be_swapped_dropped_or_left_unsigned() -> None:
    """Each signature covers the one before; the empty last chunk is signed too."""
    for pieces, signatures, code in (
        (PIECES[::-1], (SIGNATURES[1], SIGNATURES[0], SIGNATURES[2]), ErrorCode.SIGNATURE_DOES_NOT_MATCH),
        (PIECES[:1], (SIGNATURES[0], SIGNATURES[2]), ErrorCode.SIGNATURE_DOES_NOT_MATCH),
        (PIECES, (*SIGNATURES[:2], "0" * 64), ErrorCode.SIGNATURE_DOES_NOT_MATCH),
        (PIECES, (*SIGNATURES[:2], ""), ErrorCode.INCOMPLETE_BODY),
    ):
        decoder = ChunkedDecoder(66_560, chain(), None)
        error = refusal(decoder, signed_body(pieces, signatures) + b"\r\n")
        assert error.code is code


def test_a_trailer_must_be_signed_where_chunks_are() -> None:
    wire = signed_body(signatures=TRAILER_SIGNATURES)
    for trailers, code in (
        (f"{CRC32C}:sOO8/Q==\r\n\r\n", ErrorCode.INCOMPLETE_BODY),
        (f"{CRC32C}:sOO8/Q==\r\nx-amz-trailer-signature:{'0' * 64}\r\n\r\n", ErrorCode.SIGNATURE_DOES_NOT_MATCH),
        (
            f"{CRC32C}:sOO8/A==\r\nx-amz-trailer-signature:{TRAILER_SIGNATURE}\r\n\r\n",
            ErrorCode.SIGNATURE_DOES_NOT_MATCH,
        ),
    ):
        decoder = ChunkedDecoder(66_560, chain(TRAILER_SEED), frozenset({CRC32C}))
        assert refusal(decoder, wire + trailers.encode()).code is code


@pytest.mark.parametrize("ending", ["\r\n", "\n\r\n\r\n", "\r\n\r\n"])
def test_unsigned_chunks_with_a_trailer_decode(ending: str) -> None:
    """The endings of botocore, minio and those who count the blank line twice."""
    wire = unsigned_body([b"hello", b" world"])[:-2] + f"{CRC32C}:abc={ending}".encode()
    assert decode(unsigned(11, CRC32C), wire) == (b"hello world", {CRC32C: "abc="})


def test_blanks_in_a_chunk_header_say_nothing() -> None:
    """S3 takes them, so some client may send them."""
    wire = signed_body(PIECES, SIGNATURES).replace(b";chunk-signature=", b" ;\tchunk-signature = ") + b"\r\n"
    assert decode(ChunkedDecoder(66_560, chain(), None), wire)[0] == b"".join(PIECES)


def test_commas_behind_an_announced_trailer_say_nothing() -> None:
    for text in (f"{CRC32C},", f"{CRC32C},, "):
        plan = plan_body(put(STREAMED | {"x-amz-trailer": text}), PayloadForm.UNSIGNED_CHUNKS_TRAILER, None)
        assert plan.trailer is ChecksumAlgorithm.CRC32C


def test_pieces_are_views_of_what_was_fed() -> None:
    """Gigabytes pass here: a copy each would be a copy too many."""
    wire = unsigned_body([b"x" * 1000])
    pieces = list(unsigned(1000).feed(wire))
    assert [len(piece) for piece in pieces] == [1000]
    assert pieces[0].obj is wire


@pytest.mark.parametrize(
    ("wire", "nbytes", "code"),
    [
        (b"", 0, ErrorCode.INCOMPLETE_BODY),
        (b"5\r\nhel", 5, ErrorCode.INCOMPLETE_BODY),
        (b"5\r\nhello\r\n", 5, ErrorCode.INCOMPLETE_BODY),
        (unsigned_body([b"hello"]), 6, ErrorCode.INCOMPLETE_BODY),
        (unsigned_body([b"hello"]), 4, ErrorCode.INCOMPLETE_BODY),
        (b"fffffffffffffffe\r\n", 9, ErrorCode.INCOMPLETE_BODY),
        (b"5\r\nhello!!0\r\n\r\n", 5, ErrorCode.INCOMPLETE_BODY),
        (b"5\nhello\r\n", 5, ErrorCode.INCOMPLETE_BODY),
        (b"five\r\nhello\r\n", 5, ErrorCode.INCOMPLETE_BODY),
        (b"-5\r\n", 5, ErrorCode.INCOMPLETE_BODY),
        (b"\r\n", 5, ErrorCode.INCOMPLETE_BODY),
        (b"0" * 2000, 5, ErrorCode.INCOMPLETE_BODY),
        (b"0" * 17 + b"\r\n", 5, ErrorCode.INCOMPLETE_BODY),
        (b"5;" + b"x" * CHUNK_HEADER_BYTES_MAX + b"\r\nhello", 5, ErrorCode.INCOMPLETE_BODY),
        (unsigned_body([b"hello"], "a:b\r\n"), 5, ErrorCode.MALFORMED_TRAILER),
        (unsigned_body([b"hello"], "x" * TRAILER_BYTES_MAX), 5, ErrorCode.MALFORMED_TRAILER),
        (unsigned_body([b"hello"])[:-2] + b"a:b", 5, ErrorCode.INCOMPLETE_BODY),
        (unsigned_body([b"hello"], "no colon\r\n"), 5, ErrorCode.MALFORMED_TRAILER),
        (unsigned_body([b"hello"], "\u00e9:b\r\n"), 5, ErrorCode.MALFORMED_TRAILER),
    ],
)
def test_bad_framing_says_what_was_wrong_however_it_is_split(wire: bytes, nbytes: int, code: ErrorCode) -> None:
    whole = refusal(unsigned(nbytes), wire)
    assert whole.code is code
    with pytest.raises(CallerError) as split:
        decode(unsigned(nbytes), wire, 1)
    assert str(split.value) == str(whole)


def test_announced_trailers_come_each_once() -> None:
    for trailers in ("", f"{CRC32C}:a\r\n{CRC32C}:a\r\n", "x-amz-checksum-sha1:a\r\n"):
        error = refusal(unsigned(5, CRC32C), unsigned_body([b"hello"], trailers))
        assert error.code is ErrorCode.MALFORMED_TRAILER


def test_bytes_after_the_last_chunk_are_refused_where_there_are_no_trailers() -> None:
    for rest in (b"\r\n5\r\nhello", b"xx", b"\r\nx"):
        error = refusal(ChunkedDecoder(66_560, chain(), None), signed_body() + rest)
        assert error.code is ErrorCode.INCOMPLETE_BODY


def test_unknown_chunk_extensions_are_ignored() -> None:
    assert decode(unsigned(5), b'5;a;b="c";chunk-signature=0\r\nhello\r\n0;x\r\n\r\n')[0] == b"hello"


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ("aws-chunked", None),
        ("aws-chunked,gzip", "gzip"),
        ("gzip, aws-chunked", "gzip"),
        ("deflate, gzip", "deflate, gzip"),
        ("AWS-CHUNKED , br, zstd", "br, zstd"),
        (None, None),
    ],
)
def test_the_coding_of_the_transfer_is_not_stored(sent: str | None, stored: str | None) -> None:
    headers = {"host": "h"} | ({} if sent is None else {"content-encoding": sent})
    assert without_chunk_coding(headers).get("content-encoding") == stored


def put(headers: Mapping[str, str], target: str = "/b/k", method: str = "PUT") -> S3Request:
    return parse_target(method, target, {"content-length": "5", **headers})


STREAMED = {"x-amz-decoded-content-length": "5", "content-length": "70"}


def test_a_plan_takes_the_decoded_length_and_the_announced_trailer() -> None:
    headers = {**STREAMED, "x-amz-trailer": "X-Amz-Checksum-CRC32C"}
    plan = plan_body(put(headers), PayloadForm.UNSIGNED_CHUNKS_TRAILER, None)
    assert (plan.nbytes, plan.checksum, plan.trailer_names) == (5, ChecksumAlgorithm.CRC32C, frozenset({CRC32C}))


def test_an_algorithm_alone_is_computed_and_kept() -> None:
    plan = plan_body(put({"x-amz-checksum-algorithm": "sha256"}), PayloadForm.UNSIGNED, None)
    assert (plan.checksum, plan.digests.checksum) == (ChecksumAlgorithm.SHA256, None)


@pytest.mark.parametrize(
    ("headers", "form", "code", "field"),
    [
        ({"content-md5": "abc"}, PayloadForm.UNSIGNED, "InvalidDigest", "content-md5"),
        ({"content-md5": "AAAA"}, PayloadForm.UNSIGNED, "InvalidDigest", "content-md5"),
        ({"content-length": "x"}, PayloadForm.UNSIGNED, "InvalidArgument", "content-length"),
        ({CRC32C: "AAAA"}, PayloadForm.UNSIGNED, "InvalidRequest", CRC32C),
        ({CRC32C: "not base64"}, PayloadForm.UNSIGNED, "InvalidRequest", CRC32C),
        (
            {CRC32C: "AAAAAA==", "x-amz-checksum-sha1": "a"},
            PayloadForm.UNSIGNED,
            "InvalidRequest",
            "x-amz-checksum-sha1",
        ),
        ({"x-amz-checksum-md5": "a"}, PayloadForm.UNSIGNED, "NotImplemented", "x-amz-checksum-md5"),
        ({"x-amz-checksum-algorithm": "MD6"}, PayloadForm.UNSIGNED, "InvalidRequest", "x-amz-checksum-algorithm"),
        (
            {"x-amz-sdk-checksum-algorithm": "CRC32"},
            PayloadForm.UNSIGNED,
            "InvalidRequest",
            "x-amz-sdk-checksum-algorithm",
        ),
        (
            {"x-amz-sdk-checksum-algorithm": "CRC32", CRC32C: "AAAAAA=="},
            PayloadForm.UNSIGNED,
            "InvalidRequest",
            "x-amz-sdk-checksum-algorithm",
        ),
        ({"x-amz-checksum-md6": "a"}, PayloadForm.UNSIGNED, "InvalidRequest", "x-amz-checksum-md6"),
        ({CRC32C: "AAAAAB=="}, PayloadForm.UNSIGNED, "InvalidRequest", CRC32C),
        ({"content-md5": "1B2M2Y8AsgTpgAmY7PhCfh=="}, PayloadForm.UNSIGNED, "InvalidDigest", "content-md5"),
        ({"x-amz-trailer": CRC32C}, PayloadForm.UNSIGNED, "MalformedTrailerError", "x-amz-trailer"),
        (STREAMED | {"x-amz-trailer": CRC32C}, PayloadForm.SIGNED_CHUNKS, "MalformedTrailerError", "x-amz-trailer"),
        (
            STREAMED | {"x-amz-trailer": f",{CRC32C}"},
            PayloadForm.UNSIGNED_CHUNKS_TRAILER,
            "InvalidRequest",
            "x-amz-trailer",
        ),
        (STREAMED | {"x-amz-trailer": ","}, PayloadForm.UNSIGNED_CHUNKS_TRAILER, "InvalidRequest", "x-amz-trailer"),
        (
            STREAMED | {"x-amz-trailer": "x-amz-meta-a"},
            PayloadForm.UNSIGNED_CHUNKS_TRAILER,
            "InvalidRequest",
            "x-amz-trailer",
        ),
        (
            STREAMED | {"x-amz-trailer": f"{CRC32C},x-amz-checksum-sha1"},
            PayloadForm.UNSIGNED_CHUNKS_TRAILER,
            "InvalidRequest",
            "x-amz-trailer",
        ),
        (
            STREAMED | {"x-amz-trailer": CRC32C, CRC32C: "AAAAAA=="},
            PayloadForm.UNSIGNED_CHUNKS_TRAILER,
            "InvalidRequest",
            "x-amz-trailer",
        ),
        ({}, PayloadForm.SIGNED_CHUNKS, "MissingContentLength", "x-amz-decoded-content-length"),
        (STREAMED, PayloadForm.UNSIGNED, "InvalidRequest", "x-amz-decoded-content-length"),
    ],
)
def test_wrong_claims_about_a_body_name_their_field(
    headers: dict[str, str], form: PayloadForm, code: str, field: str
) -> None:
    with pytest.raises(CallerError) as refused:
        plan_body(put(headers), form, None)
    assert (refused.value.code.value, refused.value.field) == (code, field)


def test_a_completion_carries_the_objects_checksum_not_its_bodys() -> None:
    headers = {CRC32C: "AAAAAA==", "x-amz-checksum-type": "FULL_OBJECT"}
    plan = plan_document(put(headers, "/b/k?uploadId=u", "POST"), PayloadForm.SIGNED, "0" * 64)
    assert plan.digests.checksum is None
    assert plan_document(put(headers, "/b?delete", "POST"), PayloadForm.SIGNED, "0" * 64).digests.checksum == "AAAAAA=="


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (ChecksumAlgorithm.CRC32, base64.b64encode(zlib.crc32(b"123456789").to_bytes(4, "big")).decode()),
        (ChecksumAlgorithm.CRC32C, base64.b64encode((0xE3069283).to_bytes(4, "big")).decode()),
        (ChecksumAlgorithm.CRC64NVME, base64.b64encode((0xAE8B14860A799888).to_bytes(8, "big")).decode()),
        (ChecksumAlgorithm.SHA1, base64.b64encode(hashlib.sha1(b"123456789").digest()).decode()),
        (ChecksumAlgorithm.SHA256, base64.b64encode(hashlib.sha256(b"123456789").digest()).decode()),
    ],
)
def test_a_small_bodys_checksum_is_checked(algorithm: ChecksumAlgorithm, expected: str) -> None:
    """Check values of the CRC catalogue (reveng.sourceforge.io) for `123456789`."""
    assert checksum_of(algorithm, b"123456789") == expected
    digests = plan_body(put({algorithm.header: expected}), PayloadForm.UNSIGNED, None).digests
    check_digests(b"123456789", algorithm, digests)
    with pytest.raises(CallerError, match="BadDigest"):
        check_digests(b"123456780", algorithm, digests)
