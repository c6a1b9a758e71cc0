"""An HTTP proxy that loses calls on purpose: before they are delivered, or after, with their answers.

Owns the connections and what was lost. Does not know what a call means.
"""

from __future__ import annotations

import socket
import threading
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SECONDS = 300
# How often it is looked whether the proxy is to end; there is one for nearly every test.
_LOOK_SECONDS = 0.02
_OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}


class DroppingProxy:
    """`url` stands for the server at `target`. `lose` names calls by the end of their path."""

    def __init__(self, target: str):
        self._target = urlsplit(target)
        self._lock = threading.Lock()
        self._planned: dict[str, bool] = {}
        self.lost: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(_LOOK_SECONDS,), daemon=True).start()

    def lose(self, *endpoints: str, delivered: bool) -> None:
        """Lose the next call of each endpoint once; `delivered` says whether the server sees it."""
        with self._lock:
            self._planned |= {endpoint: delivered for endpoint in endpoints}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, path: str) -> bool | None:
        """Whether a lost call is delivered all the same; None for a call that is not to be lost."""
        endpoint = path.partition("?")[0].rpartition("/")[2]
        with self._lock:
            delivered = self._planned.pop(endpoint, None)
            if delivered is not None:
                self.lost.append(endpoint)
            return delivered

    def _forward(self, method: str, path: str, headers: dict[str, str], body: bytes):
        kind = HTTPSConnection if self._target.scheme == "https" else HTTPConnection
        connection = kind(self._target.netloc, timeout=SECONDS)
        try:
            connection.request(method, self._target.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_call(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                delivered = proxy._take(self.path)
                if delivered is False:
                    return self.hang_up()
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _OF_ONE_CONNECTION}
                status, answered, content = proxy._forward(self.command, self.path, headers, body)
                if delivered:
                    return self.hang_up()
                self.send_response_only(status)
                for name, value in answered:
                    if name.lower() not in _OF_ONE_CONNECTION:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = handle_call  # noqa: N815

            def hang_up(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def log_message(self, *args) -> None:
                """Requests hold keys."""

        return Handler
