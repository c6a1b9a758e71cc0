"""Attention over packed sequences for a machine without a GPU: each sequence by itself, as flash attention does it.

Owns one attention function under a name that a model configuration can ask for. Does not pack: verl does.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "packed_sdpa"


def packed_sdpa(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_ids=None, **kwargs):
    """query: float[B, heads, T, d]; key, value: float[B, kv heads, T, d]. Positions that start at 0 begin a sequence.

    With one mask over the whole pack, as SDPA would be given, the cost grows with the square of the pack.
    """
    if position_ids is None:
        raise ValueError(f"{NAME} needs position_ids to find the sequences of a pack")
    starts = (position_ids[0] == 0).nonzero().squeeze(1).tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], query.shape[2]])]
    grouped = query.shape[1] != key.shape[1]
    parts = [
        scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=True, enable_gqa=grouped)
        # One split has one backward; a slice each would add a zero-filled pack for every sequence.
        for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)))
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def install() -> None:
    """Make the name known to transformers in this process. The mask that it would build is not needed."""
    AttentionInterface.register(NAME, packed_sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
