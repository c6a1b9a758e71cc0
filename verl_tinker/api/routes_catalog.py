"""Routes of listings: training runs and checkpoints, their removal, publication and time to live.

Owns the shapes of listings. Does not read the disk: the core's catalogue does.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request

from verl_tinker.api import wire
from verl_tinker.api.auth import CallerDep
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.routes_training import adapter_fields
from verl_tinker.api.wire_catalog import LOCAL, date
from verl_tinker.core.catalog import RunView
from verl_tinker.core.checkpoints import KINDS, Checkpoint

router = APIRouter(dependencies=[Depends(require_ready)])

Limit = Annotated[int, Query(ge=1, le=10_000)]
Offset = Annotated[int, Query(ge=0)]
Scope = Literal["owned", "accessible"]
CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


async def checkpoint_path(run_id: str, kind: str, name: str) -> str:
    return f"tinker://{run_id}/{kind}/{name}"


PathDep = Annotated[str, Depends(checkpoint_path)]

# SDKs before this one fail on a whole listing that holds a checkpoint of the type "external".
KNOWS_EXTERNAL = (0, 28)


async def known_kinds(request: Request) -> frozenset[str]:
    """The kinds of checkpoint that the caller's SDK can read, by the version that it sends; all for other clients."""
    version = re.match(r"(\d+)\.(\d+)", request.headers.get("x-stainless-package-version", ""))
    old = version is not None and tuple(map(int, version.groups())) < KNOWS_EXTERNAL
    return frozenset(KINDS) - ({"external_weights"} if old else set())


KindsDep = Annotated[frozenset[str], Depends(known_kinds)]


@router.get("/training_runs")
async def list_training_runs(
    service: ServiceDep, caller: CallerDep, limit: Limit = 20, offset: Offset = 0, project_id: str | None = None
) -> dict:
    runs = await service.catalog.runs(caller, project_id)
    page = [_run(view) for view in runs[offset : offset + limit]]
    return {"training_runs": page, "cursor": _cursor(limit, offset, len(runs))}


@router.get("/training_runs/{run_id}")
async def get_training_run(
    run_id: str, service: ServiceDep, caller: CallerDep, access_scope: Scope = "owned"
) -> dict:
    return _run(await service.catalog.run(caller, run_id, with_public=access_scope == "accessible"))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(run_id: str, service: ServiceDep, caller: CallerDep, kinds: KindsDep) -> dict:
    checkpoints = await service.catalog.run_checkpoints(caller, run_id)
    return {"checkpoints": [_checkpoint(c) for c in checkpoints if c.path.kind in kinds]}


@router.get("/checkpoints")
async def list_checkpoints(
    service: ServiceDep, caller: CallerDep, kinds: KindsDep, limit: Limit = 100, offset: Offset = 0
) -> dict:
    checkpoints = [c for c in await service.catalog.checkpoints(caller) if c.path.kind in kinds]
    page = [_checkpoint(c) for c in checkpoints[offset : offset + limit]]
    return {"checkpoints": page, "cursor": _cursor(limit, offset, len(checkpoints))}


@router.delete(CHECKPOINT)
async def delete_checkpoint(path: PathDep, service: ServiceDep, caller: CallerDep) -> dict:
    await service.catalog.delete(caller, path)
    return {}


@router.post(CHECKPOINT + "/publish")
async def publish_checkpoint(path: PathDep, service: ServiceDep, caller: CallerDep) -> dict:
    await service.catalog.set_public(caller, path, True)
    return {}


@router.delete(CHECKPOINT + "/publish")
async def unpublish_checkpoint(path: PathDep, service: ServiceDep, caller: CallerDep) -> dict:
    await service.catalog.set_public(caller, path, False)
    return {}


@router.put(CHECKPOINT + "/ttl")
async def set_ttl(
    path: PathDep, service: ServiceDep, caller: CallerDep, body: wire.Ttl = json_body(wire.Ttl)
) -> dict:
    await service.catalog.set_ttl(caller, path, body.ttl_seconds)
    return {}


@router.post("/weights_info")
async def weights_info(
    service: ServiceDep, caller: CallerDep, body: wire.WeightsInfo = json_body(wire.WeightsInfo)
) -> dict:
    checkpoint = await service.catalog.checkpoint(caller, body.tinker_path)
    return {
        "base_model": checkpoint.spec.base_model,
        "optimizer_config": {"type": "adamw"},
        **adapter_fields(checkpoint.spec),
    }


def _run(view: RunView) -> dict:
    shape = {
        "training_run_id": view.run_id,
        "base_model": view.spec.base_model,
        "model_owner": view.owner or LOCAL,
        "is_lora": view.spec.lora is not None,
        "lora_rank": view.spec.lora.rank if view.spec.lora else None,
        "corrupted": False,
        "last_request_time": date(view.last_request),
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
        "time": date(checkpoint.created),
        "tinker_path": str(checkpoint.path),
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": date(checkpoint.expires_at) if checkpoint.expires_at is not None else None,
    }


def _cursor(limit: int, offset: int, total: int) -> dict:
    return {"limit": limit, "offset": offset, "total_count": total}
