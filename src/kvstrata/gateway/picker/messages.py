"""Envoy's messages (ext_proc v3, access log v3): the subset that the picker sends and reads.

Only this module and the server import the extra `picker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3.http_status_pb2 import HttpStatus

from kvstrata.gateway.envoy.configuration import AUTHZ, ENDPOINT, NUMBER
from kvstrata.gateway.errors import Failure, error_body
from kvstrata.gateway.marks import Marks, marks
from kvstrata.gateway.request import Chosen

SUBSET = "x-gateway-destination-endpoint-subset"
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
MAX_PART_BYTES = 62_000
"""Maximum bytes of a body in one message; some proxies accept at most 64 KiB."""

Message = Any
"""A ProcessingRequest; the package has no types."""
Reply = Any
"""A ProcessingResponse."""

FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
parse_log = StreamAccessLogsMessage.FromString
_FLAGS = {
    "DC": "downstream_connection_termination",
    "UF": "upstream_connection_failure",
    "URX": "upstream_retry_limit_exceeded",
    "UH": "no_healthy_upstream",
    "UC": "upstream_connection_termination",
    "UT": "upstream_request_timeout",
    "UPE": "upstream_protocol_error",
    "UR": "upstream_remote_reset",
    "LR": "local_reset",
    "SI": "stream_idle_timeout",
}
parse = pb.ProcessingRequest.FromString
encode = pb.ProcessingResponse.SerializeToString


def headers_of(message: Any) -> dict[bytes, bytes]:
    """The headers of a message, by lower-case name; of several with the same name, the last."""
    return {one.key.lower().encode(): one.raw_value or one.value.encode() for one in message.headers.headers}


def metadata(message: Message, namespace: str, key: str) -> list[str] | None:
    """The strings in a metadata entry, which is a list or a string with commas. None: there is no such entry."""
    fields = message.metadata_context.filter_metadata
    if namespace not in fields or key not in fields[namespace].fields:
        return None
    value = fields[namespace].fields[key]
    texts = [value.string_value, *(one.string_value for one in value.list_value.values)]
    return [each.strip() for text in texts for each in text.split(",") if each.strip()]


def chosen(found: Chosen) -> Reply:
    """The reply to a request's headers: its endpoint, the endpoints for retries, and the changes of its headers."""
    endpoint = ",".join(found.endpoints)
    more = {ENDPOINT: endpoint, **found.headers}
    mutation = pb.HeaderMutation(
        set_headers=[_header(*one) for one in more.items()], remove_headers=found.removed
    )
    common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    reply = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
    reply.dynamic_metadata.get_or_create_struct(NAMESPACE)[ENDPOINT] = endpoint
    reply.dynamic_metadata.get_or_create_struct(AUTHZ)[NUMBER] = str(found.number)  # for the access log
    return reply


def parts(body: bytes, *, ends: bool) -> list[Reply]:
    """A request's body, split into messages of at most MAX_PART_BYTES. `ends`: no trailers follow it."""
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
    """The reply that forwards the request's trailers unchanged."""
    return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())


def answer_passes(message: Message) -> Reply:
    """The reply that forwards a part of the response unchanged. Envoys set up as documented send no such parts."""
    kind = message.WhichOneof("request")
    if kind == "response_headers":
        return pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    if kind == "response_trailers":
        return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())
    part = message.response_body
    return pb.ProcessingResponse(response_body=_streamed(part.body, ends=part.end_of_stream))


def marks_in(message: Any) -> Iterator[Marks]:
    """The marks of all requests in a message of the access log."""
    for entry in message.http_logs.log_entry:
        common, fields = entry.common_properties, entry.common_properties.metadata.filter_metadata
        number = fields[AUTHZ].fields[NUMBER].string_value if AUTHZ in fields else ""
        served = common.upstream_remote_address.socket_address
        host = f"[{served.address}]" if ":" in served.address else served.address
        yield marks(
            number,
            entry.request.request_id,
            common.access_log_type in (AccessLogType.NotSet, AccessLogType.DownstreamEnd),
            entry.response.response_code.value,
            f"{host}:{served.port_value}" if host else "",
            frozenset(flag for flag, name in _FLAGS.items() if getattr(common.response_flags, name)),
            common.upstream_request_attempt_count,
            fields["kv"].fields["marks"].string_value if "kv" in fields else "",
        )


def refused(failure: Failure, path: str, word: str) -> Reply:
    """The reply that makes Envoy answer the client with this failure. `word`: id of the request."""
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
