"""Routes of sampling and of results: submit a sample, hold a poll open until a future is settled.

Owns the length of a long poll. Does not keep results: the core's store does.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from verl_tinker.api import wire
from verl_tinker.api.auth import CallerDep
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.results import answer, not_yet
from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.errors import UserError
from verl_tinker.core.futures import Future
from verl_tinker.core.service import Service

# Below the SDK's 45 s deadline with room for the way; shorter polls would only cost requests.
POLL_SECONDS = 25.0
_LONGEST_BATCH_POLL = 30.0

open_router = APIRouter()
router = APIRouter(dependencies=[Depends(require_ready)])


@router.post("/asample")
async def asample(service: ServiceDep, caller: CallerDep, body: wire.Sample = json_body(wire.Sample)) -> dict:
    try:
        request = body.request()
    except UserError as error:
        request = error
    future = service.sampling.submit(caller, body.sampling_session_id, body.seq_id, body.num_samples, request)
    return {"request_id": future.request_id, "sample_sequence_ids": future.sequence_ids}


@open_router.post("/retrieve_future")
async def retrieve_future(
    request: Request,
    service: ServiceDep,
    caller: CallerDep,
    body: wire.RetrieveFuture = json_body(wire.RetrieveFuture),
) -> Response:
    future = _find(service, body.request_id, caller)
    if future is None:
        return _unknown(service, body.request_id)
    if not await future.wait(request.app.state.poll_seconds):
        return not_yet(future)
    try:
        settled = await asyncio.to_thread(answer, future, _accept(request)) if future.is_on_disk else answer(
            future, _accept(request))
    except FileNotFoundError:
        return _unknown(service, body.request_id)
    service.futures.was_read(future)
    return settled


@router.post("/retrieve_futures")
async def retrieve_futures(
    request: Request,
    service: ServiceDep,
    caller: CallerDep,
    body: wire.RetrieveFutures = json_body(wire.RetrieveFutures),
) -> dict:
    """Which samples of one client have ended since its cursor; waits for the first of them."""
    target = body.target
    service.samplers.get(target.sampling_session_id, caller)
    for request_id in body.retrieved_request_ids:
        if _find(service, request_id, caller):
            service.futures.drop(request_id)
    seconds = min(_LONGEST_BATCH_POLL, request.app.state.poll_seconds, _LONGEST_BATCH_POLL if body.timeout is None else body.timeout)
    ended, cursor = await service.sampling.completions.after(
        target.sampling_session_id, target.cloned_sampler_id, body.prev_cursor, seconds
    )
    return {"completions": [_completion(future) for future in ended], "cursor": cursor}


@router.post("/cancel_future")
async def cancel_future(
    service: ServiceDep, caller: CallerDep, body: wire.RetrieveFuture = json_body(wire.RetrieveFuture)
) -> dict:
    """End a sample; one that is unknown or has ended already is no error, and training commands go on."""
    future = _find(service, body.request_id, caller)
    if future is not None and future.kind == "sample":
        service.sampling.cancel(future)
    return {}


def _find(service: Service, request_id: str, caller: Caller) -> Future | None:
    future = service.futures.find(request_id) or service.training.recall(request_id, caller)
    return future if future and may_see(caller, future.owner) else None


def _unknown(service: Service, request_id: str) -> Response:
    # The SDK polls again at once after a 5xx but waits after a 429.
    if service.health.status == "starting":
        raise HTTPException(429, f"the server is starting: {service.health.phase}", {"Retry-After": "2"})
    # Samples are submitted again by the SDK when it reads 410; training commands must not be.
    if request_id.startswith("sample-"):
        raise HTTPException(410, f"request_id {request_id!r} is not known here any more; submit the sample again")
    text = (
        f"request_id {request_id!r} is not known here: it is of another server, or its result was read and dropped "
        "since. Look at the run with get_info; create_training_client_from_state_with_optimizer resumes from a saved "
        "checkpoint"
    )
    return JSONResponse({"error": text, "category": "server"})


def _completion(future: Future) -> dict:
    if future.error is not None:
        return {"state": "failed", "request_id": future.request_id}
    return {
        "state": "finished", "request_id": future.request_id, "response_payload_uncompressed_size": future.size,
    }


def _accept(request: Request) -> str:
    return request.headers.get("accept", "")
