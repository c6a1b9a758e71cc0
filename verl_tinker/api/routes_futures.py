"""Routes of sampling and of results: submit a sample, hold a poll open until a future is settled.

Owns the length of a long poll. Does not keep results: the core's store does.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from verl_tinker.api import wire
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.results import answer, not_yet
from verl_tinker.core.errors import NotFound, UserError

# Below the SDK's 45 s deadline with room for the way; shorter polls would only cost requests.
POLL_SECONDS = 25.0

open_router = APIRouter()
router = APIRouter(dependencies=[Depends(require_ready)])


@router.post("/asample")
async def asample(service: ServiceDep, body: wire.Sample = json_body(wire.Sample)) -> dict:
    try:
        request = body.request()
    except UserError as error:
        request = error
    future = service.sampling.submit(body.sampling_session_id, body.seq_id, body.num_samples, request)
    return {"request_id": future.request_id, "sample_sequence_ids": future.sequence_ids}


@open_router.post("/retrieve_future")
async def retrieve_future(
    request: Request, service: ServiceDep, body: wire.RetrieveFuture = json_body(wire.RetrieveFuture)
) -> Response:
    # The SDK polls again at once after a 5xx but waits after a 429.
    if service.health.status == "starting":
        raise HTTPException(429, f"the server is starting: {service.health.phase}", {"Retry-After": "2"})
    try:
        future = service.futures.get(body.request_id)
    except NotFound as error:
        raise HTTPException(410, str(error)) from None
    if not await future.wait(request.app.state.poll_seconds):
        return not_yet(future)
    return answer(future, request.headers.get("accept", ""))
