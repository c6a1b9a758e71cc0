"""Routes about sessions and samplers: create, heartbeat, finish, sampling sessions.

Owns no state. Does not submit work: the training and sampling routes do.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, HTTPException, Request

from verl_tinker.api import wire
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.core.errors import NotFound

router = APIRouter(dependencies=[Depends(require_ready)])


@router.post("/create_session")
async def create_session(
    request: Request, service: ServiceDep, body: wire.Nothing = json_body(wire.Nothing)
) -> dict:
    session = service.sessions.create(request.headers.get("x-idempotency-key"))
    answer = {"session_id": session.session_id, "type": "create_session"}
    warning = service.warning()
    return {**answer, "warning_message": warning} if warning else answer


@router.post("/session_heartbeat")
async def session_heartbeat(service: ServiceDep, body: wire.SessionBody = json_body(wire.SessionBody)) -> dict:
    try:
        session = service.sessions.get(body.session_id)
    except NotFound as error:
        raise HTTPException(410, str(error)) from None
    if session.finished:
        raise HTTPException(410, f"session {body.session_id} is finished")
    session.touch()
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(
    session_id: str, service: ServiceDep, body: wire.FinishSession = json_body(wire.FinishSession)
) -> dict:
    session = service.sessions.get(session_id)
    session.finished = session.finished or body.reason.type
    return {}


@router.post("/create_sampling_session")
async def create_sampling_session(
    service: ServiceDep, body: wire.CreateSamplingSession = json_body(wire.CreateSamplingSession)
) -> dict:
    sampler = service.sampling.create_session(
        body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
    )
    return {"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"}


@router.post("/join_sampling_session")
async def join_sampling_session(
    service: ServiceDep, body: wire.SamplingSessionBody = json_body(wire.SamplingSessionBody)
) -> dict:
    return {"client_counter": service.samplers.get(body.sampling_session_id).join()}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, service: ServiceDep) -> dict:
    sampler = service.samplers.get(sampler_id)
    answer = {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model}
    return {**answer, "model_path": str(sampler.path)} if sampler.path else answer
