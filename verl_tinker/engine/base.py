"""The Protocol between the scheduler and whatever trains and samples.

Owns the contract. Holds no implementation: `verl_tinker.engine.verl_engine` is the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from verl_tinker.core.types import (
    AdamParams,
    BaseModelInfo,
    Datum,
    Drawn,
    ForwardBackwardResult,
    ModelInfo,
    ModelSpec,
    SampleRequest,
    SampleResult,
)


class Engine(Protocol):
    """Trains models and samples from immutable versions of their weights.

    The scheduler calls the training methods of one engine one at a time, in order; `sample` may run beside
    them, many at once. Methods raise `UserError` for what the user can mend and `EngineError` for the rest.
    A failed call changes nothing. Version 0 is the base model and always answers.
    """

    async def start(self, report: Callable[[str], None]) -> None:
        """Bring up every process; `report` is told each phase by name."""

    async def close(self) -> None:
        """End every process that start made; safe to call twice."""

    def base_models(self) -> list[BaseModelInfo]:
        """The base models by public name; known before `start`."""

    async def create_model(self, model_id: str, spec: ModelSpec) -> ModelInfo: ...

    async def drop_model(self, model_id: str) -> None:
        """Free what the run holds: weights, gradients, optimizer state. Its saved folders stay."""

    async def forward_backward(
        self, model_id: str, data: list[Datum], loss_fn: str, config: dict[str, float], backward: bool
    ) -> ForwardBackwardResult:
        """Loss and log-probabilities of `data`; with `backward` the gradient is added to the run's buffer."""

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """One AdamW update with the accumulated gradient, which is cleared; returns metrics."""

    async def save_state(self, model_id: str, folder: Path) -> None:
        """Write weights and optimizer state into an existing empty folder; resumable by `load_state`."""

    async def load_state(self, model_id: str, folder: Path, optimizer: bool) -> None:
        """Replace the run's weights by the folder's; without `optimizer` the moments start anew."""

    async def park(self, model_id: str, folder: Path) -> None:
        """Write all of a run, its gradient too, into an existing empty folder, and free what it held. Adapters only."""

    async def unpark(self, model_id: str, spec: ModelSpec, folder: Path) -> None:
        """Bring a parked run back as it was, bit for bit. The folder is not needed afterwards."""

    async def export_weights(self, model_id: str, folder: Path) -> None:
        """Write the weights alone into `folder`, in PEFT layout, or Hugging Face layout for full fine-tuning."""

    async def export_sampler(self, model_id: str, folder: Path) -> None:
        """Write what `export_weights` writes and the probe into `folder`.

        The probe is the trainer's log-probabilities of fixed tokens, against which `load_version` checks.
        """

    async def load_version(self, version: int, base_model: str, folder: Path) -> None:
        """Make an exported folder sampleable as `version` (> 0, never used before); raises SyncError if it differs."""

    async def retire_version(self, version: int) -> None: ...

    async def sample(
        self, base_model: str, version: int, request: SampleRequest, seen: Callable[[Drawn], None] | None = None
    ) -> SampleResult:
        """`seen` is told of tokens as they are drawn, on the event loop; the result holds all of them again."""

    def worker_logs(self) -> str:
        """Where the logs of its processes lie, for whoever runs the server."""

    async def check(self) -> None:
        """Raise EngineError naming the process that does not answer."""
