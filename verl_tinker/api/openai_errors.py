"""Refusals in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Owns which type and code a refusal has. Does not decide what is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.responses import Response

from verl_tinker.api.errors import status_of
from verl_tinker.api.openai_wire import Refused
from verl_tinker.core.errors import TinkerError, without_paths

log = logging.getLogger(__name__)

# What the core says of a field begins with its name, in the words of the Tinker API.
_FIELD = re.compile(r"(?:sampling_params\.)?([a-z_]+(?:\.\w+)*)(?:\[|:| is | holds | mixes )")
_NAMES = {"num_samples": "n", "topk_sample_logprobs": "top_logprobs", "topk_prompt_logprobs": "logprobs",
          "base_model": "model", "model_path": "model", "path": "model", "body": None}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}

SHAPE = {"4XX": {"description": "refused, and why", "content": {"application/json": {"schema": {
    "type": "object", "required": ["error"], "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"], "properties": {
            "message": {"type": "string"}, "type": {"type": "string"},
            "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}}}}}}}


class OpenAiRoute(APIRoute):
    """A route whose refusals have OpenAI's shape."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                return refusal(error)

        return answer


def refusal(error: Exception) -> JSONResponse:
    refused = as_refused(error)
    headers = dict(getattr(error, "headers", None) or {})
    if refused.status == 429:
        headers.setdefault("Retry-After", "1")
    return JSONResponse(body_of(refused), refused.status, headers)


def body_of(refused: Refused) -> dict[str, Any]:
    kind = _TYPES.get(refused.status) or ("server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param,
                      "code": refused.code or _CODES.get(refused.status)}}


def as_refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, TinkerError):
        status, message = status_of(error), error.told.removeprefix("sampling_params.")
    elif isinstance(error, HTTPException):
        # Their word for fields that cannot be read is 400.
        status, message = (400 if error.status_code == 422 else error.status_code), str(error.detail)
    elif isinstance(error, RequestValidationError):
        status, message = 400, "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
    else:
        log.error("an OpenAI request failed", exc_info=error)
        reason = without_paths(f"{type(error).__name__}: {error}")
        return Refused(500, f"the request failed inside the server, whose log has more: {reason}")
    field = _FIELD.match(message) if status == 400 else None
    return Refused(status, message, _NAMES.get(field[1], field[1]) if field else None)
