"""Turns datums into the jagged TensorDict that verl's workers take, and their output back.

Owns the field names of a training batch. Does not know which loss reads which field: `losses` does.

A datum's targets, weights and so on may be [N] or [N, K]; in the batch they are flat rows of N * K values,
row-major, and `target_width` holds K.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_tinker.core.types import Datum
from verl_tinker.engine import preset_loss
from verl_tinker.engine.losses import FIELDS, LOSSES

_PADDING = Datum(tokens=np.zeros(1, np.int32), inputs={"target_tokens": np.zeros(1, np.int64)})


def make_batch(run_id: str, data: list[Datum], loss_fn: str, config: dict[str, float], dp_size: int) -> TensorDict:
    """The batch of one forward_backward, padded with weightless datums to a multiple of `dp_size`."""
    data = data + [_PADDING] * (-len(data) % dp_size)
    fields = {"input_ids": [torch.from_numpy(np.asarray(d.tokens, np.int64)) for d in data]}
    fields["position_ids"] = [torch.arange(len(d.tokens)) for d in data]
    fields["targets"] = [torch.from_numpy(np.asarray(d.inputs["target_tokens"], np.int64).reshape(-1)) for d in data]
    names = [f for f in FIELDS if any(f in d.inputs for d in data)]
    for name in names:
        # A threshold that one datum brings is the setting's for the others.
        fields[name] = [_flat_float(d, name, config.get(name, 0.0)) for d in data]
    fields["loss_mask"] = [torch.ones(len(d.tokens)) for d in data]
    tensors = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in fields.items()}
    widths = [d.inputs["target_tokens"].size // len(d.tokens) for d in data]
    tensors["target_width"] = torch.tensor(widths)
    settings = {
        "run_id": run_id,
        "loss_fn": loss_fn,
        "loss_config": json.dumps(config),
        "temperature": 1.0,
    }
    if loss_fn == preset_loss.NAME:
        settings["counts"] = json.dumps(preset_loss.call_counts(data))
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def _flat_float(datum: Datum, name: str, default: float = 0.0) -> torch.Tensor:
    values = datum.inputs.get(name)
    if values is None:
        return torch.full((datum.inputs["target_tokens"].size,), default)
    return torch.from_numpy(np.asarray(values, np.float32).reshape(-1).copy())


def read_logprobs(output: TensorDict, data: list[Datum]) -> list[np.ndarray]:
    """float32 arrays shaped like each datum's target_tokens, in the order of `data`."""
    rows = output["log_probs"].unbind()
    return [
        rows[i].float().numpy().reshape(np.shape(d.inputs["target_tokens"])).copy() for i, d in enumerate(data)
    ]


def read_losses(
    logprobs: list[np.ndarray], data: list[Datum], loss_fn: str, config: dict[str, float], actor
) -> np.ndarray:
    """float32[n]: the loss of each datum at the log-probabilities that the workers found, in nats.

    `actor` is verl's ActorConfig, for the loss that the preset names.
    """
    losses = []
    counts = preset_loss.call_counts(data) if loss_fn == preset_loss.NAME else {}
    for lp, datum in zip(logprobs, data, strict=True):
        fields = {name: _flat_float(datum, name) for name in FIELDS if name in datum.inputs}
        flat = torch.from_numpy(lp.reshape(-1))
        if loss_fn == preset_loss.NAME:
            losses.append(float(preset_loss.preset_loss(flat, fields, torch.tensor([len(flat)]), actor, counts, 1)))
            continue
        fields["rows"] = torch.zeros(len(flat), dtype=torch.int64)
        losses.append(float(LOSSES[loss_fn](flat, fields, config).sum()))
    return np.array(losses, np.float32)
