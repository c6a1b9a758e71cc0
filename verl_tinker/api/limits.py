"""Bounds on what a connection may cost before a request is complete.

Owns the size and the time of a request's head. Does not bound bodies: `verl_tinker.api.body` does.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0

_TOO_LARGE = b'{"detail": "the head of the request is larger than 64 KiB; send fewer or shorter headers"}'


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
                head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_TOO_LARGE)
                self.transport.write(head + length + _TOO_LARGE)
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
        if not self.transport.is_closing():
            self.transport.close()
