"""A PEFT adapter that was trained elsewhere, read as one of ours, or refused with the reason.

Owns which of PEFT's settings our adapters can express. Does not save checkpoints: `verl_tinker.import_adapter` does.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import LoraSpec
from verl_tinker.engine.adapters import Adapter, linear_names, module_kind

WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
# Settings that make another function of A and B, or that change weights which are not in the folder.
_MUST_BE_OFF = (
    "use_dora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication",
    "target_parameters", "trainable_token_indices", "use_qalora", "use_bdlora", "alora_invocation_tokens",
)
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")


def read_adapter(folder: Path, model_folder: Path) -> tuple[Adapter, list[str]]:
    """The adapter as float32 on the CPU, and the modules that it lacked of those that we train together.

    Those are added with B zero, as a fresh run has them, so they change nothing until they are trained.
    """
    config = _config(folder)
    layers, kinds = _linear_layers(model_folder)
    try:
        saved = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        text = f"{folder / WEIGHTS} cannot be read ({error}); save the adapter with PEFT as safetensors"
        raise UserError(text) from None
    names = {_module(key, layers) for key in saved}
    trained = {kinds[name] for name in names}
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    spec = LoraSpec(rank, None, "attn" in trained, "mlp" in trained, "unembed" in trained)
    adapter = Adapter.create(layers, spec, scale * rank, torch.float32, "cpu")
    mine = adapter.parameters()
    absent = [f"{name}.lora_{part}" for name in names for part in "AB" if _key(name, part) not in saved]
    if absent:
        raise UserError(f"{WEIGHTS} has no weight {absent[0]}; every module needs its lora_A and its lora_B")
    with torch.no_grad():
        for key, value in saved.items():
            _check(key, value, mine[key].shape)
            mine[key].copy_(value)
    return adapter, sorted(set(adapter.tensors) - names)


def base_model_of(folder: Path) -> str | None:
    """The name of the base model that the adapter says it was trained on."""
    return _config(folder).get("base_model_name_or_path")


def _config(folder: Path) -> dict:
    file = folder / "adapter_config.json"
    remedy = "give a folder that PEFT's save_pretrained wrote"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({error}); {remedy}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} holds {type(config).__name__}, not a JSON object; {remedy}")
    if config.get("peft_type") != "LORA":
        raise UserError(f"peft_type is {config.get('peft_type')!r}; only LORA adapters can be imported")
    if config.get("bias", "none") != "none":
        raise UserError(f"bias is {config['bias']!r}; only adapters trained with bias='none' can be imported")
    for key in _MUST_BE_OFF:
        if config.get(key):
            raise UserError(f"{key} is {config[key]!r}; merge the adapter into its base model, or train without {key}")
    start = str(config.get("init_lora_weights", "")).lower()
    if start.startswith(_CHANGE_THE_BASE):
        raise UserError(
            f"init_lora_weights is {start!r}, which changes the base model too; convert the adapter to plain LoRA with "
            "PEFT (path_initial_model_for_weight_conversion) and import that"
        )
    for key, kind in (("r", int), ("lora_alpha", (int, float))):
        if not isinstance(config.get(key), kind) or isinstance(config[key], bool) or not 0 < config[key] < math.inf:
            raise UserError(f"{key} is {config.get(key)!r}; it must be a positive, finite number")
    return config


def _linear_layers(model_folder: Path) -> tuple[dict[str, torch.nn.Linear], dict[str, str]]:
    """The layers of the base model that may carry an adapter, without weights, and the kind of each."""
    config = AutoConfig.from_pretrained(model_folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = linear_names(model, bool(config.tie_word_embeddings))
    return {name: model.get_submodule(name) for name in names}, {name: module_kind(name) for name in names}


def _module(key: str, layers: dict[str, torch.nn.Linear]) -> str:
    found = _KEY.fullmatch(key)
    if found is None:
        raise UserError(
            f"{WEIGHTS} holds {key!r}, which is not a lora_A or lora_B weight of a linear layer; adapt linear layers "
            "only, and save with save_pretrained(folder, save_embedding_layers=False)"
        )
    if found[1] not in layers:
        raise UserError(
            f"{WEIGHTS} adapts {found[1]!r}, which is no linear layer of the base model that an adapter can reach (an "
            "unembedding that is tied to the embedding is none); train it with other target_modules"
        )
    return found[1]


def _key(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}.weight"


def _check(key: str, value: torch.Tensor, shape: torch.Size) -> None:
    if value.shape != shape:
        raise UserError(
            f"{key} is {list(value.shape)}, but r and the base model ask for {list(shape)}; name the base model that "
            "the adapter was trained on"
        )
    if not torch.isfinite(value).all():
        raise UserError(f"{key} holds numbers that are not finite; there is nothing to go on with")
