"""Training commands: what each does to the engine, the runs, and the disk, in the order of the queue.

Owns the life of a training run. Does not order commands: `verl_tinker.core.queue` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from verl_tinker.core.checkpoints import Checkpoint, RunRecord, parse_path
from verl_tinker.core.errors import EngineError, TinkerError, UserError
from verl_tinker.core.futures import Future, FutureStore
from verl_tinker.core.queue import CommandQueue
from verl_tinker.core.runs import Run, RunTable
from verl_tinker.core.sessions import Session, SessionTable
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import AdamParams, Datum, ForwardBackwardResult, ModelSpec
from verl_tinker.core.validate import check_adam, check_batch, check_same_shape, check_spec, find_model
from verl_tinker.core.versions import VersionTable
from verl_tinker.engine.base import Engine

log = logging.getLogger(__name__)


class Training:
    """Accepts every training command and answers with its future; content is judged when the command runs.

    Refusing at submission would deadlock the SDK, which never recovers from a refused chunk.
    """

    def __init__(
        self,
        engine: Engine,
        futures: FutureStore,
        queue: CommandQueue,
        sessions: SessionTable,
        runs: RunTable,
        checkpoints: CheckpointStore,
        versions: VersionTable,
    ):
        self._engine = engine
        self._futures = futures
        self._queue = queue
        self._sessions = sessions
        self._runs = runs
        self._checkpoints = checkpoints
        self._versions = versions

    # Runs

    def create_model(
        self, session_id: str, model_seq_id: int, spec: ModelSpec, optimizer: str, user_metadata: dict[str, str]
    ) -> Future:
        async def create(session: Session, run_id: str) -> dict:
            await self._create(session, run_id, spec, optimizer, user_metadata)
            return {"model_id": run_id}

        return self._begin(session_id, model_seq_id, "create_model", create)

    def create_from_state(
        self,
        session_id: str,
        model_seq_id: int,
        path: str,
        with_optimizer: bool,
        base_model: str | None,
        optimizer: str,
        user_metadata: dict[str, str],
    ) -> Future:
        async def resume(session: Session, run_id: str) -> dict:
            checkpoint = self._training_checkpoint(path)
            if base_model not in (None, checkpoint.spec.base_model):
                raise UserError(
                    f"base_model {base_model!r} does not fit {path}, saved from {checkpoint.spec.base_model!r}"
                )
            run = await self._create(session, run_id, checkpoint.spec, optimizer, user_metadata)
            try:
                await self._engine.load_state(run_id, self._checkpoints.folder(checkpoint.path), with_optimizer)
            except BaseException:
                await self._drop(run, f"{path} could not be loaded into it")
                raise
            return {"model_id": run_id, "path": path}

        return self._begin(session_id, model_seq_id, "load_weights", resume)

    def _begin(
        self,
        session_id: str,
        model_seq_id: int,
        kind: str,
        action: Callable[[Session, str], Awaitable[dict]],
    ) -> Future:
        """Accept the command that makes a model: number 0 of the model's log."""
        run_id = f"{session_id}:train:{model_seq_id}"
        known = self._queue.find(run_id, 0)
        if known:
            return known
        try:
            session = self._sessions.open(session_id)
        except TinkerError as error:
            return self._refused(kind, run_id, error)

        async def begin() -> dict:
            return await action(session, run_id)

        return self._queue.submit(run_id, 0, kind, begin)

    async def _create(
        self, session: Session, run_id: str, spec: ModelSpec, optimizer: str, user_metadata: dict[str, str]
    ) -> Run:
        model = find_model(self._engine.base_models(), spec.base_model)
        spec = check_spec(spec, model, optimizer)
        await self._make_way(spec)
        info = await self._engine.create_model(run_id, spec)
        now = time.time()
        run = Run(run_id, session, info.spec, list(info.notes), user_metadata, created=now, last_request=now)
        try:
            self._checkpoints.record_run(RunRecord(run_id, info.spec, now, user_metadata))
        except BaseException:
            await self._engine.drop_model(run_id)
            raise
        self._runs.add(run)
        return run

    async def _make_way(self, spec: ModelSpec) -> None:
        for run in self._runs.to_make_way(spec):
            # Accepted commands of the leaving run still end with their own results.
            await self._queue.drain(run.run_id)
            await self._drop(run, self._runs.why_over(run))

    async def _drop(self, run: Run, reason: str) -> None:
        log.info("dropping %s: %s", run.run_id, reason)
        self._runs.remove(run, reason)
        await self._versions.evict_group(run.run_id, f"the training run {run.run_id} was dropped: {reason}")
        await self._engine.drop_model(run.run_id)

    def _training_checkpoint(self, path: str) -> Checkpoint:
        parsed = parse_path(path)
        if parsed.kind != "weights":
            raise UserError(
                f"path: {path} holds sampling weights, which cannot be trained on; load a path that save_state returned"
            )
        return self._checkpoints.get(parsed)

    # Steps

    def forward_backward(
        self,
        model_id: str,
        seq: int | None,
        data: list[Datum],
        loss_fn: str,
        config: dict[str, float | str],
        backward: bool,
    ) -> Future:
        async def step(run: Run) -> ForwardBackwardResult:
            model = find_model(self._engine.base_models(), run.spec.base_model)
            checked, settings = check_batch(data, loss_fn, config, model)
            try:
                result = await self._engine.forward_backward(model_id, checked, loss_fn, settings, backward)
            except EngineError as error:
                raise EngineError(f"{error} (this command added no gradient)") from error
            run.has_gradient = run.has_gradient or backward
            return result

        return self.submit(model_id, seq, "forward_backward" if backward else "forward", step)

    def optim_step(self, model_id: str, seq: int | None, adam: AdamParams) -> Future:
        async def step(run: Run) -> dict:
            check_adam(adam)
            if not run.has_gradient:
                raise UserError(
                    "optim_step has no gradient to apply: no forward_backward of this run succeeded since its last "
                    "optim_step or load; call forward_backward first, and look at the error it returned"
                )
            metrics = await self._engine.optim_step(model_id, adam)
            run.has_gradient = False
            return {"metrics": metrics}

        return self.submit(model_id, seq, "optim_step", step)

    def load_weights(self, model_id: str, seq: int | None, path: str, with_optimizer: bool) -> Future:
        async def load(run: Run) -> dict:
            checkpoint = self._training_checkpoint(path)
            check_same_shape(run.spec, checkpoint.spec, path)
            await self._engine.load_state(model_id, self._checkpoints.folder(checkpoint.path), with_optimizer)
            run.has_gradient = False
            return {"model_id": model_id, "path": path}

        return self.submit(model_id, seq, "load_weights", load)

    # The way of every command

    def submit(
        self, model_id: str, seq: int | None, kind: str, action: Callable[[Run], Awaitable[object]]
    ) -> Future:
        """Put a command of a run into the queue; a dropped, unknown or finished run fails the future."""
        if not self._queue.knows(model_id):
            return self._refused(kind, model_id, self._runs.absent(model_id))
        run = self._runs.find(model_id)
        finished = run.session.finished if run else None
        if run:
            run.session.touch()
            run.last_request = time.time()

        async def command() -> object:
            if finished:
                raise UserError(f"the session of {model_id} is finished ({finished}); create a new ServiceClient")
            return await action(self._runs.get(model_id))

        return self._queue.submit(model_id, seq, kind, command)

    def reject(self, model_id: str, seq: int | None, kind: str, error: TinkerError) -> Future:
        """Take the place of a command whose content cannot be read, so that a retry finds the same answer."""

        async def fail(run: Run) -> None:
            raise error

        return self.submit(model_id, seq, kind, fail)

    def _refused(self, kind: str, model_id: str, error: TinkerError) -> Future:
        future = self._futures.create(kind, model_id)
        future.fail(error)
        return future
