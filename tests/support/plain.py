"""The reference: plain transformers and torch in float32, one sequence at a time.

Owns nothing of the product: it is what the product's numbers are compared with.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def load_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(model: torch.nn.Module, tokens: np.ndarray, targets: np.ndarray) -> torch.Tensor:
    """float32 log-probabilities of targets [N] or [N, K] at each position of tokens [N]."""
    logits = model(torch.as_tensor(np.asarray(tokens, np.int64))[None]).logits[0].float()
    wanted = torch.as_tensor(np.asarray(targets, np.int64))
    flat = wanted.reshape(len(wanted), -1)
    return torch.log_softmax(logits, -1).gather(1, flat).reshape(wanted.shape)


def loss(name: str, lp: torch.Tensor, inputs: dict[str, np.ndarray], config: dict[str, float]) -> torch.Tensor:
    """The published formulas, written out once more."""
    t = {k: torch.as_tensor(v) for k, v in inputs.items()}
    if name == "cross_entropy":
        return -(t["weights"] * lp).sum()
    a, q = t["advantages"], t["logprobs"]
    r = torch.exp(lp - q)
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "ppo":
        low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
        return -torch.min(r * a, torch.clamp(r, low, high) * a).sum()
    if name == "cispo":
        low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
        return -(torch.clamp(r, low, high).detach() * lp * a).sum()
    if name == "dro":
        return -((lp * a - 0.5 * config.get("beta", 0.05) * (lp - q) ** 2) * (a != 0)).sum()
    if name == "gspo":
        mask = t["sequence_ratio_mask"]
        s = torch.exp((mask * (lp.detach() - q)).sum() / mask.sum()) * torch.exp(lp - lp.detach())
        return -torch.min(s * a, torch.clamp(s, config["clip_low_threshold"], config["clip_high_threshold"]) * a).sum()
    if name == "stable_reinforce":
        pull = 0.5 * config["kl_coeff"] * (lp - q) ** 2 * (a != 0)
        return (pull - torch.clamp(r, max=2.0).detach() * lp * a).sum()
    raise KeyError(name)


class PlainRun:
    """A model, its trainable parameters by the checkpoint's names, and torch's AdamW."""

    def __init__(self, base: Path, adapter: Path | None):
        self.model = load_model(base)
        if adapter is None:
            self.parameters = dict(self.model.named_parameters())
        else:
            self.model.requires_grad_(False)
            self.parameters = _add_lora(self.model, adapter)
        self.optimizer: torch.optim.AdamW | None = None

    def forward_backward(self, data, name: str = "cross_entropy", config: dict[str, float] | None = None) -> float:
        total = 0.0
        for datum in data:
            lp = logprobs(self.model, datum.tokens, datum.inputs["target_tokens"])
            value = loss(name, lp, datum.inputs, config or {})
            value.backward()
            total += value.item()
        return total

    def step(self, adam) -> float:
        settings = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps,
                    "weight_decay": adam.weight_decay}
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(list(self.parameters.values()), **settings)
        for group in self.optimizer.param_groups:
            group.update(settings)
        limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


class _LoraLinear(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float):
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def _add_lora(model: torch.nn.Module, adapter: Path) -> dict[str, torch.nn.Parameter]:
    config = json.loads((adapter / "adapter_config.json").read_text())
    saved = load_file(adapter / "adapter_model.safetensors")
    named = {}
    for key in saved:
        if not key.endswith(".lora_A.weight"):
            continue
        prefix = key.removesuffix(".lora_A.weight")
        name = prefix.removeprefix("base_model.model.")
        parent, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        layer = _LoraLinear(getattr(parent, leaf), saved[key], saved[f"{prefix}.lora_B.weight"],
                            config["lora_alpha"] / config["r"])
        setattr(parent, leaf, layer)
        named[key], named[f"{prefix}.lora_B.weight"] = layer.a, layer.b
    return named


def largest_difference(parameters: dict[str, torch.Tensor], file: Path) -> float:
    """max |difference| between live parameters and a saved safetensors file with the same names."""
    saved = load_file(file)
    assert set(saved) <= set(parameters), sorted(set(saved) - set(parameters))[:3]
    return max(float((parameters[k].detach() - v).abs().max()) for k, v in saved.items())
