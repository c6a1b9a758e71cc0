"""What routes share: the service behind them, and the gate that holds until it is ready.

Owns the answers of a server that is not ready. Does not know how it becomes so.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, HTTPException, Request

from verl_tinker.api.auth import CallerDep
from verl_tinker.core.service import Service


async def get_service(request: Request) -> Service:
    return request.app.state.service


ServiceDep = Annotated[Service, Depends(get_service)]


async def require_ready(service: ServiceDep, caller: CallerDep) -> None:
    health = service.health
    if health.status == "starting":
        raise HTTPException(503, f"the server is starting: {health.phase}", {"Retry-After": "2"})
    if health.status == "failed":
        raise HTTPException(503, health.reason)
