"""Log-probabilities of a prompt: under an adapter that reaches the unembedding, and of tokens that vLLM would not give.

Owns one change to vLLM's model runner. Does not score anything itself; `prompt_extras` picks from the scores.

vLLM scores each prompt of a step by itself, but applies the unembedding's adapter by the mapping of that step's
sampled tokens: one row a request. On a batch of several adapters a prompt gets other requests' adapters; on a GPU all
rows beyond the number of requests get none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from verl_tinker.engine.prompt_extras import EXTRA_ARG, Collected, Extras


def install() -> None:
    """Call in the process that holds the model, before the first request."""
    original = GPUModelRunner._get_prompt_logprobs_dict
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def one_by_one(self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]):
        wanted, found = self.num_prompt_logprobs, {}
        try:
            for request_id in [name for name in wanted if name in num_scheduled_tokens]:
                self.num_prompt_logprobs = {request_id: wanted[request_id]}
                with _adapter_of(self, request_id), _extras_of(self, request_id) as extras:
                    found |= original(self, hidden_states, num_scheduled_tokens)
                if not self.num_prompt_logprobs:  # The prompt is through; otherwise its next chunk follows.
                    del wanted[request_id]
                    if extras is not None:
                        extras.fill(found[request_id].logprob_token_ids, found[request_id].logprobs)
        finally:
            self.num_prompt_logprobs = wanted
        return found

    GPUModelRunner._get_prompt_logprobs_dict = one_by_one


@contextmanager
def _adapter_of(runner: GPUModelRunner, request_id: str) -> Iterator[None]:
    """Every row that reaches the unembedding is this request's."""
    if not runner.lora_config:
        yield
        return
    manager = runner.lora_manager._adapter_manager
    lora = runner.requests[request_id].lora_request
    slot = None if lora is None else manager.lora_index_to_id.index(lora.lora_int_id)
    layers = [m for m in manager.modules.values() if isinstance(m, LogitsProcessorWithLoRA)]
    usual = [layer.punica_wrapper for layer in layers]
    for layer in layers:
        layer.punica_wrapper = _OneAdapter(slot)
    try:
        yield
    finally:
        for layer, wrapper in zip(layers, usual):
            layer.punica_wrapper = wrapper


@contextmanager
def _extras_of(runner: GPUModelRunner, request_id: str) -> Iterator[Collected | None]:
    """What this request asks for beside its top k, collected from the scores that vLLM computes meanwhile."""
    request = runner.requests[request_id]
    argument = (request.sampling_params.extra_args or {}).get(EXTRA_ARG)
    if argument is None:
        yield None
        return
    if not hasattr(request, EXTRA_ARG):
        setattr(request, EXTRA_ARG, Collected(Extras.read(argument), len(request.prompt_token_ids) - 1))
    collected, first, compute = getattr(request, EXTRA_ARG), request.num_computed_tokens, runner.sampler.compute_logprobs

    def computed(logits: torch.Tensor) -> torch.Tensor:
        scores = compute(logits)
        collected.add(scores, first)
        return scores

    runner.sampler.compute_logprobs = computed
    try:
        yield collected
    finally:
        del runner.sampler.compute_logprobs


class _OneAdapter:
    """Stands in for vLLM's wrapper of the adapter kernels."""

    def __init__(self, slot: int | None):
        self.slot = slot

    def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs) -> torch.Tensor:
        """y: float[T, V], added to in place; x: float[T, hidden]. In float32, as in vLLM's kernels."""
        if self.slot is None:
            return y
        a, b = lora_a_stacked[self.slot, 0], lora_b_stacked[self.slot, 0]
        # Slots have the ceiling's rank; the rows of A above the adapter's own are zero.
        used = a.any(dim=1).nonzero()
        if len(used):
            rank = int(used[-1]) + 1
            low = x.float() @ a[:rank].float().T
            y[:, : b.shape[0]] += (low @ b[:, :rank].float().T * scale).to(y.dtype)
        return y
