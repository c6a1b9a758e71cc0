"""Attention over packed sequences for a machine without a GPU: each sequence by itself, as flash attention does it.

Owns one attention function under a name that a model configuration can ask for. Does not pack: verl does.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)

NAME = "packed_sdpa"


def packed_sdpa(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_ids=None, **kwargs):
    """query: float[1, heads, T, d]; key, value: float[1, kv heads, T, d]. Positions that start at 0 begin a sequence.

    With one mask over the whole pack, as SDPA would be given, the cost grows with the square of the pack.
    """
    if position_ids is None:
        raise ValueError(f"{NAME} needs position_ids to find the sequences of a pack")
    ranks = get_ulysses_sequence_parallel_world_size()
    if ranks > 1:
        query, key, value, position_ids = _all_positions_of_some_heads(query, key, value, position_ids, ranks)
    starts = (position_ids[0] == 0).nonzero().squeeze(1).tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], query.shape[2]])]
    # Neighbours of one length are a batch, which keeps the threads busier than a call for each.
    runs = [(len(list(same)), length) for length, same in groupby(lengths)]
    grouped = query.shape[1] != key.shape[1]
    parts = []
    # One split has one backward; a slice each would add a zero-filled pack for every sequence.
    for run, *packed in zip(runs, *(x[0].split([n * length for n, length in runs], dim=1) for x in (query, key, value))):
        batch = (x.unflatten(1, run).transpose(0, 1) for x in packed)
        attended = scaled_dot_product_attention(*batch, scale=scaling, is_causal=True, enable_gqa=grouped)
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    output = torch.cat(parts)[None]
    return gather_heads_scatter_seq(output, seq_dim=1, head_dim=2) if ranks > 1 else output, None


def _all_positions_of_some_heads(query, key, value, position_ids, ranks: int):
    """DeepSpeed-Ulysses (Jacobs et al. 2023): each rank brings a part of the positions, and gets a part of the heads."""
    if key.shape[1] < ranks:
        key, value = (x.repeat_interleave(ranks // x.shape[1], dim=1) for x in (key, value))
    query, key, value = (gather_seq_scatter_heads(x, seq_dim=2, head_dim=1) for x in (query, key, value))
    parts = [torch.empty_like(position_ids) for _ in range(ranks)]
    torch.distributed.all_gather(parts, position_ids.contiguous(), group=get_ulysses_sequence_parallel_group())
    return query, key, value, torch.cat(parts, dim=1)


def install() -> None:
    """Make the name known to transformers in this process. The mask that it would build is not needed."""
    AttentionInterface.register(NAME, packed_sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
