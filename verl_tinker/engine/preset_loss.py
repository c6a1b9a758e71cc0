"""`custom_from_config`: the policy loss that the preset's actor section names, out of verl's own registry.

Owns the way from flat rows to verl's padded ones and the counts of the whole call. Holds no formula: they are verl's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import Datum

NAME = "custom_from_config"


def call_counts(data: list[Datum]) -> dict[str, int]:
    """What verl divides by when it means over tokens or sequences: those with an advantage, of all micro-batches."""
    tokens = [int(np.count_nonzero(datum.inputs["advantages"])) for datum in data]
    return {"batch_num_tokens": max(1, sum(tokens)), "global_batch_size": max(1, sum(n > 0 for n in tokens))}


def check_actor(actor) -> None:
    """UserError for settings of the actor section that this loss would leave out."""
    if actor.entropy_coeff != 0 or actor.use_kl_loss:
        raise UserError(
            f"loss_fn {NAME}: the preset's actor section has entropy_coeff {actor.entropy_coeff} and use_kl_loss "
            f"{actor.use_kl_loss}, which this loss does not add; set them to 0 and false, and bring a penalty by the "
            "advantages")


def preset_loss(
    lp: torch.Tensor, fields: dict[str, torch.Tensor], lengths: torch.Tensor, actor, counts: dict[str, int], dp_size: int
) -> torch.Tensor:
    """The loss of a micro-batch as verl aggregates it, times the number of data-parallel ranks.

    lp, and each of the fields `logprobs` and `advantages`: float[sum of lengths], one row after the other. `actor`:
    verl's ActorConfig; its policy_loss, clip_ratio* and loss_agg_mode count.
    """
    active = fields["advantages"] != 0
    # Elsewhere clients send q = 0, whose ratio could overflow before the mask takes it out.
    q = torch.where(active, fields["logprobs"], lp.detach())
    rows = [pad_sequence(t.split(lengths.tolist()), batch_first=True) for t in (q, lp, fields["advantages"], active.to(lp.dtype))]
    actor.global_batch_info.update(counts, dp_size=dp_size, loss_scale_factor=actor.loss_scale_factor)
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(*rows, loss_agg_mode=actor.loss_agg_mode, config=actor)
    return loss
