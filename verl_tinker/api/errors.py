"""Refusals as HTTP answers: always JSON with a `detail`, since the SDK takes an empty 400 for a proxy fault.

Owns the status codes. Does not word refusals: `verl_tinker.core.errors` and its users do.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from verl_tinker.core.errors import CapacityError, Evicted, NotFound, Overloaded, RunLost, StorageError, TinkerError, UserError

log = logging.getLogger(__name__)

# 402, 408, 409, 429 and 5xx make the SDK repeat a call, so a user's mistake has none of these.
_STATUS = ((NotFound, 404), (RunLost, 404), (Overloaded, 429), (Evicted, 410), (CapacityError, 400), (StorageError, 400), (UserError, 400), (TinkerError, 500))


def install(app: FastAPI) -> None:
    app.add_exception_handler(TinkerError, _refuse)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(404, _not_offered)
    app.add_exception_handler(Exception, _crash)


async def _not_offered(request: Request, error: HTTPException) -> JSONResponse:
    # What a route itself says of a thing that it does not find is better than this.
    nothing = error.detail == "Not Found"
    detail = f"{request.method} {request.url.path} is not offered by this server" if nothing else error.detail
    return JSONResponse({"detail": detail}, 404, error.headers)


async def _bad_parameter(request: Request, error: RequestValidationError) -> JSONResponse:
    problems = [f"{'.'.join(str(part) for part in p['loc'])}: {p['msg']}" for p in error.errors()]
    return JSONResponse({"detail": "; ".join(problems)}, 422)


async def _refuse(request: Request, error: TinkerError) -> JSONResponse:
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"detail": str(error), "category": error.category}, status, headers)


async def _crash(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"detail": f"{type(error).__name__}: {error}", "category": "server"}, 500)
