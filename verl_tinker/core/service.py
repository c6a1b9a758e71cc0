"""The server without HTTP: its parts put together, and its phase from starting to stopped.

Owns the phase. Does not end the process or the engine: `verl_tinker.start` does.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_tinker.core.catalog import Catalog
from verl_tinker.core.errors import EngineError
from verl_tinker.core.futures import FutureStore
from verl_tinker.core.queue import CommandQueue
from verl_tinker.core.samplers import SamplerTable
from verl_tinker.core.sampling import Sampling
from verl_tinker.core.saving import Saving
from verl_tinker.core.runs import RunTable
from verl_tinker.core.sessions import SessionTable
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.training import Training
from verl_tinker.core.types import BaseModelInfo
from verl_tinker.core.versions import VersionTable
from verl_tinker.engine.base import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Health:
    """`phase` names the step of a start; `reason` tells why a server failed."""

    status: Literal["starting", "ok", "failed"]
    phase: str = ""
    reason: str = ""


class Service:
    """All state above the engine. Lives on one event loop; only `set_phase` may be called from other threads."""

    def __init__(
        self,
        engine: Engine,
        checkpoint_dir: Path,
        *,
        max_runs: int = 1,
        session_timeout_s: float = 900.0,
        max_loaded_versions: int = 8,
        max_concurrent_samples: int = 64,
        futures: FutureStore | None = None,
    ):
        """`max_loaded_versions` is for each live run, and once more for the checkpoints of all other runs."""
        self.engine = engine
        self.health = Health("starting", phase="created")
        self.futures = futures or FutureStore()
        self.sessions = SessionTable(session_timeout_s)
        self.runs = RunTable(self.sessions, max_runs)
        self._checkpoints = CheckpointStore(checkpoint_dir)
        self._queue = CommandQueue(self.futures)
        versions = VersionTable(engine, max_loaded_versions)
        self.samplers = SamplerTable(versions, self._checkpoints, lambda run_id: self.runs.find(run_id) is not None)
        self.training = Training(
            engine, self.futures, self._queue, self.sessions, self.runs, self._checkpoints, versions
        )
        self.saving = Saving(engine, self.training, self._checkpoints, versions, self.samplers)
        self.sampling = Sampling(
            engine, self.futures, self.sessions, self.samplers, versions, max_concurrent_samples
        )
        self.catalog = Catalog(self.runs, self._checkpoints, versions)

    def base_models(self) -> list[BaseModelInfo]:
        return self.engine.base_models()

    def warning(self) -> str | None:
        """What a new client should know about settings that cannot be honoured."""
        tied = [model.name for model in self.base_models() if model.trainable and model.tied_embeddings]
        if not tied:
            return None
        return (
            f"train_unembed is not applied on {', '.join(tied)}: the output layer shares its weights with the input "
            "embedding. get_info and weights_info report the settings in force"
        )

    def set_phase(self, phase: str) -> None:
        if self.health.status == "starting":
            self.health = Health("starting", phase=phase)

    def ready(self) -> None:
        self.health = Health("ok", phase="ready")

    def failed(self, reason: str) -> None:
        """Refuse new work for good, and end every pending future with the reason. The first reason stands."""
        if self.health.status != "failed":
            log.error("the server failed: %s", reason)
            self.health = Health("failed", reason=reason)
            self.futures.fail_pending(EngineError(reason))

    async def start(self) -> None:
        """Start the engine, reporting its phases; a failure is kept as the reason and raised."""
        try:
            await self.engine.start(self.set_phase)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.failed(f"the engine did not start: {error}")
            raise
        self.ready()

    async def close(self) -> None:
        """End pending futures, so that long polls return, then stop what runs. Safe to call twice."""
        if self.health.status != "failed":
            self.health = Health("failed", reason="the server is stopping")
        self.futures.fail_pending(EngineError("the server is stopping; this operation did not end"))
        await self.sampling.close()
        await self._queue.close()
        self._checkpoints.close()
