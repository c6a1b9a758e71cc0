"""HTTP requests, told to the watchers.

Owns where a request begins and ends. Does not measure: watchers do.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_tinker.core.watch import Watchers


class Watched:
    """Goes around the whole app, so that refusals and crashes are seen as clients see them."""

    def __init__(self, app: ASGIApp, watchers: Watchers):
        self._app, self._watchers = app, watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["answered"] = message["status"]
            await send(message)

        with self._watchers.http_request(scope):
            await self._app(scope, receive, noted)
