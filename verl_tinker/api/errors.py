"""Refusals as HTTP answers: always JSON with a `detail`, since the SDK takes an empty 400 for a proxy fault.

Owns the status codes. Does not word refusals: `verl_tinker.core.errors` and its users do.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_tinker.core.errors import (
    CapacityError,
    Evicted,
    NotFound,
    Overloaded,
    RunLost,
    StorageError,
    TinkerError,
    UserError,
    without_paths,
)

log = logging.getLogger(__name__)

# 402, 408, 409, 429 and 5xx make the SDK repeat a call, so a user's mistake has none of these.
_STATUS = ((NotFound, 404), (RunLost, 404), (Overloaded, 429), (Evicted, 410), (CapacityError, 400), (StorageError, 400), (UserError, 400), (TinkerError, 500))


def install(app: FastAPI) -> None:
    app.add_exception_handler(TinkerError, _refuse)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(404, _not_offered)
    app.add_middleware(Unbroken)


async def _not_offered(request: Request, error: HTTPException) -> JSONResponse:
    # What a route itself says of a thing that it does not find is better than this.
    nothing = error.detail == "Not Found"
    detail = f"{request.method} {request.url.path} is not offered by this server" if nothing else error.detail
    return JSONResponse({"detail": detail}, 404, error.headers)


async def _bad_parameter(request: Request, error: RequestValidationError) -> JSONResponse:
    problems = [f"{'.'.join(str(part) for part in p['loc'])}: {p['msg']}" for p in error.errors()]
    return JSONResponse({"detail": "; ".join(problems)}, 422)


def status_of(error: TinkerError) -> int:
    return next(status for kind, status in _STATUS if isinstance(error, kind))


async def _refuse(request: Request, error: TinkerError) -> JSONResponse:
    status = status_of(error)
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"detail": error.told, "category": error.category}, status, headers)


class Unbroken:
    """Answers an error that nobody caught and keeps the connection; Starlette would raise it again, and uvicorn hang up."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = whole = False

        async def noted(message: Message) -> None:
            nonlocal begun, whole
            begun, whole = True, message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            # Only the end of the connection tells a client that what it has of a body is not all.
            if scope["type"] != "http" or begun and not whole:
                raise
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            if not begun:
                await _crash(scope, error)(scope, receive, send)


def _crash(scope: Scope, error: Exception) -> JSONResponse:
    reason = without_paths(f"{type(error).__name__}: {error}")
    detail = f"{scope['method']} {scope['path']} failed inside the server, whose log has more: {reason}"
    return JSONResponse({"detail": detail, "category": "server"}, 500)
