"""Spans of requests, as a collector gets them from a server with `observability.otlp_endpoint`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service

from tests.harness.l2_load import clear_l1, until_stored
from tests.harness.rpc_client import HANG_S, PAYLOAD_BYTES, RpcClient, new_prompt

pytestmark = pytest.mark.integration


TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CLIENT}-01"


class Collector(ThreadingHTTPServer):
    """An OTLP collector on loopback, which keeps the spans that it gets."""

    def __init__(self) -> None:
        arrived = self.arrived = queue.Queue[Any]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {one.key: one.value.string_value for one in resource.resource.attributes}
                    assert names["service.name"] == "kvstrata" and names["service.instance.id"]
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            arrived.put(span)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self) -> tuple[Any, dict[str, Any]]:
        """The next span and its attributes."""
        span = self.arrived.get(timeout=HANG_S)
        assert span.trace_id.hex() == TRACE
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        return span, {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_spans_lie_below_the_clients_span(start, collector):
    server = start(l2="fs", l1_mb=64, flags=("--otlp-endpoint", collector.url))
    with RpcClient(server.socket_dir) as client:
        identity, chain = new_prompt(client, 4)
        client.store(identity, chain, traceparent=TRACEPARENT)
        store, told = collector.take()
        assert (store.name, store.parent_span_id.hex()) == ("kvstrata.store", CLIENT)
        assert told["chunks"] == 4 and told["bytes"] >= 4 * PAYLOAD_BYTES
        until_stored(client)
        clear_l1(client)
        for none in (
            "",
            TRACEPARENT[:-1] + "0",
            "1" * 55,
            TRACEPARENT.upper(),
            TRACEPARENT.replace(CLIENT, "0" * 16),
        ):
            client.lookup(identity.identity_id, chain[:32], traceparent=none)
        client.lookup(identity.identity_id, chain, request_id="a request", traceparent=TRACEPARENT)
        spans = {span.name: (span, told) for span, told in (collector.take() for _ in range(3))}
        lookup, told = spans["kvstrata.lookup"]
        assert lookup.parent_span_id.hex() == CLIENT
        assert told["request"] == "a request" and told["bytes"] >= 4 * PAYLOAD_BYTES
        assert (told["chunks"], told["l1_chunks"], told["l2_chunks"], told["reason"]) == (4, 1, 3, "")
        prefetch, told = spans["kvstrata.prefetch"]
        assert (prefetch.parent_span_id, told["chunks"], told["reason"]) == (lookup.span_id, 3, "")
        load, told = spans["kvstrata.load"]
        assert (load.parent_span_id, told["tier"]) == (prefetch.span_id, "fs-0")
        assert (told["records"], told["loaded"]) == (3, 3)
        assert lookup.start_time_unix_nano <= prefetch.start_time_unix_nano <= load.start_time_unix_nano
    assert server.stop() == 0
    assert collector.arrived.empty(), "requests without a sampled trace have no spans"


def test_a_collector_that_is_away_costs_its_spans_and_a_line(start, collector):
    collector.server_close()
    server = start(l1_mb=64, flags=("--otlp-endpoint", collector.url))
    with RpcClient(server.socket_dir) as client:
        identity, chain = new_prompt(client, 1)
        client.store(identity, chain, traceparent=TRACEPARENT)
        line = server.expect("spans_not_sent")
        assert f"endpoint={collector.url}/v1/traces" in line and "refused" in line
        assert client.status()["tracing"]["spans"]["refused"] == 1
    assert server.stop() == 0
