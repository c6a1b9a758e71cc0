"""Routes of listings: training runs and checkpoints, their removal and their time to live.

Owns the shapes of listings. Does not read the disk: the core's catalogue does.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from verl_tinker.api import wire
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.routes_training import adapter_fields
from verl_tinker.core.catalog import RunView
from verl_tinker.core.checkpoints import KINDS, Checkpoint

router = APIRouter(dependencies=[Depends(require_ready)])

Limit = Annotated[int, Query(ge=1, le=10_000)]
Offset = Annotated[int, Query(ge=0)]


@router.get("/training_runs")
async def list_training_runs(service: ServiceDep, limit: Limit = 20, offset: Offset = 0) -> dict:
    runs = await service.catalog.runs()
    page = [_run(view) for view in runs[offset : offset + limit]]
    return {"training_runs": page, "cursor": _cursor(limit, offset, len(runs))}


@router.get("/training_runs/{run_id}")
async def get_training_run(run_id: str, service: ServiceDep) -> dict:
    return _run(await service.catalog.run(run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(run_id: str, service: ServiceDep) -> dict:
    return {"checkpoints": [_checkpoint(c) for c in await service.catalog.checkpoints(run_id)]}


@router.get("/checkpoints")
async def list_checkpoints(service: ServiceDep, limit: Limit = 100, offset: Offset = 0) -> dict:
    checkpoints = await service.catalog.checkpoints()
    page = [_checkpoint(c) for c in checkpoints[offset : offset + limit]]
    return {"checkpoints": page, "cursor": _cursor(limit, offset, len(checkpoints))}


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}")
async def delete_checkpoint(run_id: str, kind: str, name: str, service: ServiceDep) -> dict:
    await service.catalog.delete(f"tinker://{run_id}/{kind}/{name}")
    return {}


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
async def set_ttl(
    run_id: str, kind: str, name: str, service: ServiceDep, body: wire.Ttl = json_body(wire.Ttl)
) -> dict:
    await service.catalog.set_ttl(f"tinker://{run_id}/{kind}/{name}", body.ttl_seconds)
    return {}


@router.post("/weights_info")
async def weights_info(service: ServiceDep, body: wire.WeightsInfo = json_body(wire.WeightsInfo)) -> dict:
    checkpoint = await service.catalog.checkpoint(body.tinker_path)
    return {
        "base_model": checkpoint.spec.base_model,
        "optimizer_config": {"type": "adamw"},
        **adapter_fields(checkpoint.spec),
    }


def _run(view: RunView) -> dict:
    shape = {
        "training_run_id": view.run_id,
        "base_model": view.spec.base_model,
        "model_owner": "local",
        "is_lora": view.spec.lora is not None,
        "lora_rank": view.spec.lora.rank if view.spec.lora else None,
        "corrupted": False,
        "last_request_time": _time(view.last_request),
        "user_metadata": view.user_metadata,
    }
    for key, checkpoint in (
        ("last_checkpoint", view.last_checkpoint),
        ("last_sampler_checkpoint", view.last_sampler_checkpoint),
    ):
        shape[key] = _checkpoint(checkpoint) if checkpoint else None
    return shape


def _checkpoint(checkpoint: Checkpoint) -> dict:
    return {
        "checkpoint_id": checkpoint.path.checkpoint_id,
        "checkpoint_type": KINDS[checkpoint.path.kind],
        "time": _time(checkpoint.created),
        "tinker_path": str(checkpoint.path),
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": _time(checkpoint.expires_at) if checkpoint.expires_at is not None else None,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _cursor(limit: int, offset: int, total: int) -> dict:
    return {"limit": limit, "offset": offset, "total_count": total}
