"""Envoy's messages to a picker, and a stream of them."""

from __future__ import annotations

from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb


def headers(kind: str = "request_headers", end: bool = False, **values: str) -> Any:
    """A message with headers; `_` stands for `:`."""
    names = {"_method": "POST", "_path": "/v1/chat/completions"} if kind == "request_headers" else {}
    message = pb.ProcessingRequest()
    target = getattr(message, kind)
    target.end_of_stream = end
    for name, value in {**names, **values}.items():
        target.headers.headers.add(key=name.replace("_", ":"), raw_value=value.encode())
    return message


def part(kind: str, body: bytes, end: bool = False) -> Any:
    message = pb.ProcessingRequest()
    getattr(message, kind).body = body
    getattr(message, kind).end_of_stream = end
    return message


def trailers(kind: str) -> Any:
    message = pb.ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message


async def endpoints(port: int, body: bytes, **values: str) -> list[str]:
    """The engines that a picker names for a request, the chosen one first. Ends the stream then."""
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()
        await stream.write(headers(**values))
        await stream.write(part("request_body", body, end=True))
        reply = await stream.read()
        stream.cancel()
    assert reply.WhichOneof("response") == "request_headers", reply
    named: str = reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    return named.split(",")
