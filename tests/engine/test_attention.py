"""Attention over a pack gives each sequence what it gets alone, also where neighbours of one length go through together."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from verl_tinker.engine.cpu.attention import packed_sdpa

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("lengths", [(5,), (4, 4, 4), (3, 3, 2, 5, 5, 1, 1, 3)])
def test_a_pack_is_its_sequences_one_by_one(lengths):
    torch.manual_seed(0)
    query = torch.randn(1, 6, sum(lengths), 8, requires_grad=True)
    key, value = (torch.randn(1, 2, sum(lengths), 8, requires_grad=True) for _ in range(2))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([
        scaled_dot_product_attention(q, k, v, scale=0.3, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)))], dim=2).transpose(1, 2)
    packed, _ = packed_sdpa(None, query, key, value, None, scaling=0.3, position_ids=positions)
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=1e-5)
    weights = torch.randn_like(alone)
    for found, wanted in zip(*(torch.autograd.grad((out * weights).sum(), (query, key, value)) for out in (packed, alone))):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
