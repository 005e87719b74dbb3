"""The header of tags."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode
from gateway.s3.tags import checked_tags, parse_tagging_header


@given(st.text(max_size=400))
def test_any_tagging_header_is_tags_or_a_named_error(header: str) -> None:
    try:
        tags = parse_tagging_header(header)
    except CallerError as error:
        assert error.code in (ErrorCode.INVALID_TAG, ErrorCode.INVALID_ARGUMENT)  # noqa: PT017 - both may be
    else:
        assert checked_tags(tags.items()) == tags
