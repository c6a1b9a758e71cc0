"""What one training run owns inside a worker: trainable parameters, optimizer, accumulated gradient.

Owns saving and loading of optimizer state, independent of the number of ranks. Does not run the model.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import AdamParams
from verl_tinker.engine.adapters import Adapter

_MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER_FILE = "optimizer.safetensors"
_GRADIENT_FILE = "gradient.safetensors"


class RunState:
    """`adapter` None is full fine-tuning, whose parameters are the base's own."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], adapter: Adapter | None):
        self.parameters = parameters
        self.adapter = adapter
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.AdamW:
        # Every field is set again at each step from the client's request.
        return torch.optim.AdamW(list(self.parameters.values()), lr=0.0, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)

    @contextmanager
    def gradient_transaction(self):
        """Add the gradient of one forward_backward as a whole, or, if it raises, nothing at all.

        Adapter gradients, which FSDP does not see, are averaged over all ranks like FSDP's own.
        """
        before = {n: p.grad for n, p in self.parameters.items()}
        for p in self.parameters.values():
            p.grad = None
        try:
            yield
            if self.adapter is not None:
                self._average_gradients()
            self._check_gradients()
        except BaseException:
            for n, p in self.parameters.items():
                p.grad = before[n]
            raise
        for n, p in self.parameters.items():
            if before[n] is not None:
                p.grad = before[n] if p.grad is None else p.grad.add_(before[n])

    def _average_gradients(self) -> None:
        ranks = torch.distributed.get_world_size()
        if ranks == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters.values()]
        flat = torch.cat([g.reshape(-1) for g in grads])
        torch.distributed.all_reduce(flat)
        flat /= ranks
        for p, piece in zip(self.parameters.values(), flat.split([g.numel() for g in grads])):
            p.grad = piece.view_as(p).clone()

    def _check_gradients(self) -> None:
        """Raise on every rank when any rank's share holds a number that is not finite."""
        local = [_local(g) for p in self.parameters.values() if (g := p.grad) is not None]
        bad = torch.tensor(float(not all(bool(torch.isfinite(g).all()) for g in local)), device=local[0].device if local else "cpu")
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
        if bad:
            raise UserError("data: the gradient of this batch is not finite, so nothing of it was added; look for "
                            "logprobs far below the model's own, whose ratio overflows, and for huge advantages or weights")

    @torch.no_grad()
    def update_norm(self, moved: list[torch.nn.Parameter], adam: AdamParams) -> float:
        """The L2 norm of what the step just made has added to `moved`, over all ranks.

        From AdamW's formula, moment by moment, since keeping the weights from before would double their memory.
        """
        lr, decay, total = adam.learning_rate, adam.weight_decay, 0.0
        for p in moved:
            state = self.optimizer.state[p]
            step = float(state["step"])
            first, second = (_local(state[name]) for name in _MOMENTS)
            change = (second / (1 - adam.beta2**step)).sqrt_().add_(adam.eps)
            change = first.div(1 - adam.beta1**step).div_(change).mul_(lr)
            if decay:
                # p is (1 - lr * decay) times its old value, less the change.
                change.add_((_local(p) + change).mul_(lr * decay / (1 - lr * decay)))
            total += float(change.double().square().sum())
        if any(isinstance(p, DTensor) for p in moved):
            shares = torch.tensor(total / _copies(moved[0]), device=_local(moved[0]).device, dtype=torch.float64)
            torch.distributed.all_reduce(shares)
            total = float(shares)
        return total**0.5

    def reset_optimizer(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer = self._new_optimizer()

    def save_optimizer(self, folder: Path, writes: bool) -> None:
        """Every rank must call this; the one with `writes` writes optimizer.safetensors."""
        tensors = {}
        for name, p in self.parameters.items():
            state = self.optimizer.state.get(p)
            if not state:
                continue
            tensors[f"{name}.step"] = state["step"].detach().float().cpu().reshape(())
            for key in _MOMENTS:
                tensors[f"{name}.{key}"] = whole(state[key])
        if writes:
            save_file(tensors or {"empty": torch.zeros(())}, folder / OPTIMIZER_FILE)

    def load_optimizer(self, saved: dict[str, torch.Tensor]) -> None:
        """Restore what save_optimizer wrote; the moments become bit-equal."""
        self.reset_optimizer()
        for name, p in self.parameters.items():
            if f"{name}.step" not in saved:
                continue
            state = {"step": saved[f"{name}.step"].clone()}
            for key in _MOMENTS:
                state[key] = _like(saved[f"{name}.{key}"], p)
            self.optimizer.state[p] = state


    def save_gradient(self, folder: Path) -> None:
        """Write gradient.safetensors when there is a gradient. Adapters only, whose gradients every rank has whole."""
        gradient = {n: p.grad.detach().cpu().contiguous() for n, p in self.parameters.items() if p.grad is not None}
        if gradient:
            save_file(gradient, folder / _GRADIENT_FILE)

    def load_gradient(self, folder: Path) -> None:
        if not (folder / _GRADIENT_FILE).exists():
            return
        for name, gradient in load_file(folder / _GRADIENT_FILE).items():
            self.parameters[name].grad = _like(gradient, self.parameters[name])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _copies(p: DTensor) -> int:
    """How many ranks have the same share of a parameter: more than one where groups of ranks each have it all."""
    return math.prod(size for size, placement in zip(p.device_mesh.shape, p.placements) if placement.is_replicate())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on the host; a collective when it is sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone().contiguous()


def _like(value: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
    # A copy even on the host: what safetensors reads is a window on a file that somebody may delete to free the disk.
    value = value.to(p.device, copy=True)
    return distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value


@torch.no_grad()
def copy_into(p: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite a parameter, sharded or not, with a full tensor."""
    p.copy_(_like(value.to(p.dtype), p))
