"""verl's FSDP engine with explicit targets and several adapters on one base.

Owns which run's parameters are in the model and the log-probabilities of explicit targets. Does not own
the micro-batch loop, the model forward or clipping: those are verl's.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_tinker.core.errors import EngineError
from verl_tinker.engine import adapters
from verl_tinker.engine.run_state import RunState

_ROWS_AT_ONCE = 64


class TargetLogprobs(torch.autograd.Function):
    """log softmax(logits)[row, target] for given pairs, in the memory of the logits alone.

    logits: float32[T, V], overwritten by its log softmax, and in backward by its gradient. rows, targets: int64[M],
    rows ascending.
    """

    @staticmethod
    def forward(ctx, logits, rows, targets):
        # A few rows at a time: temporaries of the whole would be as large as the logits.
        for part in logits.split(_ROWS_AT_ONCE):
            part.copy_(torch.log_softmax(part, dim=-1))
        ctx.save_for_backward(logits, rows, targets)
        return logits[rows, targets]

    @staticmethod
    def backward(ctx, grad):
        log_softmax, rows, targets = ctx.saved_tensors
        per_row = torch.zeros(len(log_softmax), dtype=grad.dtype, device=grad.device).index_add_(0, rows, grad)
        gradient = log_softmax.exp_().mul_(per_row.neg().unsqueeze(-1))
        gradient.index_put_((rows, targets), grad, accumulate=True)
        return gradient, None, None


class OfAllPositions(torch.autograd.Function):
    """Values of the targets whose positions this rank has, float32[mine], made into those of all ranks of `group`, [M].

    The gradient is multiplied by the number of ranks: each of them computes the loss of all, and what their backward
    passes add is averaged.
    """

    @staticmethod
    def forward(ctx, values, mine, group):
        ctx.save_for_backward(mine)
        ctx.ranks = torch.distributed.get_world_size(group)
        everywhere = torch.zeros(len(mine), dtype=values.dtype, device=values.device).masked_scatter_(mine, values)
        torch.distributed.all_reduce(everywhere, group=group)
        return everywhere

    @staticmethod
    def backward(ctx, grad):
        (mine,) = ctx.saved_tensors
        return grad[mine] * ctx.ranks, None, None


class TinkerFSDPEngine(FSDPEngineWithLMHead):
    """One base model; the selected run decides what is trainable in it."""

    trains_base = False

    def initialize(self):
        super().initialize()
        self.selected: str | None = None

    def _build_model_optimizer(self):
        module = self._build_module()
        self.pass_packed_cu_seqlens = False
        module.requires_grad_(self.trains_base)
        torch.distributed.barrier()
        self.module = self._build_fsdp_module(module)
        names = adapters.linear_names(module, self.model_config.hf_config.tie_word_embeddings)
        self.layers = {} if self.trains_base else adapters.install_layers(self.module, names)
        # A placeholder: each run brings its own optimizer when it is selected.
        self.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        self.lr_scheduler = None

    def select(self, run_id: str | None, run: RunState | None) -> None:
        """Put a run's parameters and optimizer into the engine; None is the base."""
        if run is not None:
            self.optimizer = run.optimizer
            if run.adapter is not None:
                run.adapter.activate(self.layers)
        else:
            adapters.deactivate(self.layers)
        self.selected = run_id
        self.run = run

    def forward_backward_batch(self, data: TensorDict, loss_function, forward_only=False):
        wanted = tu.get_non_tensor_data(data, "run_id", default=None)
        if wanted != self.selected:
            raise EngineError(f"the batch is for run {wanted}, but {self.selected} is selected")
        if forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only=True)
        with self.run.gradient_transaction():
            return super().forward_backward_batch(data, loss_function, forward_only=False)

    def prepare_model_outputs(self, output, output_args, micro_batch: TensorDict, logits_processor_func):
        """log_probs: jagged, one row of N * K values a datum, of the batch's own `targets`."""
        targets = micro_batch["targets"]
        logits = output.logits
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        logits = logits.reshape(-1, logits.shape[-1])
        if not tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True):
            lengths = micro_batch["input_ids"].offsets().diff()
            keep = torch.arange(output.logits.shape[1], device=logits.device) < lengths.unsqueeze(1)
            logits = logits[keep.reshape(-1)]
        elif output_args["pad_size"] and not self.use_ulysses_sp:
            logits = logits[: -output_args["pad_size"]]
        lengths = micro_batch["input_ids"].offsets().diff()
        widths = micro_batch["target_width"].repeat_interleave(lengths)
        rows = torch.arange(len(widths), device=logits.device).repeat_interleave(widths)
        log_probs = self._target_logprobs(logits.float(), rows, targets.values())
        return {"log_probs": torch.nested.nested_tensor_from_jagged(log_probs, targets.offsets())}

    def _target_logprobs(self, logits, rows, targets):
        if not self.use_ulysses_sp:
            return TargetLogprobs.apply(logits, rows, targets)
        first = torch.distributed.get_rank(self.ulysses_parallel_group) * len(logits)
        mine = (rows >= first) & (rows < first + len(logits))
        log_probs = TargetLogprobs.apply(logits, rows[mine] - first, targets[mine])
        return OfAllPositions.apply(log_probs, mine, self.ulysses_parallel_group)

    def optimizer_zero_grad(self):
        # verl clears gradients when anything raises in train mode; a failed batch must not take earlier ones along.
        pass

    def optimizer_step(self):
        norm = super().optimizer_step()
        self.optimizer.zero_grad()
        return norm

    @contextmanager
    def disable_adapter(self):
        adapters.deactivate(self.layers)
        try:
            yield
        finally:
            self.select(self.selected, self.run)


def register(device: str) -> None:
    """Make this engine verl's FSDP2 engine for `device` in this process."""
    registry = EngineRegistry._engines["language_model"]["fsdp2"]
    registry[device] = TinkerFSDPEngine
