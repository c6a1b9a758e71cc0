"""Bounds on what a connection may cost before a request is complete.

Owns the size and the time of a request's head. Does not bound bodies: `verl_tinker.api.body` does.
"""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself takes a head of any size and waits for its end for ever."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._head_bytes = 0
        self._wait_for_head()

    def connection_lost(self, exc) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large",
                             "the head of the request is larger than 64 KiB; send fewer or shorter headers")

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", f"{msg.rstrip('.')}; send HTTP/1.1, and TLS to a proxy that speaks it")

    def _refuse(self, status: bytes, detail: str) -> None:
        body = json.dumps({"detail": detail}).encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._late.cancel()
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._late.cancel()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._late = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._head_bytes:
            self._refuse(b"408 Request Timeout", f"the head of the request did not come within {HEAD_SECONDS:.0f} s; send it again")
        else:
            self.transport.close()
