"""The losses of the Tinker API, as sums over tokens and datums, in the form verl's engines call.

Owns the formulas (Tinker's public documentation of its losses). Does not validate inputs:
`verl_tinker.core.validate` has done so before a batch reaches a worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

Fields = dict[str, torch.Tensor]
Config = dict[str, float]


def cross_entropy(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """-(weights * lp), nats; weights of any sign and size."""
    return -(f["weights"] * lp)


def importance_sampling(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """-(r * A) with r = exp(lp - q)."""
    return -(_ratio(lp, f) * f["advantages"])


def ppo(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """-min(r A, clamp(r, low, high) A); the thresholds are bounds on the ratio itself."""
    ratio = _ratio(lp, f)
    clipped = ratio.clamp(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    return -torch.minimum(ratio * f["advantages"], clipped * f["advantages"])


def cispo(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """-(stopgrad(clamp(r, low, high)) lp A)."""
    ratio = _ratio(lp.detach(), f)
    clipped = ratio.clamp(config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0))
    return -(clipped * lp * f["advantages"])


def dro(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """-(lp A - beta / 2 (lp - q)^2) at positions that carry an advantage.

    Positions with advantage 0 are excluded, as in the other policy losses: clients send q = 0 at prompt positions.
    """
    active = (f["advantages"] != 0).to(lp.dtype)
    pull = 0.5 * config.get("beta", 0.05) * (lp - f["logprobs"]) ** 2
    return -(lp * f["advantages"] - active * pull)


def _ratio(lp: torch.Tensor, f: Fields) -> torch.Tensor:
    # Positions without an advantage must give 0 and no gradient whatever exp() of their log-ratio is.
    log_ratio = torch.where(f["advantages"] != 0, lp - f["logprobs"], torch.zeros_like(lp))
    return torch.exp(log_ratio)


LOSSES: dict[str, Callable[[torch.Tensor, Fields, Config], torch.Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
}

FIELDS = ("weights", "advantages", "logprobs")


def tinker_loss(model_output: dict, data: TensorDict, dp_group=None) -> tuple[torch.Tensor, dict]:
    """verl's loss contract: the micro-batch's summed loss, times the number of data-parallel ranks.

    verl averages gradients and the reported loss over the data-parallel ranks; the factor makes both sums.
    """
    name = tu.get_non_tensor_data(data, "loss_fn", default=None)
    config = json.loads(tu.get_non_tensor_data(data, "loss_config", default="{}"))
    dp_size = tu.get_non_tensor_data(data, "dp_size", default=1)
    lp = model_output["log_probs"].values().float()
    fields = {k: data[k].values() for k in FIELDS if k in data.keys()}
    return LOSSES[name](lp, fields, config).sum() * dp_size, {}
