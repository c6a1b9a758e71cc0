"""Request bodies: read within bounds, decompressed within bounds, parsed off the event loop.

Owns the size limits. Does not know what a body means: `wire` and `proto` do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import zstandard
from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

MAX_BODY = 64 << 20
# A datum costs memory however short it is. The SDK sends 1,024 at most in one request.
MAX_DATUMS = 16_384
BODY_SECONDS = 120.0
_MAX_WINDOW = 16 << 20
_STEP = 1 << 20
_BIG = 64 << 10

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


async def read_body(request: Request) -> bytes:
    """The body as the client meant it. At most two bodies a process are decompressed at the same time."""
    raw = await _read_raw(request)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding in ("identity", ""):
        return raw
    if encoding != "zstd":
        raise HTTPException(415, f"content-encoding {encoding!r} is not supported; send zstd or none")
    async with request.app.state.decompressing:
        return await off_loop(_claimed_size(raw), decompress, raw)


def json_body(model: type[Model]) -> Any:
    """A route parameter: the JSON body as `model`, unknown fields ignored, 422 with the fields that are wrong."""

    async def parse(request: Request) -> Model:
        return await read_json(request, model)

    parse.body_model = model
    return Depends(parse)


async def read_json(request: Request, model: type[Model]) -> Model:
    raw = await read_body(request)
    try:
        return await off_loop(len(raw), model.model_validate_json, raw)
    except ValidationError as error:
        raise HTTPException(422, _describe(error)) from None


async def off_loop(size: int, work: Callable[..., Result], *args: Any) -> Result:
    """Do work on `size` bytes in a thread when it would hold up the event loop, at once when it is small."""
    if size > _BIG:
        return await asyncio.to_thread(work, *args)
    return work(*args)


def decompress(raw: bytes, limit: int = MAX_BODY) -> bytes:
    """Decompress a zstd frame to at most `limit` bytes; the limit holds whatever the frame claims of itself."""
    try:
        claimed = zstandard.frame_content_size(raw)
        if claimed > limit:
            raise _too_large(limit)
        parts, size = [], 0
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(raw)
        while part := reader.read(_STEP):
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except zstandard.ZstdError as error:
        raise HTTPException(400, f"body is not a valid zstd frame: {error}") from None
    if claimed >= 0 and size != claimed:
        raise HTTPException(400, f"body is a truncated zstd frame: {size} of {claimed} bytes")
    return b"".join(parts)


def _claimed_size(raw: bytes) -> int:
    try:
        claimed = zstandard.frame_content_size(raw)
    except zstandard.ZstdError:
        return 0
    return claimed if claimed >= 0 else MAX_BODY


async def _read_raw(request: Request) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY:
        raise _too_large(MAX_BODY)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY:
                    raise _too_large(MAX_BODY)
                parts.append(part)
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {BODY_SECONDS:.0f} s; send it again") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection ended before the whole body had come; send it again") from None
    return b"".join(parts)


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"body is larger than {limit} bytes; send fewer or shorter datums in one request")


def _describe(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    lines = [f"{'.'.join(str(part) for part in p['loc']) or 'body'}: {p['msg']}" for p in problems[:10]]
    return "; ".join(lines)
