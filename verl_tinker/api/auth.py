"""Who calls: the API key of a request, checked.

Owns the header and the answers to bad keys. Does not decide what a caller may see: `verl_tinker.core.access` does.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, HTTPException, Request

from verl_tinker.core.access import Caller, Keys
from verl_tinker.core.errors import UserError


async def get_caller(request: Request) -> Caller:
    """The name of the caller's key; None on a server without keys. 401 for a key that nobody has."""
    keys: Keys | None = request.app.state.keys
    if keys is None:
        return None
    name = keys.caller(_key(request))
    if name is None:
        raise HTTPException(
            401, "the API key is missing or not known here; set TINKER_API_KEY to a key that the server's owner made with "
            "python -m verl_tinker.keys add NAME"
        )
    return name


def _key(request: Request) -> str:
    """The Tinker SDK sends X-API-Key, OpenAI's clients Authorization: Bearer."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


def reader_of(request: Request, caller: Caller, token: str | None) -> Caller:
    """Who reads a checkpoint: the caller, or the holder of the key that the client sends for it; UserError for no key."""
    keys: Keys | None = request.app.state.keys
    if keys is None or token is None:
        return caller
    reader = keys.caller(token)
    if reader is None:
        raise UserError("weights_access_token is not a key of this server; leave it out, or ask for one")
    return reader


CallerDep = Annotated[Caller, Depends(get_caller)]
