"""What vLLM's CPU build needs: plain weights kept, LoRA as plain matrix products, seeds for prompts that come in chunks.

Owns the three hooks into vLLM's CPU back-end. Does not load weights: `verl_tinker.engine.vllm_weights` does.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def install() -> None:
    """Call in the sampler's process before an engine is built."""
    original = utils.dispatch_cpu_unquantized_gemm

    def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        # vLLM packs each weight and throws the plain one away; an update in place then has nothing to write to.
        original(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = keep_weight
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: f"{__name__}.GroupedLora")
    CPUModelRunner.sample_tokens = _keeping_seeds(CPUModelRunner.sample_tokens)


def _keeping_seeds(sample_tokens):
    """What is sampled before a prompt is through is thrown away; vLLM then winds the request's generator back.

    Torch's generator for CPU cannot go back, so it does not go forward either.
    """

    @functools.wraps(sample_tokens)
    def keeping(self, grammar_output):
        generators = self.input_batch.generators
        unfinished = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        kept = {row: generators.pop(row) for row in unfinished if row in generators}
        try:
            return sample_tokens(self, grammar_output)
        finally:
            generators.update(kept)

    return keeping


class GroupedLora(PunicaWrapperBase):
    """LoRA for a batch as one pair of matrix products an adapter, at the adapter's own rank.

    vLLM's CPU wrapper gathers a weight matrix for every token at the rank ceiling; grouping tokens by adapter
    gives the same numbers for a fraction of the work.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device, **kwargs):
        super().__init__(max_num_batched_tokens, max_batches, device)
        self._token_groups: list[tuple[int, torch.Tensor | None]] = []
        self._sampler_groups: list[tuple[int, torch.Tensor | None]] = []

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs):
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self._token_groups = _groups(self.token_lora_indices)
        self._sampler_groups = _groups(self.sampler_indices)

    def add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs):
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._token_groups:
            inputs = x if rows is None else x[rows]
            offset = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices):
                self._add(y[:, offset : offset + width], inputs, rows, a[slot, 0], b[slot, 0], scale)
                offset += width

    def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs):
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._sampler_groups:
            inputs = x if rows is None else x[rows]
            self._add(y[:, : lora_b_stacked.shape[-2]], inputs, rows, lora_a_stacked[slot, 0], lora_b_stacked[slot, 0], scale)

    def _add(self, y, inputs, rows, a, b, scale) -> None:
        rank = _used_rank(a)
        if rank == 0:
            return
        low = inputs @ a[:rank].T
        if rows is None and scale == 1.0:
            y.addmm_(low, b[:, :rank].T)
        elif rows is None:
            y.add_(low @ b[:, :rank].T, alpha=scale)
        else:
            y.index_add_(0, rows, low @ b[:, :rank].T, alpha=scale)

    def _unsupported(self, *args, **kwargs):
        raise RuntimeError("adapters on this layer type are not served on a machine without a GPU")

    add_shrink = add_expand = add_lora_embedding = apply_lora_full_linear = _unsupported


def _groups(slots: torch.Tensor) -> list[tuple[int, torch.Tensor | None]]:
    """Rows by adapter slot; None stands for all rows. Slot -1 is the base and needs nothing."""
    found = [s for s in slots.unique().tolist() if s >= 0]
    if len(found) == 1 and bool((slots == found[0]).all()):
        return [(found[0], None)]
    return [(s, (slots == s).nonzero().squeeze(1)) for s in found]


def _used_rank(a: torch.Tensor) -> int:
    """The rank of the adapter in a slot: rows above it are zero. A is never zero in a row that is used."""
    rows = a[:, :8].any(dim=1)
    return int(rows.nonzero()[-1]) + 1 if bool(rows.any()) else 0
