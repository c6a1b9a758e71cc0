"""What a training command may contain: every check names the field, the datum and the remedy.

Owns the refusals for bad content and the table of losses. Does not decode bytes: `verl_tinker.api` does.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import AdamParams, BaseModelInfo, Datum, LoraSpec, ModelSpec


@dataclass(frozen=True)
class Loss:
    """The inputs a loss reads beside `target_tokens`, and its settings with their defaults."""

    inputs: tuple[str, ...]
    config: dict[str, float] = field(default_factory=dict)


_RL_INPUTS = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(("weights",)),
    "importance_sampling": Loss(_RL_INPUTS),
    "ppo": Loss(_RL_INPUTS, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(_RL_INPUTS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(_RL_INPUTS, {"beta": 0.05}),
    "gspo": Loss((*_RL_INPUTS, "sequence_ratio_mask"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "stable_reinforce": Loss(_RL_INPUTS, {"kl_coeff": 0.0}),
    # What it computes, and with which settings, the preset says.
    "custom_from_config": Loss(_RL_INPUTS),
}
_PER_TOKEN_SETTINGS = ("clip_low_threshold", "clip_high_threshold")


def find_model(models: Iterable[BaseModelInfo], name: str) -> BaseModelInfo:
    known = {model.name: model for model in models}
    if name not in known:
        raise UserError(f"base_model {name!r} is not served here{_hint(name, known)}; served: {_words(known)}")
    return known[name]


def check_spec(spec: ModelSpec, model: BaseModelInfo, optimizer: str) -> ModelSpec:
    """The spec of a new run. Rank 0 is this server's word for full fine-tuning."""
    if not model.trainable:
        raise UserError(f"base_model {model.name!r} is served for sampling only, by this server's preset")
    if optimizer != "adamw":
        raise UserError(f"optimizer_config.type {optimizer!r} is not supported; use 'adamw'")
    lora = spec.lora
    if lora is None or lora.rank == 0:
        return ModelSpec(spec.base_model, None)
    if lora.rank < 0:
        raise UserError(f"lora_config.rank is {lora.rank}; give a positive rank, or 0 for full fine-tuning")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise UserError("lora_config: at least one of train_attn, train_mlp and train_unembed must be true")
    if lora.seed is not None and not -(2**63) <= lora.seed < 2**63:
        raise UserError(f"lora_config.seed is {lora.seed}; give a number of 64 bits")
    return spec


def check_same_shape(wanted: ModelSpec, saved: ModelSpec, path: str) -> None:
    """Refuse to load a checkpoint into a run of another base model or another adapter."""
    if wanted.base_model != saved.base_model or _shape(wanted.lora) != _shape(saved.lora):
        raise UserError(
            f"path: {path} holds {_describe(saved)} but the run is {_describe(wanted)}; "
            "create a training client from this state instead"
        )


def check_batch(
    data: list[Datum], loss_fn: str, config: dict[str, float | str], model: BaseModelInfo
) -> tuple[list[Datum], dict[str, float]]:
    """The batch with exactly the inputs its loss reads, and the full settings of the loss."""
    loss = LOSSES.get(loss_fn)
    if loss is None:
        raise UserError(f"loss_fn {loss_fn!r} is unknown{_hint(loss_fn, LOSSES)}; valid: {_words(LOSSES)}")
    settings = _check_config(loss_fn, loss, config)
    if not data:
        raise UserError("data is empty; send at least one datum")
    return [_check_datum(i, datum, loss_fn, loss, model) for i, datum in enumerate(data)], settings


# Far above any use, and far enough below float32's ceiling that an update cannot overflow half way through.
_ADAM_LIMIT = 1e6


def check_adam(adam: AdamParams) -> AdamParams:
    for setting in fields(AdamParams):
        value = getattr(adam, setting.name)
        if not math.isfinite(value) or value < 0:
            raise UserError(f"adam_params.{setting.name} is {value}; give a finite number of at least 0")
        if value > _ADAM_LIMIT and setting.name != "grad_clip_norm":
            raise UserError(f"adam_params.{setting.name} is {value}; give a number of at most {_ADAM_LIMIT:g}")
    for name in ("beta1", "beta2"):
        if getattr(adam, name) >= 1:
            raise UserError(f"adam_params.{name} is {getattr(adam, name)}; give a number below 1")
    return adam


def check_tokens(tokens: np.ndarray, model: BaseModelInfo, where: str) -> None:
    if not tokens.size:
        raise UserError(f"{where} is empty; give at least one token")
    bad = (tokens < 0) | (tokens >= model.vocab_size)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        position = at[0] if len(at) == 1 else at
        raise UserError(
            f"{where} holds token id {int(tokens[at])} at position {position}; ids of {model.name} run from 0 to "
            f"{model.vocab_size - 1}"
        )


