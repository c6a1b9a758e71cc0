"""Routes of training commands: each answers at once with the request id of its future.

Owns no state. Does not refuse content: a refused chunk would deadlock the SDK, so futures report it.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, HTTPException, Request

from verl_tinker.api import proto, wire
from verl_tinker.api.auth import CallerDep, reader_of
from verl_tinker.api.body import json_body, off_loop, read_body, read_json
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.results import PROTOBUF
from verl_tinker.core.access import Caller
from verl_tinker.core.errors import UserError
from verl_tinker.core.futures import Future
from verl_tinker.core.service import Service
from verl_tinker.core.training import step_kind
from verl_tinker.core.types import ModelSpec

router = APIRouter(dependencies=[Depends(require_ready)])


@router.post("/create_model")
async def create_model(service: ServiceDep, caller: CallerDep, body: wire.CreateModel = json_body(wire.CreateModel)) -> dict:
    spec = ModelSpec(body.base_model, body.lora_config.spec() if body.lora_config else None)
    return _accepted(
        service.training.create_model(
            caller, body.session_id, body.model_seq_id, spec, body.optimizer_config.type, body.user_metadata
        )
    )


@router.post("/get_info")
async def get_info(service: ServiceDep, caller: CallerDep, body: wire.ModelBody = json_body(wire.ModelBody)) -> dict:
    run = service.runs.get(body.model_id, caller)
    return {
        "type": "get_info",
        "model_id": run.run_id,
        "model_name": run.spec.base_model,
        "model_data": {"model_name": run.spec.base_model},
        "optimizer_config": {"type": "adamw"},
        "notes": run.notes,
        **adapter_fields(run.spec),
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, service: ServiceDep, caller: CallerDep) -> dict:
    if PROTOBUF not in request.headers.get("content-type", ""):
        body = await read_json(request, wire.JsonForwardBackward)
        return await _submit_json(service, caller, body, body.forward_backward_input, backward=True)
    raw = await read_body(request)
    try:
        message = await off_loop(len(raw), proto.parse_forward_backward, raw)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    # Protobuf cannot tell an absent seq from 0, and clients count from 1.
    seq, backward = message.seq_id or None, not message.forward_only
    if message.seq_id < 0:
        raise HTTPException(400, f"seq_id is {message.seq_id}; it counts up from 1")
    try:
        data, settings = await off_loop(len(raw), proto.decode_batch, message)
    except UserError as error:
        return _accepted(service.training.reject(caller, message.model_id, seq, step_kind(backward), error))
    return _accepted(
        service.training.forward_backward(caller, message.model_id, seq, data, message.loss_fn, settings, backward)
    )


@router.post("/forward")
async def forward(service: ServiceDep, caller: CallerDep, body: wire.JsonForward = json_body(wire.JsonForward)) -> dict:
    return await _submit_json(service, caller, body, body.forward_input, backward=False)


@router.post("/optim_step")
async def optim_step(service: ServiceDep, caller: CallerDep, body: wire.OptimStep = json_body(wire.OptimStep)) -> dict:
    try:
        adam = body.adam()
    except UserError as error:
        return _accepted(service.training.reject(caller, body.model_id, body.seq_id, "optim_step", error))
    return _accepted(service.training.optim_step(caller, body.model_id, body.seq_id, adam))


@router.post("/load_weights")
async def load_weights(
    request: Request, service: ServiceDep, caller: CallerDep, body: wire.LoadWeights = json_body(wire.LoadWeights)
) -> dict:
    if body.model_id is None and (body.session_id is None or body.model_seq_id is None):
        raise HTTPException(422, "give model_id, or session_id and model_seq_id to create a model from the path")
    try:
        reader = reader_of(request, caller, body.weights_access_token)
    except UserError as error:
        model_id = body.model_id or f"{body.session_id}:train:{body.model_seq_id}"
        return _accepted(service.training.refused("load_weights", model_id, error, caller))
    if body.model_id is not None:
        return _accepted(
            service.training.load_weights(caller, body.model_id, body.seq_id, body.path, body.optimizer, reader)
        )
    return _accepted(
        service.training.create_from_state(
            caller,
            body.session_id,
            body.model_seq_id,
            body.path,
            body.optimizer,
            body.base_model,
            body.optimizer_config.type,
            body.user_metadata,
            reader,
        )
    )


@router.post("/save_weights")
async def save_weights(service: ServiceDep, caller: CallerDep, body: wire.SaveWeights = json_body(wire.SaveWeights)) -> dict:
    return _accepted(
        service.saving.save_weights(
            caller, body.model_id, body.seq_id, body.path, body.overwrite, body.ttl_seconds, body.user_metadata
        )
    )


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    service: ServiceDep, caller: CallerDep, body: wire.SaveWeightsForSampler = json_body(wire.SaveWeightsForSampler)
) -> dict:
    if body.path is not None:
        future = service.saving.save_named_sampler(
            caller, body.model_id, body.seq_id, body.path, body.ttl_seconds, body.user_metadata
        )
    elif body.sampling_session_seq_id is not None:
        future = service.saving.save_snapshot(
            caller, body.model_id, body.seq_id, body.sampling_session_seq_id, body.kind == "inflight"
        )
    else:
        raise HTTPException(422, "give path for named weights, or sampling_session_seq_id for a snapshot")
    return _accepted(future)


def adapter_fields(spec: ModelSpec) -> dict:
    """The settings in force, as get_info and weights_info report them."""
    if spec.lora is None:
        return {"is_lora": False}
    return {
        "is_lora": True,
        "lora_rank": spec.lora.rank,
        "train_unembed": spec.lora.train_unembed,
        "train_mlp": spec.lora.train_mlp,
        "train_attn": spec.lora.train_attn,
    }


async def _submit_json(
    service: Service, caller: Caller, command: wire.Command, content: wire.ForwardBackwardInput, backward: bool
) -> dict:
    try:
        data = await asyncio.to_thread(content.batch)
    except UserError as error:
        return _accepted(service.training.reject(caller, command.model_id, command.seq_id, step_kind(backward), error))
    return _accepted(
        service.training.forward_backward(
            caller, command.model_id, command.seq_id, data, content.loss_fn, content.loss_fn_config or {}, backward
        )
    )


def _accepted(future: Future) -> dict:
    return {"request_id": future.request_id, "model_id": future.model_id}
