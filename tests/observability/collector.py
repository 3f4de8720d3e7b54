"""A collector of traces: takes OTLP over HTTP on a port of this machine, or refuses it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.paths: set[str] = set()
        self.is_refusing = False
        self.refused = 0
        collector = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(collector._take(self.path, body))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def _take(self, path: str, body: bytes) -> int:
        self.paths.add(path)
        if self.is_refusing:
            self.refused += 1
            return 400
        request = ExportTraceServiceRequest.FromString(body)
        for each in request.resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in each.resource.attributes})
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return 200


def attributes(span: Span) -> dict[str, str | int]:
    return {
        pair.key: pair.value.string_value if pair.value.HasField("string_value") else pair.value.int_value
        for pair in span.attributes
    }
