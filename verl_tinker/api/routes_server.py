"""Routes about the server itself: health, shutdown, flags, capabilities, telemetry.

Owns no state. Does not touch models.
"""

from __future__ import annotations

import inspect

from fastapi import APIRouter, BackgroundTasks, Depends, HTTPException, Request
from fastapi.responses import JSONResponse

from verl_tinker.api.body import read_body
from verl_tinker.api.context import ServiceDep, require_ready

open_router = APIRouter()
router = APIRouter(dependencies=[Depends(require_ready)])


@open_router.get("/healthz")
async def healthz(service: ServiceDep) -> JSONResponse:
    health = service.health
    if health.status == "ok":
        mismatches = service.sampling.mismatches
        return JSONResponse({"status": "ok", "phase": "ready"} | ({"weight_mismatches": mismatches} if mismatches else {}))
    if health.status == "starting":
        return JSONResponse({"status": "starting", "phase": health.phase}, 503)
    return JSONResponse({"status": "failed", "reason": health.reason}, 503)


@open_router.post("/shutdown")
async def shutdown(request: Request, tasks: BackgroundTasks) -> dict:
    if not request.app.state.allow_shutdown:
        raise HTTPException(403, "shutdown over HTTP is off on this server; stop its process instead")
    # After the answer is out, so that the caller gets one.
    tasks.add_task(_call, request.app.state.on_shutdown)
    return {"status": "stopping"}


@router.post("/client/config")
async def client_config(request: Request) -> dict:
    return request.app.state.client_config


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request) -> dict:
    return request.app.state.dynamic_config


@router.post("/telemetry")
async def telemetry(request: Request) -> dict:
    # Events can hold request headers with keys, so they are neither kept nor logged.
    await read_body(request)
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(service: ServiceDep) -> dict:
    models = [
        {
            "model_name": model.name,
            "max_context_length": model.max_context,
            "trainable": model.trainable,
            "sampleable": model.sampleable,
        }
        for model in service.base_models()
    ]
    return {"supported_models": models}


async def _call(callback) -> None:
    outcome = callback()
    if inspect.isawaitable(outcome):
        await outcome
