"""One look at a server: what it holds and does, for one caller.

Owns who sees what of it. Reads the other tables and changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.futures import Future
from verl_tinker.core.runs import Run
from verl_tinker.core.versions import Version

if TYPE_CHECKING:
    from verl_tinker.core.service import Service

_ERRORS = 50
_RATE_SECONDS = 10


@dataclass(frozen=True)
class Waiting:
    """A pending operation; `state` tells what it waits for."""

    request_id: str
    kind: str
    model_id: str | None
    seconds: float
    state: str


class Overview:
    """Runs, versions, operations and errors of a caller's own; of the rest only numbers."""

    def __init__(self, service: Service):
        self._service = service
        self._started = time.time()

    def server(self) -> dict[str, Any]:
        health = self._service.health
        models = [asdict(model) for model in self._service.base_models()]
        return {"status": health.status, "phase": health.phase, "reason": health.reason, "up_s": time.time() - self._started,
                "models": [{k: m[k] for k in ("name", "max_context", "trainable", "sampleable")} for m in models],
                "weight_mismatches": self._service.sampling.mismatches}

    def load(self) -> dict[str, Any]:
        """Numbers of all callers together."""
        counts: dict[str, dict[str, int]] = {"waiting": {}, "running": {}}
        for future in self._service.futures.all_pending():
            kinds = counts["waiting" if future.began_at is None else "running"]
            kinds[future.kind] = kinds.get(future.kind, 0) + 1
        return counts | {"tokens_per_second": self._service.history.rates(_RATE_SECONDS),
                         "versions": len(self._service.versions.all())}

    def runs(self, caller: Caller) -> list[dict[str, Any]]:
        """The live runs, newest first."""
        pending: dict[str | None, list[Future]] = {}
        for future in self._service.futures.all_pending():
            pending.setdefault(future.model_id, []).append(future)
        own = [run for run in self._service.runs.all() if may_see(caller, run.session.owner)]
        return [self._run(run, pending.get(run.run_id, []))
                for run in sorted(own, key=lambda run: run.created, reverse=True)]

    def operations(self, caller: Caller, most: int = 100) -> list[Waiting]:
        """What is pending, the oldest first."""
        now = time.monotonic()
        own = (f for f in self._service.futures.all_pending() if may_see(caller, f.owner))
        return [Waiting(f.request_id, f.kind, f.model_id, now - f.accepted_at, f.state()) for f in islice(own, most)]

    def versions(self, caller: Caller) -> list[dict[str, Any]]:
        """Which weights can be sampled now, and by which samplers they are asked for."""
        return [self._version(version, caller) for version in self._service.versions.all() if self._sees(caller, version)]

    def errors(self, caller: Caller) -> list[dict[str, Any]]:
        """The newest first."""
        own = [failure for failure in self._service.history.errors if may_see(caller, failure.owner)]
        return [{k: v for k, v in asdict(failure).items() if k != "owner"} for failure in reversed(own)][:_ERRORS]

    def _run(self, run: Run, pending: list[Future]) -> dict[str, Any]:
        last = self._service.history.last(run.run_id)
        return {
            "run_id": run.run_id, "base_model": run.spec.base_model,
            "lora_rank": run.spec.lora.rank if run.spec.lora else None, "owner": run.session.owner,
            "name": run.session.facts.display_name, "created": run.created,
            "last_request": run.last_request, "place": "disk" if run.parked else "memory", "weights_version": run.version,
            "notes": run.notes, "user_metadata": run.user_metadata,
            "steps": last.step if last else 0, "last": last.values if last else {},
            "waiting": sum(f.began_at is None for f in pending),
            "running": next((f.kind for f in pending if f.began_at is not None), None)}

    def _version(self, version: Version, caller: Caller) -> dict[str, Any]:
        samplers = [s.sampler_id for s in self._service.samplers.standing_for(version) if may_see(caller, s.owner)]
        return {"number": version.number, "base_model": version.base_model, "of": version.made_by, "in_use": version.users,
                "loaded": version.is_loaded, "named": version.checkpoint_id is not None, "samplers": samplers}

    def _sees(self, caller: Caller, version: Version) -> bool:
        run = self._service.runs.find(version.group)
        if caller is None or run is not None:
            return caller is None or may_see(caller, run.session.owner)
        return any(may_see(caller, s.owner) for s in self._service.samplers.standing_for(version))
