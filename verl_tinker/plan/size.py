"""How large a model is, read from its config.json alone.

Owns the counting. Loads no weights: transformers builds the model's modules without memory, which is exact for every
architecture that it knows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_tinker.models import resolve_model
from verl_tinker.schema import ConfigError

# A block of MXFP4: 32 values of 4 bits and a scale of 8.
_MXFP4_BYTES = (32 * 4 + 8) / 32 / 8


@dataclass(frozen=True)
class ModelSize:
    """Counts of parameters, a tied embedding once, and the widths that memory depends on.

    `experts` of the parameters lie in experts, all of them counted; `active_width` is the MLP's for one token.
    `gathered`: those that lie whole on a GPU at once while shards are computed with. `linear`: (in, out) of each layer that
    an adapter may reach.
    `kv_values`: numbers that a token leaves in a layer's cache for each of `kv_heads`.
    """

    parameters: int
    experts: int
    gathered: int
    layers: int
    cached_layers: int
    hidden: int
    attention_width: int
    active_width: int
    vocabulary: int
    max_context: int
    kv_heads: int
    kv_values: int
    linear: tuple[tuple[int, int], ...]
    quantization: str | None = None

    def adapter_parameters(self, rank: int) -> int:
        """A is [rank, in] and B is [out, rank]."""
        return rank * sum(inner + outer for inner, outer in self.linear)

    def served_bytes(self, dtype: int) -> tuple[float, float]:
        """Bytes of the weights as an inference engine holds them: outside of experts, and in them."""
        experts = self.experts * (_MXFP4_BYTES if self.quantization == "mxfp4" else dtype)
        return float((self.parameters - self.experts) * dtype), float(experts)


def described(path: str, given: Mapping[str, Path], cache_dir: Path) -> Path:
    """A folder with the config.json of the model that a preset calls `path`: given, local, among ours, or the hub's.

    Raises ConfigError that says how to give one.
    """
    if path in given:
        return given[path]
    if path.startswith(("bundled:", "/", ".", "~")) or (Path(path) / "config.json").is_file():
        return resolve_model(path, cache_dir)
    package = Path(__file__).resolve().parents[1]
    for place in (package.parent, package):
        if (place / "configs" / "models" / path / "config.json").is_file():
            return place / "configs" / "models" / path
    return _from_hub(path)


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:  # The hub client raises its own, httpx's and OSError's types for one and the same cause.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the description of {name} is not to be had from the hub ({reason}); give a folder that holds "
                          f"its config.json with --model-config {name}=FOLDER") from error


@functools.cache
def model_size(folder: Path) -> ModelSize:
    """Read `folder`/config.json. Raises ConfigError when transformers knows no causal language model of that description."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        return _measured(model, config)
    except Exception as error:  # Each architecture checks its own description, with errors of any type.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"transformers cannot read {folder / 'config.json'} ({reason}); give the folder of a causal "
                          "language model that this version of transformers knows") from error


def _measured(model, config) -> ModelSize:
    from verl_tinker.engine.adapters import linear_names

    text = config.get_text_config()
    modules = dict(model.named_modules())
    linear = [modules[name] for name in linear_names(model, bool(config.tie_word_embeddings))]
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    latent = getattr(text, "kv_lora_rank", None)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return ModelSize(
        parameters=_count(model),
        experts=sum(p.numel() for name, p in model.named_parameters() if ".experts." in name),
        gathered=_gathered(model, bool(config.tie_word_embeddings)),
        layers=text.num_hidden_layers,
        # Layers of a sliding window count in full, so that the estimate errs on the safe side.
        cached_layers=sum("linear" not in kind for kind in kinds),
        hidden=text.hidden_size,
        attention_width=head * (text.num_attention_heads + kv_heads),
        active_width=_active_width(text),
        vocabulary=text.vocab_size,
        max_context=text.max_position_embeddings,
        # Latent attention keeps one vector of a token for all heads.
        kv_heads=1 if latent else kv_heads,
        kv_values=latent + text.qk_rope_head_dim if latent else 2 * head,
        linear=tuple((layer.in_features, layer.out_features) for layer in linear),
        quantization=(getattr(config, "quantization_config", None) or {}).get("quant_method"),
    )


def _count(module) -> int:
    # A parameter that is used twice, as a tied embedding is, comes once.
    return sum(p.numel() for p in module.parameters())


def _gathered(model, is_tied: bool) -> int:
    """verl shards each layer that transformers does not split, an untied embedding, and the rest, which stays gathered;
    while one of them computes, the next is on its way (verl.utils.fsdp_utils.apply_fsdp2)."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layer = max((_count(module) for module in model.modules() if type(module).__name__ in names), default=0)
    inside = sum(_count(module) for module in model.modules() if type(module).__name__ in names)
    embedding = 0 if is_tied else _count(model.get_input_embeddings())
    return _count(model) - inside - embedding + layer + max(layer, embedding)


def _active_width(text) -> int:
    """The MLP's width for one token: all experts that it is sent to."""
    chosen = getattr(text, "num_experts_per_tok", None)
    if not chosen:
        return text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return chosen * (getattr(text, "moe_intermediate_size", None) or text.intermediate_size) + shared
