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

from verl_tinker.engine import preset_loss

# By the names of FIELDS, each like lp; and `rows`, the number of the datum that a position belongs to.
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
    return _pessimistic(_ratio(lp, f), f, config)


def cispo(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """-(stopgrad(clamp(r, low, high)) lp A)."""
    return -(_clamped(_ratio(lp.detach(), f), f, config) * lp * f["advantages"])


def dro(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """-(lp A - beta / 2 (lp - q)^2) at positions that carry an advantage.

    Positions with advantage 0 are excluded, as in the other policy losses: clients send q = 0 at prompt positions.
    """
    active = (f["advantages"] != 0).to(lp.dtype)
    pull = 0.5 * config["beta"] * (lp - f["logprobs"]) ** 2
    return -(lp * f["advantages"] - active * pull)


def gspo(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """ppo with the ratio of the whole datum: s = exp(mean over the mask of lp - q) without gradient, then at each
    position s exp(lp - stopgrad(lp)), whose gradient is that of the position alone."""
    mask, rows = f["sequence_ratio_mask"], f["rows"]
    per_datum = torch.zeros(int(rows.max()) + 1, dtype=lp.dtype, device=lp.device)
    log_ratio = torch.where(mask != 0, lp.detach() - f["logprobs"], torch.zeros_like(lp))
    mean = per_datum.index_add(0, rows, mask * log_ratio) / per_datum.index_add(0, rows, mask).clamp(min=1e-6)
    return _pessimistic(torch.exp(mean)[rows] * torch.exp(lp - lp.detach()), f, config)


# The usual cap of truncated importance sampling: a token that the trained policy likes more counts at most twice.
STABLE_CAP = 2.0


def stable_reinforce(lp: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """-(stopgrad(min(r, 2)) lp A) + kl_coeff / 2 (lp - q)^2, with q as the sampler recorded it.

    Our definition; the vendor's is not public. On-policy it is REINFORCE: r is 1, and the pull has no gradient.
    """
    ratio = _ratio(lp.detach(), f).clamp(max=STABLE_CAP)
    active = (f["advantages"] != 0).to(lp.dtype)
    return -(ratio * lp * f["advantages"]) + active * 0.5 * config["kl_coeff"] * (lp - f["logprobs"]) ** 2


def _pessimistic(ratio: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    return -torch.minimum(ratio * f["advantages"], _clamped(ratio, f, config) * f["advantages"])


def _clamped(ratio: torch.Tensor, f: Fields, config: Config) -> torch.Tensor:
    """The ratio within its thresholds: each position's own where the datum brings them, else the setting's."""
    low = f.get("clip_low_threshold", torch.full_like(ratio, config["clip_low_threshold"]))
    high = f.get("clip_high_threshold", torch.full_like(ratio, config["clip_high_threshold"]))
    return torch.minimum(torch.maximum(ratio, low), high)


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
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}

FIELDS = ("weights", "advantages", "logprobs", "sequence_ratio_mask", "clip_low_threshold", "clip_high_threshold")


def tinker_loss(model_output: dict, data: TensorDict, dp_group=None, *, actor=None) -> tuple[torch.Tensor, dict]:
    """verl's loss contract: the micro-batch's summed loss, times the number of data-parallel ranks.

    verl averages gradients and the reported loss over the data-parallel ranks; the factor makes both sums. `actor` is
    verl's ActorConfig, which only `custom_from_config` reads.
    """
    name = tu.get_non_tensor_data(data, "loss_fn", default=None)
    config = json.loads(tu.get_non_tensor_data(data, "loss_config", default="{}"))
    dp_size = tu.get_non_tensor_data(data, "dp_size", default=1)
    jagged = model_output["log_probs"]
    lp, lengths = jagged.values().float(), jagged.offsets().diff()
    fields = {k: data[k].values() for k in FIELDS if k in data.keys()}
    if name == preset_loss.NAME:
        counts = json.loads(tu.get_non_tensor_data(data, "counts", default="{}"))
        return preset_loss.preset_loss(lp, fields, lengths, actor, counts, dp_size), {}
    fields["rows"] = torch.arange(len(lengths), device=lp.device).repeat_interleave(lengths)
    return LOSSES[name](lp, fields, config).sum() * dp_size, {}
