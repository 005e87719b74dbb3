"""Forms are read as engines read them, or refused: no field may be hidden from us."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from urllib3.filepost import encode_multipart_formdata

from objectcache.orchestrator.rules import forms
from objectcache.orchestrator.rules.forms import FIELDS_MAX, WrongFormError, fields_of, form_steps

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters='"\\'), min_size=1, max_size=20)
FIELD = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
END = b"--x--"


@given(st.lists(st.tuples(NAMES, st.binary(max_size=50)), min_size=1, max_size=8))
def test_the_fields_of_a_form_are_found_as_a_client_has_written_them(fields: list[tuple[str, bytes]]) -> None:
    body, content_type = encode_multipart_formdata(fields)
    assert fields_of(content_type, body) == fields


def test_a_file_with_a_type_is_a_field() -> None:
    body, content_type = encode_multipart_formdata([("file", ("a.wav", b"RIFF", "audio/wav")), ("model", "whisper")])
    assert fields_of(content_type, body) == [("file", b"RIFF"), ("model", b"whisper")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"preamble\r\n" + FIELD + END,
        FIELD,
        FIELD + END + b"epilogue",
        FIELD * (FIELDS_MAX + 1) + END,
        FIELD.replace(b'name="a"', b"name=a") + END,
        FIELD.replace(b'name="a"', b'name="a"; name="b"') + END,
        FIELD.replace(b'name="a"', b'name="\\a"') + END,
        FIELD.replace(b'name="a"', b"name*=utf-8''a") + END,
        FIELD.replace(b"\r\n", b"\n") + END,
        FIELD.replace(b"Content-Disposition", b"X-Other: 1\r\nContent-Disposition") + END,
        FIELD.replace(b"\r\n\r\n1", b'\r\nContent-Disposition: form-data; name="b"\r\n\r\n1') + END,
        FIELD.replace(b'"a"', b'"' + b"a" * 2000 + b'"') + END,
        FIELD.replace(b'"a"', b'"\xff"') + END,
    ],
)
def test_what_an_engine_might_read_in_another_way_is_refused(body: bytes) -> None:
    with pytest.raises(WrongFormError):
        fields_of("multipart/form-data; boundary=x", body)


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "multipart/form-data",
        "multipart/form-data; boundary=x; boundary=y",
        "multipart/mixed; boundary=x",
        "multipart/form-data; boundary=x\u00a0",
        'multipart/form-data; boundary="x',
    ],
)
def test_a_form_names_one_boundary(content_type: str) -> None:
    with pytest.raises(WrongFormError):
        fields_of(content_type, FIELD + END)


@pytest.mark.parametrize(("boundary", "mark"), [("\u00e9", b"\xe9"), ("\u20ac", b"?"), ("<x>", b"<x>")])
def test_a_boundary_has_characters_that_all_parsers_read_alike(boundary: str, mark: bytes) -> None:
    """A header's bytes are UTF-8 for one parser and Latin-1 for another, and some take angle brackets away."""
    with pytest.raises(WrongFormError):
        fields_of(f"multipart/form-data; boundary={boundary}", (FIELD + END).replace(b"--x", b"--" + mark))


@given(st.lists(st.tuples(NAMES, st.binary(max_size=50)), min_size=1, max_size=8), st.integers(1, 40))
def test_a_form_is_read_in_steps(fields: list[tuple[str, bytes]], step_bytes: int) -> None:
    """A client chooses the boundary, by which the search may be slow: others get their turn between steps."""
    body, content_type = encode_multipart_formdata(fields)
    with mock.patch.object(forms, "STEP_BYTES", step_bytes):
        assert fields_of(content_type, body) == fields
        taken = sum(1 for _ in form_steps(content_type, body))
    assert taken >= (len(body) - len(fields) * (step_bytes + 200)) // step_bytes
