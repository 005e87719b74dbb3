"""The wire form of StorageApi calls between a gateway and a storage server: POST /v1/{role}.{method}.

Arguments are JSON, base64url, in `x-objectcache-call`. The body carries what may be large: long arguments, the document
of a call (descriptor, lookup, registration), or object bytes, which are followed by the JSON of their `BodyDigests`.
Results are JSON in the body; where the body is object bytes, the JSON is in `x-objectcache-result`.

No call needs code of its own: the form of each call is derived from its signature in `descriptors.storage_api`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any, get_origin, get_type_hints

from pydantic import TypeAdapter

from descriptors.descriptor import Descriptor
from descriptors.descriptor_codec import decode_peer_descriptor, encode_binary
from descriptors.messages import (
    AgentRegistration,
    AgentRenewal,
    LookupAnswer,
    LookupRequest,
    lookup_answer_body,
    lookup_body,
    parse_lookup,
    parse_lookup_answer,
    parse_registration,
    parse_renewal,
    registration_body,
    renewal_body,
)
from descriptors.objects import ListPage, PartPage, ReadHead, UploadPage
from descriptors.storage_api import ROLES, Body, BodySink

RESULT_HEADER = "x-objectcache-result"
CALL_BYTES_MAX = 65_536
ARGUMENT_BYTES_MAX = 16_384
DIGESTS_BYTES_MAX = 4_096
RESULT_BYTES_MAX = 1 << 20
"""The result of a call that is about one thing. The longest is where each of 65,536 chunks lies."""
RESULTS_BYTES_MAX = 32 << 20
"""The result of a call that lists things: the longest is the list of all buckets."""
DOCUMENTS: Mapping[type, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    Descriptor: (encode_binary, decode_peer_descriptor),
    LookupRequest: (lookup_body, parse_lookup),
    LookupAnswer: (lookup_answer_body, parse_lookup_answer),
    AgentRegistration: (registration_body, parse_registration),
    AgentRenewal: (renewal_body, parse_renewal),
}
"""Types whose wire form is a document of its own, bounded and checked: the functions that write and read it."""


class CallForm(Enum):
    """How a call's bytes travel. VALUES: arguments and result are values. BODY: object bytes go with the arguments.
    READ: object bytes come with the result. SINK: a delivery, whose payload may come with the result.
    """

    VALUES = "values"
    BODY = "body"
    READ = "read"
    SINK = "sink"


@dataclass(frozen=True)
class PeerCall:
    """One method of one role. `document` is the argument that travels as the body; None where there is none. `bucket`
    and `key` say where the arguments have what the call is about: (name, attribute, attribute …), empty for nothing.
    """

    role: str
    method: str
    form: CallForm
    names: tuple[str, ...]
    types: Mapping[str, Any]
    result_type: Any
    document: str | None
    bucket: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def operation(self) -> str:
        """The call's name in the path."""
        return f"{self.role}.{self.method}"

    def bound(self, *values: object, **named: object) -> dict[str, Any]:
        """Arguments by name, with defaults. Raises TypeError for arguments that do not fit the signature."""
        bound = self._signature.bind(*values, **named)
        bound.apply_defaults()
        return dict(bound.arguments)

    def about(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """The bucket and the key; the key is empty for a call about a bucket, both for one about all."""
        return _found(self.bucket, arguments), _found(self.key, arguments)

    def encode(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The arguments that are values, for JSON, and the document."""
        fields = {name: codec.dump_python(arguments[name], mode="json") for name, codec in self._codecs.items()}
        if self.document is None:
            return fields, b""
        write, _ = DOCUMENTS[self.types[self.document]]
        return fields, write(arguments[self.document])

    def decode(self, fields: Mapping[str, Any], document: bytes) -> dict[str, Any]:
        """The inverse of `encode`. An argument that has a default and does not come takes the default, since a caller
        of the release before does not know it. Raises KeyError for another that does not come, ValidationError, and
        what the parser of the document raises.
        """
        given = {**self._defaults, **fields}
        arguments = {name: codec.validate_python(given[name]) for name, codec in self._codecs.items()}
        if self.document is not None:
            _, read = DOCUMENTS[self.types[self.document]]
            arguments[self.document] = read(document)
        return arguments

    @property
    def result_bytes_max(self) -> int:
        """How long the result may be: somebody at a member's address may answer many calls at once with anything."""
        is_list = get_origin(self.result_type) is list or self.result_type in (ListPage, PartPage, UploadPage)
        is_text = self.operation == "status.metrics"
        return RESULTS_BYTES_MAX if is_list or is_text else RESULT_BYTES_MAX

    def encode_result(self, result: Any) -> bytes:
        """The result of the call, as JSON."""
        if self.result_type in DOCUMENTS:
            return DOCUMENTS[self.result_type][0](result)
        return self._result_codec.dump_json(result)

    def decode_result(self, data: bytes) -> Any:
        """The inverse of `encode_result`."""
        if self.result_type in DOCUMENTS:
            return DOCUMENTS[self.result_type][1](data)
        return self._result_codec.validate_json(data)

    @cached_property
    def _signature(self) -> inspect.Signature:
        whole = inspect.signature(getattr(ROLES[self.role], self.method))
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        parameters = self._signature.parameters
        return {
            name: codec.dump_python(parameters[name].default, mode="json")
            for name, codec in self._codecs.items()
            if parameters[name].default is not inspect.Parameter.empty
        }

    @cached_property
    def _codecs(self) -> dict[str, TypeAdapter[Any]]:
        apart = (Body, BodySink)
        return {
            name: TypeAdapter(self.types[name])
            for name in self.names
            if name != self.document and self.types[name] not in apart
        }

    @cached_property
    def _result_codec(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.result_type)


def _read_off(role: str, method: str) -> PeerCall:
    function = getattr(ROLES[role], method)
    types = get_type_hints(function)
    result_type = types.pop("return")
    names = tuple(name for name in inspect.signature(function).parameters if name != "self")
    form = CallForm.VALUES
    if Body in types.values():
        form = CallForm.BODY
    elif BodySink in types.values():
        form = CallForm.SINK
    elif not inspect.iscoroutinefunction(function):
        form, result_type = CallForm.READ, ReadHead
    document = next((name for name in names if types[name] in DOCUMENTS), None)
    bucket, key = (_place(named, {name: types[name] for name in names}) for named in ("bucket", "key"))
    return PeerCall(
        role=role,
        method=method,
        form=form,
        names=names,
        types=types,
        result_type=result_type,
        document=document,
        bucket=bucket,
        key=key,
    )


def _place(name: str, types: Mapping[str, Any]) -> tuple[str, ...]:
    """Where values of these types have a text of this name: one of them, or in a field of one, at any depth."""
    if types.get(name) is str:
        return (name,)
    for field, kind in types.items():
        if isinstance(kind, type) and is_dataclass(kind) and (found := _place(name, get_type_hints(kind))):
            return (field, *found)
    return ()


def _found(place: tuple[str, ...], arguments: Mapping[str, Any]) -> str:
    if not place:
        return ""
    value = arguments[place[0]]
    for name in place[1:]:
        value = getattr(value, name)
    return str(value)


CALLS: Mapping[str, PeerCall] = {
    call.operation: call
    for role, protocol in ROLES.items()
    for method, value in vars(protocol).items()
    if inspect.isfunction(value) and not method.startswith("_")
    for call in (_read_off(role, method),)
}
"""Every call of a StorageApi by its operation."""


def role_of(name: str, made: Callable[[PeerCall], Callable[..., Any]]) -> Any:
    """A role of a StorageApi by its name: each of its calls is carried out by what `made` gives for it."""
    methods = {call.method: staticmethod(made(call)) for call in CALLS.values() if call.role == name}
    return type(f"Made{ROLES[name].__name__}", (), methods)()
