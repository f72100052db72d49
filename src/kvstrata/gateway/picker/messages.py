"""Envoy's messages (envoy.service.ext_proc.v3), as far as the picker makes and reads them.

Only this module and the server import the extra `picker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3.http_status_pb2 import HttpStatus

from kvstrata.gateway.errors import Failure, error_body

ENDPOINT = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
FILTER, UPSTREAM = "envoy.filters.http.ext_proc", "upstream.address"
"""Where Envoy tells an attribute, and the attribute that names the engine that has answered."""
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
MAX_PART_BYTES = 62_000
"""Of a body in one message; some proxies take no more than 64 KiB."""

Message = Any
"""A ProcessingRequest; the package has no types."""
Reply = Any
"""A ProcessingResponse."""

FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
NONE = ProcessingMode.NONE
parse = pb.ProcessingRequest.FromString
encode = pb.ProcessingResponse.SerializeToString


def headers_of(message: Any) -> dict[bytes, bytes]:
    """The headers of a message; of several with one name the last. Envoy's names are in lower case."""
    return {one.key.lower().encode(): one.raw_value or one.value.encode() for one in message.headers.headers}


def metadata(message: Message, namespace: str, key: str) -> list[str] | None:
    """The texts of an entry of the metadata: a list of texts, or one with commas. None: it is not there."""
    fields = message.metadata_context.filter_metadata
    if namespace not in fields or key not in fields[namespace].fields:
        return None
    value = fields[namespace].fields[key]
    texts = [value.string_value, *(one.string_value for one in value.list_value.values)]
    return [each.strip() for text in texts for each in text.split(",") if each.strip()]


def served(message: Message) -> str:
    """The endpoint whose answer this is, as Envoy tells it; empty: it does not."""
    told = metadata(message, NAMESPACE, SERVED)
    if told:
        return told[0]
    fields = message.attributes[FILTER].fields if FILTER in message.attributes else {}
    return fields[UPSTREAM].string_value if UPSTREAM in fields else ""


def chosen(endpoints: Sequence[str], headers: Mapping[str, str], removed: Iterable[str]) -> Reply:
    """The answer to a request's headers: where it goes, where if that fails, and what changes of its headers."""
    endpoint = ",".join(endpoints)
    more = {ENDPOINT: endpoint, **headers}
    mutation = pb.HeaderMutation(set_headers=[_header(*one) for one in more.items()], remove_headers=removed)
    common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    reply = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
    reply.dynamic_metadata.get_or_create_struct(NAMESPACE)[ENDPOINT] = endpoint
    return reply


def parts(body: bytes, *, ends: bool) -> list[Reply]:
    """A request's body in messages of at most MAX_PART_BYTES. `ends`: no trailers follow."""
    starts = range(0, max(1, len(body)), MAX_PART_BYTES)
    return [
        pb.ProcessingResponse(
            request_body=_streamed(
                body[at : at + MAX_PART_BYTES], ends=ends and at + MAX_PART_BYTES >= len(body)
            )
        )
        for at in starts
    ]


def request_trailers() -> Reply:
    """The request's trailers go on as they are."""
    return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())


def response_headers() -> Reply:
    """The answer's headers go on as they are."""
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse())


def response_body(body: bytes, *, ends: bool, duplex: bool) -> Reply:
    """A part of the answer goes on as it is. `duplex`: Envoy waits for the bytes, else only for a word."""
    response = _streamed(body, ends=ends) if duplex else pb.BodyResponse()
    return pb.ProcessingResponse(response_body=response)


def response_trailers() -> Reply:
    """The answer's trailers go on as they are."""
    return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


def refused(failure: Failure, path: str, word: str) -> Reply:
    """Envoy answers the client with this failure. `word`: id of the request."""
    headers = {"content-type": "application/json", "x-request-id": word}
    if failure.retry_after_s:
        headers["retry-after"] = str(failure.retry_after_s)
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=HttpStatus(code=failure.status),
            headers=pb.HeaderMutation(set_headers=[_header(*one) for one in headers.items()]),
            body=error_body(failure, path),
            details=failure.code,
        )
    )


def _streamed(body: bytes, *, ends: bool) -> Any:
    streamed = pb.StreamedBodyResponse(body=body, end_of_stream=ends)
    return pb.BodyResponse(
        response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
    )


def _header(name: str, value: str) -> Any:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode("latin-1")),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