def _check_config(loss_fn: str, loss: Loss, config: dict[str, float | str]) -> dict[str, float]:
    for key, value in config.items():
        if key not in loss.config:
            valid = f"valid: {_words(loss.config)}" if loss.config else "it has no settings"
            raise UserError(f"loss_fn_config[{key!r}] is unknown to {loss_fn}{_hint(key, loss.config)}; {valid}")
        if isinstance(value, str) or not math.isfinite(value):
            raise UserError(f"loss_fn_config[{key!r}] is {value!r}; give a finite number")
    settings = {**loss.config, **config}
    low, high = (settings.get(name) for name in _PER_TOKEN_SETTINGS)
    if low is not None and low > high:
        raise UserError(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")
    return settings


def _check_datum(index: int, datum: Datum, loss_fn: str, loss: Loss, model: BaseModelInfo) -> Datum:
    where = f"data[{index}]"
    check_tokens(datum.tokens, model, f"{where}.model_input")
    length = len(datum.tokens)
    if length > model.max_context:
        raise UserError(
            f"{where}.model_input has {length} tokens; the context of {model.name} is {model.max_context} here"
        )
    targets = _check_targets(where, datum, loss_fn, length)
    check_tokens(targets, model, f"{where}.loss_fn_inputs['target_tokens']")
    inputs = {"target_tokens": targets}
    for name in loss.inputs:
        value = datum.inputs.get(name)
        if value is None and name == "weights":
            value = np.ones(targets.shape, np.float32)
        inputs[name] = _check_numbers(f"{where}.loss_fn_inputs[{name!r}]", value, targets.shape, datum, loss_fn)
    return Datum(datum.tokens, inputs | _check_thresholds(where, datum, loss_fn, loss, targets.shape))


def _check_targets(where: str, datum: Datum, loss_fn: str, length: int) -> np.ndarray:
    field_name = f"{where}.loss_fn_inputs['target_tokens']"
    targets = datum.inputs.get("target_tokens")
    if targets is None:
        raise UserError(f"{field_name} is missing; {loss_fn} needs it, got {_words(datum.inputs) or 'no inputs'}")
    if not np.issubdtype(targets.dtype, np.integer):
        raise UserError(f"{field_name} is {targets.dtype}; send token ids as int64")
    wide = targets.ndim == 2 and loss_fn == "cross_entropy"
    if not (targets.ndim == 1 or wide) or targets.shape[0] != length or not targets.size:
        shapes = f"[{length}] or [{length}, K]" if loss_fn == "cross_entropy" else f"[{length}]"
        raise UserError(
            f"{field_name} has shape {list(targets.shape)} but model_input has {length} tokens; {loss_fn} needs "
            f"{shapes}, one target for each input position (shift by one yourself)"
        )
    return targets.astype(np.int64, copy=False)


def _check_numbers(
    field_name: str, value: np.ndarray | None, shape: tuple[int, ...], datum: Datum, loss_fn: str
) -> np.ndarray:
    if value is None:
        raise UserError(f"{field_name} is missing; {loss_fn} needs it, got {_words(datum.inputs)}")
    if value.shape != shape:
        raise UserError(f"{field_name} has shape {list(value.shape)}; it must match target_tokens, {list(shape)}")
    finite = np.isfinite(value)
    if not finite.all():
        at = [int(i) for i in np.argwhere(~finite)[0]]
        raise UserError(f"{field_name} is not finite at position {at[0] if len(at) == 1 else at}; send finite numbers")
    return value.astype(np.float32, copy=False)


def _check_thresholds(
    where: str, datum: Datum, loss_fn: str, loss: Loss, shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """The thresholds that a datum brings for each position, which count before those of loss_fn_config."""
    brought = {}
    for name in _PER_TOKEN_SETTINGS:
        if name in datum.inputs and loss_fn != "cross_entropy":
            if name not in loss.config:
                raise UserError(f"{where}.loss_fn_inputs[{name!r}]: {loss_fn} does not clip; leave it out")
            field_name = f"{where}.loss_fn_inputs[{name!r}]"
            brought[name] = _check_numbers(field_name, datum.inputs[name], shape, datum, loss_fn)
    if len(brought) == 2 and (brought["clip_low_threshold"] > brought["clip_high_threshold"]).any():
        at = int(np.argmax(brought["clip_low_threshold"] > brought["clip_high_threshold"]))
        raise UserError(f"{where}.loss_fn_inputs: clip_low_threshold is above clip_high_threshold at position {at}")
    return brought


def _shape(lora: LoraSpec | None) -> tuple | None:
    return lora and (lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)


def _describe(spec: ModelSpec) -> str:
    if spec.lora is None:
        return f"{spec.base_model}, full fine-tuning"
    parts = [name for name in ("attn", "mlp", "unembed") if getattr(spec.lora, f"train_{name}")]
    return f"{spec.base_model}, LoRA of rank {spec.lora.rank} on {'+'.join(parts)}"


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _hint(name: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
