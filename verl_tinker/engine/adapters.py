"""LoRA adapters of training runs on one shared base: layers, per-run weights, PEFT files.

Owns each run's adapter tensors and how they get in and out of the model. Does not own the optimizer.

The base is wrapped by FSDP first; the adapter tensors are added afterwards and stay whole on every rank
(they are small), so a run may have any rank and any set of target modules without touching the base.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import LoraSpec

_NAME = "default"
_PREFIX = "base_model.model."


def module_kind(name: str) -> str:
    """Which of the client's train flags a linear layer belongs to: "attn", "mlp" or "unembed"."""
    if name == "lm_head" or name.endswith(".lm_head"):
        return "unembed"
    return "attn" if "attn" in name or "attention" in name else "mlp"


def linear_names(module: torch.nn.Module, tied_embeddings: bool) -> list[str]:
    """Every linear layer that may carry an adapter, sorted; a tied lm_head may not (it is the embedding too)."""
    names = [n for n, m in module.named_modules() if isinstance(m, torch.nn.Linear)]
    return sorted(n for n in names if not (tied_embeddings and module_kind(n) == "unembed"))


class _Linear(lora.Linear):
    """PEFT's layer with the same product in fewer passes over the outputs: scale what has the rank's width, and add while
    multiplying."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.base_layer(x)
        if self.disable_adapters:
            return output
        narrow = torch.nn.functional.linear(x, self.lora_A[_NAME].weight) * self.scaling[_NAME]
        return torch.addmm(output.flatten(0, -2), narrow.flatten(0, -2), self.lora_B[_NAME].weight.t()).view_as(output)


def install_layers(module: torch.nn.Module, names: list[str]) -> dict[str, LoraLayer]:
    """Turn the named linear layers into PEFT LoRA layers without an active adapter."""
    targets = r"(?:" + "|".join(n.replace(".", r"\.") for n in names) + r")"
    config = LoraConfig(r=1, target_modules=targets)
    config._register_custom_module({torch.nn.Linear: _Linear})
    inject_adapter_in_model(config, module, adapter_name=_NAME)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, LoraLayer)}
    deactivate(layers)
    return layers


def deactivate(layers: dict[str, LoraLayer]) -> None:
    """Make the model its base."""
    for layer in layers.values():
        _detach(layer)


def _detach(layer: LoraLayer) -> None:
    # No run's tensors may stay in the module tree: verl clips over all parameters that it finds there.
    layer._disable_adapters = True
    for part in (layer.lora_A[_NAME], layer.lora_B[_NAME]):
        part.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Adapter:
    """One run's adapter: for each target module, A float[rank, in] and B float[out, rank]; W' = W + scale B A."""

    def __init__(self, spec: LoraSpec, scale: float, tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]):
        self.spec = spec
        self.scale = scale
        self.tensors = {
            name: (torch.nn.Parameter(a), torch.nn.Parameter(b)) for name, (a, b) in tensors.items()
        }

    @classmethod
    def create(cls, layers: dict[str, LoraLayer], spec: LoraSpec, alpha: float, dtype, device) -> Adapter:
        """A is Kaiming-uniform (a = sqrt 5, PEFT's own default) from the client's seed, B is zero."""
        generator = torch.Generator().manual_seed(spec.seed if spec.seed is not None else 0)
        tensors = {}
        for name in sorted(layers):
            if not getattr(spec, f"train_{module_kind(name)}"):
                continue
            layer = layers[name]
            a = torch.empty(spec.rank, layer.in_features)
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            b = torch.zeros(layer.out_features, spec.rank)
            tensors[name] = (a.to(device, dtype), b.to(device, dtype))
        return cls(spec, alpha / spec.rank, tensors)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by PEFT's file names, in a fixed order."""
        named = {}
        for module, (a, b) in self.tensors.items():
            named[f"{_PREFIX}{module}.lora_A.weight"] = a
            named[f"{_PREFIX}{module}.lora_B.weight"] = b
        return named

    def activate(self, layers: dict[str, LoraLayer]) -> None:
        """Put this adapter's tensors, and no other's, into the model."""
        for name, layer in layers.items():
            pair = self.tensors.get(name)
            if pair is None:
                _detach(layer)
            else:
                layer._disable_adapters = False
                layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight = pair
                layer.scaling[_NAME] = self.scale

    def save(self, folder: Path, base_model: str) -> None:
        """Write PEFT's adapter_model.safetensors and adapter_config.json."""
        save_file({k: p.detach().cpu().contiguous() for k, p in self.parameters().items()},
                  folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = LoraConfig(
            r=self.spec.rank,
            lora_alpha=self.scale * self.spec.rank,
            target_modules=sorted({n.rsplit(".", 1)[-1] for n in self.tensors}),
            base_model_name_or_path=base_model,
            task_type="CAUSAL_LM",
        ).to_dict()
        config = {k: (sorted(v) if isinstance(v, set) else v) for k, v in config.items()}
        config["verl_tinker"] = {"seed": self.spec.seed, "init": "A kaiming_uniform(sqrt 5) from seed, B zero"}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, default=str))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take the weights and the scale of a PEFT folder of the same shape; a mismatch changes nothing."""
        saved = load_file(folder / "adapter_model.safetensors")
        mine = self.parameters()
        if set(saved) != set(mine):
            odd = sorted(set(saved) ^ set(mine))[0]
            raise UserError(f"path: the checkpoint's adapter has other target modules than this run ({odd}); "
                            "create the run with the checkpoint's train_attn, train_mlp and train_unembed flags")
        for name, p in mine.items():
            if saved[name].shape != p.shape:
                raise UserError(f"path: the checkpoint's {name} is {list(saved[name].shape)}, this run's is "
                                f"{list(p.shape)}; create the run with the checkpoint's LoRA rank and base model")
        config = json.loads((folder / "adapter_config.json").read_text())
        for name, p in mine.items():
            p.copy_(saved[name])
        # The scale belongs to the weights: another lora_alpha would make another model of them.
        self.scale = config["lora_alpha"] / config["r"]
