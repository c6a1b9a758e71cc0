"""A training run on the server, as the recipes use it: one step, its metrics, and the weights it publishes.

Owns the calls of the Tinker SDK that train. Does not choose advantages: `harbor_env.training` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import tinker

from harbor_env.errors import SettingError
from harbor_env.training import Example, datum, logprob_gap, with_kl_penalty

log = logging.getLogger(__name__)
LARGEST_GAP = 1e-3


@dataclass
class Step:
    """What a step left, as it stands in result files."""

    fwdbwd_metrics: dict[str, float]
    optim_metrics: dict[str, float]
    train_elapsed: float
    published_sampling_client: str


class Learner:
    """`model` is trained with adapters of `rank`, or as a whole at rank 0."""

    def __init__(self, service: tinker.ServiceClient, model: str, rank: int, learning_rate: float, seed: int | None = None):
        if rank < 0:
            raise SettingError(f"--lora-rank is {rank}; it must be 0 (all weights) or a rank")
        if not learning_rate > 0:
            raise SettingError(f"--learning-rate is {learning_rate}; it must be more than 0")
        self._service, self._model, self._rate = service, model, learning_rate
        self._client = service.create_lora_training_client(base_model=model, rank=rank, seed=seed).result()
        self._published = 0

    async def sampler(self) -> tinker.SamplingClient:
        """A client of the weights as they are now."""
        return (await self._publish())[1]

    async def penalised(self, rows: Rows[Example], beta: float) -> tuple[list[Example], float]:
        """The examples with the KL penalty against the base model, and the mean log-probability difference (nats)."""
        base = await self._service.create_sampling_client(base_model=self._model)
        scores = [await base.compute_logprobs(tinker.ModelInput.from_ints(row.sequence.tokens)) for row in rows]
        return with_kl_penalty(rows, scores, beta)

    async def step(self, rows: Rows[Example]) -> tuple[Step, tinker.SamplingClient]:
        """One gradient and one update by the PPO loss; the weights are published to a sampler."""
        began = time.monotonic()
        passed = self._client.forward_backward([datum(row) for row in rows], "ppo")
        stepped = self._client.optim_step(tinker.AdamParams(learning_rate=self._rate))
        result = await passed
        trained = [output["logprobs"].to_numpy().tolist() for output in result.loss_fn_outputs]
        metrics = {**result.metrics, **logprob_gap(rows, trained),
                   "tokens_trained": float(sum(sum(row.sequence.sampled) for row in rows)), "sequences": float(len(rows))}
        log.info("forward_backward done: %s", metrics)
        if metrics.get("logprob_gap_max", 0.0) > LARGEST_GAP:
            log.warning("trainer and sampler differ by up to %.2g nats on sampled tokens; below %g is on-policy in float32",
                        metrics["logprob_gap_max"], LARGEST_GAP)
        optimised = dict((await stepped).metrics or {})
        log.info("optim_step done: %s", optimised)
        elapsed = time.monotonic() - began
        path, sampler = await self._publish()
        log.info("Weights published to sampler: %s", path)
        return Step(metrics, optimised, elapsed, path), sampler

    async def save(self, name: str) -> dict[str, Any]:
        """The whole state under `name`; what checkpoint.json says."""
        return {"name": name, "path": (await self._client.save_state(name)).path}

    async def _publish(self) -> tuple[str, tinker.SamplingClient]:
        path = (await self._client.save_weights_for_sampler(f"harbor-{self._published:04d}")).path
        self._published += 1
        return path, await self._service.create_sampling_client(model_path=path, base_model=self._model)
