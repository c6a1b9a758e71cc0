"""What people look at: one view of the server as JSON, as a stream of events, and the page that shows it.

Owns the routes and how often events come. Does not decide what a caller sees: the core's overview does.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import FileResponse, StreamingResponse

from verl_tinker import __version__
from verl_tinker.api.auth import CallerDep
from verl_tinker.api.context import ServiceDep
from verl_tinker.core.access import Caller
from verl_tinker.core.service import Service

EVENT_SECONDS = 1.0
_FOLDER = Path(__file__).parent / "page"
_PARTS = frozenset(file.name for file in _FOLDER.iterdir())
# Nothing comes from elsewhere, and nobody shows the page inside another.
_HEADERS = {"Cache-Control": "no-cache", "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
            "style-src 'self'; script-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}

router = APIRouter()
page_router = APIRouter()


@router.get("/overview")
async def overview(request: Request, service: ServiceDep, caller: CallerDep) -> dict:
    """The state of the server and of what is the caller's; works while the server starts, and after it has failed."""
    return _plain(await _view(request, service, caller))


@router.get("/overview/points")
async def points(service: ServiceDep, caller: CallerDep, run_id: str, after: Annotated[int, Query(ge=0)] = 0) -> dict:
    """The steps of a live run from the one after `after` on: loss, grad_norm and what else there is of each."""
    service.runs.get(run_id, caller)
    return _plain({"points": [asdict(point) for point in service.history.points(run_id, after)]})


@router.get("/overview/events", include_in_schema=False)
async def events(request: Request, service: ServiceDep, caller: CallerDep) -> StreamingResponse:
    """The overview once a second, with the points that are new since the last event."""

    async def stream() -> AsyncIterator[str]:
        seen: dict[str, int] = {}
        # Until the server stops, which is the last thing that is told.
        while True:
            view = await _view(request, service, caller)
            view["points"] = {}
            for run in view["runs"]:
                new = service.history.points(run["run_id"], seen.get(run["run_id"], 0))
                if new:
                    seen[run["run_id"]] = new[-1].step
                    view["points"][run["run_id"]] = [asdict(point) for point in new]
            yield f"data: {json.dumps(_plain(view))}\n\n"
            if service.is_closed or await request.is_disconnected():
                return
            await asyncio.sleep(EVENT_SECONDS)

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


@page_router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """The dashboard. It holds nothing: what it shows it asks for, with the key that the visitor gives it."""
    return _file("index.html")


@page_router.get("/{name}.{kind}", include_in_schema=False)
async def part_of_page(name: str, kind: str) -> FileResponse:
    if f"{name}.{kind}" not in _PARTS:
        raise HTTPException(404)
    return _file(f"{name}.{kind}")


def _file(name: str) -> FileResponse:
    return FileResponse(_FOLDER / name, headers=_HEADERS)


async def _view(request: Request, service: Service, caller: Caller) -> dict[str, Any]:
    look, memory = service.overview, await request.app.state.machine.memory()
    return {
        "server": look.server() | {"version": __version__}, "load": look.load(), "runs": look.runs(caller),
        "operations": [asdict(waiting) for waiting in look.operations(caller)], "versions": look.versions(caller),
        "errors": look.errors(caller), "memory": {"server": memory.own} | memory.workers,
        "gpus": [{"gpu": gpu, "used": used, "total": total} for gpu, used, total in memory.gpus]}


def _plain(value: Any) -> Any:
    """Strict JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
