"""Routes about sessions and samplers: create, heartbeat, finish, listings, search, sampling sessions.

Owns the shapes of sessions. Does not submit work: the training and sampling routes do.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request

from verl_tinker.api import wire, wire_catalog
from verl_tinker.api.auth import CallerDep
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.wire_catalog import FINISHED, LOCAL, date, date_of_us
from verl_tinker.core.errors import NotFound
from verl_tinker.core.session_catalog import SessionView, created_us

router = APIRouter(dependencies=[Depends(require_ready)])

Limit = Annotated[int, Query(ge=1, le=10_000)]
Offset = Annotated[int, Query(ge=0)]


@router.post("/create_session")
async def create_session(
    request: Request,
    service: ServiceDep,
    caller: CallerDep,
    body: wire_catalog.CreateSession = json_body(wire_catalog.CreateSession),
) -> dict:
    session = service.sessions.create(request.headers.get("x-idempotency-key"), body.facts(), caller or "")
    answer = {"session_id": session.session_id, "type": "create_session"}
    warning = service.warning()
    return {**answer, "warning_message": warning} if warning else answer


@router.post("/session_heartbeat")
async def session_heartbeat(
    service: ServiceDep, caller: CallerDep, body: wire.SessionBody = json_body(wire.SessionBody)
) -> dict:
    try:
        session = service.sessions.get(body.session_id, caller)
    except NotFound as error:
        raise HTTPException(410, str(error)) from None
    if session.finished:
        raise HTTPException(410, f"session {body.session_id} is finished")
    session.touch()
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(
    session_id: str, service: ServiceDep, caller: CallerDep, body: wire.FinishSession = json_body(wire.FinishSession)
) -> dict:
    service.sessions.finish(service.sessions.get(session_id, caller), body.reason.type, body.detail)
    return {}


# The original verl-tinker lists under POST, the SDK under GET.
@router.api_route("/sessions", methods=["GET", "POST"])
async def list_sessions(service: ServiceDep, caller: CallerDep, limit: Limit = 20, offset: Offset = 0) -> dict:
    sessions = service.session_catalog.list(caller)
    return {"sessions": [session.session_id for session in sessions[offset : offset + limit]]}


@router.post("/sessions/search")
async def search_sessions(
    service: ServiceDep,
    caller: CallerDep,
    body: wire_catalog.SearchSessions = json_body(wire_catalog.SearchSessions),
) -> dict:
    after = body.cursor.position() if body.cursor else None
    found = service.session_catalog.search(caller, body.query(), after)
    views = await service.session_catalog.views(found[: body.limit])
    answer = {"sessions": [_summary(view) for view in views]}
    if len(found) <= body.limit:
        return answer
    last = views[-1].session
    cursor = {"last_created_at": date_of_us(created_us(last)), "last_session_id": last.session_id}
    return {**answer, "next_cursor": cursor}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, service: ServiceDep, caller: CallerDep) -> dict:
    view = await service.session_catalog.get(caller, session_id)
    facts = view.session.facts
    return {
        "training_run_ids": view.run_ids,
        "sampler_ids": view.sampler_ids,
        "user_metadata": facts.user_metadata,
        "display_name": facts.display_name,
        "project_id": facts.project_id,
        "tags": facts.tags,
        "created_at": date(view.session.created),
        "status": _status(view),
    }


@router.put("/sessions/{session_id}/project")
async def set_session_project(
    session_id: str,
    service: ServiceDep,
    caller: CallerDep,
    body: wire_catalog.Project = json_body(wire_catalog.Project),
) -> dict:
    session = service.sessions.get(session_id, caller)
    service.sessions.set_project(session, body.project_id)
    await service.catalog.set_project(session_id, body.project_id)
    return {}


@router.post("/create_sampling_session")
async def create_sampling_session(
    service: ServiceDep,
    caller: CallerDep,
    body: wire.CreateSamplingSession = json_body(wire.CreateSamplingSession),
) -> dict:
    sampler = service.sampling.create_session(
        caller, body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
    )
    return {"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"}


@router.post("/join_sampling_session")
async def join_sampling_session(
    service: ServiceDep,
    caller: CallerDep,
    body: wire.SamplingSessionBody = json_body(wire.SamplingSessionBody),
) -> dict:
    return {"client_counter": service.samplers.get(body.sampling_session_id, caller).join()}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, service: ServiceDep, caller: CallerDep) -> dict:
    sampler = service.samplers.get(sampler_id, caller)
    answer = {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model}
    return {**answer, "model_path": str(sampler.path)} if sampler.path else answer


def _summary(view: SessionView) -> dict:
    session, facts = view.session, view.session.facts
    return {
        "session_id": session.session_id,
        "created_at": date_of_us(created_us(session)),
        "owner": session.owner or LOCAL,
        "project_id": facts.project_id or "",
        "status": _status(view),
        "checkpoints_count": len(view.checkpoints),
        "checkpoint_storage_bytes": sum(checkpoint.size_bytes for checkpoint in view.checkpoints),
        "display_name": facts.display_name,
        "user_metadata": facts.user_metadata,
    }


def _status(view: SessionView) -> dict | None:
    """None for a session that ended without a word of its client."""
    if view.is_live:
        return {"type": "active"}
    finished = view.session.finished
    if finished not in FINISHED:
        return None
    return {"type": "client_finished", "reason": {"type": finished}, "detail": view.session.detail}
