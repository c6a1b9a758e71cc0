"""Refusals as HTTP answers: always JSON with a `detail`, since the SDK takes an empty 400 for a proxy fault.

Owns the status codes. Does not word refusals: `verl_tinker.core.errors` and its users do.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from verl_tinker.core.errors import CapacityError, Evicted, NotFound, TinkerError, UserError

log = logging.getLogger(__name__)

# 402, 408, 409, 429 and 5xx make the SDK repeat a call, so a user's mistake has none of these.
_STATUS = ((NotFound, 404), (Evicted, 410), (CapacityError, 400), (UserError, 400), (TinkerError, 500))


def install(app: FastAPI) -> None:
    app.add_exception_handler(TinkerError, _refuse)
    app.add_exception_handler(Exception, _crash)


async def _refuse(request: Request, error: TinkerError) -> JSONResponse:
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    return JSONResponse({"detail": str(error), "category": error.category}, status)


async def _crash(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"detail": f"{type(error).__name__}: {error}", "category": "server"}, 500)
