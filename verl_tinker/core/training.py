"""Training commands: what each does to the engine, the runs, and the disk, in the order of the queue.

Owns the life of a training run. Does not order commands: `verl_tinker.core.queue` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.checkpoints import KINDS, Checkpoint, RunRecord, parse_path
from verl_tinker.core.errors import TinkerError, UserError
from verl_tinker.core.futures import Future, FutureStore
from verl_tinker.core.journal import Journal
from verl_tinker.core.parking import Parking
from verl_tinker.core.queue import Action, Chunk, CommandQueue
from verl_tinker.core.records import RecordRing
from verl_tinker.core.runs import Run, RunTable
from verl_tinker.core.sessions import Session, SessionTable
from verl_tinker.core.steps import Steps
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import AdamParams, Datum, ForwardBackwardResult, ModelSpec
from verl_tinker.core.validate import check_adam, check_same_shape, check_spec, find_model
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
        journal: Journal,
        records: RecordRing,
        parking: Parking,
    ):
        self._engine = engine
        self._futures = futures
        self._queue = queue
        self._sessions = sessions
        self._runs = runs
        self._checkpoints = checkpoints
        self._versions = versions
        self._journal = journal
        self._steps = Steps(engine, records)
        self._parking = parking

    # Runs

    def create_model(
        self,
        caller: Caller,
        session_id: str,
        model_seq_id: int,
        spec: ModelSpec,
        optimizer: str,
        user_metadata: dict[str, str],
    ) -> Future:
        async def create(session: Session, run_id: str) -> dict:
            await self._create(session, run_id, spec, optimizer, user_metadata)
            return {"model_id": run_id}

        return self._begin(caller, session_id, model_seq_id, "create_model", create)

    def create_from_state(
        self,
        caller: Caller,
        session_id: str,
        model_seq_id: int,
        path: str,
        with_optimizer: bool,
        base_model: str | None,
        optimizer: str,
        user_metadata: dict[str, str],
        reader: Caller,
    ) -> Future:
        """`reader`: whose checkpoints may be loaded, the caller's or those of a key that it has been given."""

        async def resume(session: Session, run_id: str) -> dict:
            checkpoint = self._training_checkpoint(path, reader)
            if base_model not in (None, checkpoint.spec.base_model):
                raise UserError(
                    f"base_model {base_model!r} does not fit {path}, saved from {checkpoint.spec.base_model!r}"
                )
            folder = self._checkpoints.intact(checkpoint)
            run = await self._create(session, run_id, checkpoint.spec, optimizer, user_metadata)
            try:
                await self._engine.load_state(run_id, folder, with_optimizer)
            except BaseException:
                await self._drop(run, f"{path} could not be loaded into it")
                raise
            return {"model_id": run_id, "path": path}

        return self._begin(caller, session_id, model_seq_id, "load_weights", resume)

    def _begin(
        self,
        caller: Caller,
        session_id: str,
        model_seq_id: int,
        kind: str,
        action: Callable[[Session, str], Awaitable[dict]],
    ) -> Future:
        """Accept the command that makes a model: number 0 of the model's log."""
        run_id = f"{session_id}:train:{model_seq_id}"
        try:
            session = self._sessions.get(session_id, caller)
            known = self._queue.find(run_id, 0) or self._recalled(run_id, 0)
            if known:
                return known
            self._sessions.open(session_id, caller)
        except TinkerError as error:
            return self.refused(kind, run_id, error, caller)

        async def begin() -> dict:
            return await action(session, run_id)

        return self._queue.submit(run_id, 0, kind, begin, session.owner)

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
            facts = session.facts
            self._checkpoints.record_run(RunRecord(
                run_id, info.spec, now, user_metadata, session.owner, facts.project_id, info.parameter_bytes))
            self._runs.add(run)
        except BaseException:
            await self._engine.drop_model(run_id)
            raise
        return run

    async def _make_way(self, spec: ModelSpec) -> None:
        for run in self._runs.to_make_way(spec):
            # Accepted commands of the leaving run still end with their own results.
            await self._queue.drain(run.run_id)
            await self._drop(run, self._runs.why_over(run))
        await self._parking.make_room()

    def release(self, run: Run) -> None:
        """Drop a run whose session is over, once what it has submitted has ended."""

        async def drop() -> None:
            if self._runs.find(run.run_id) is run:
                await self._drop(run, self._runs.why_over(run))

        if not run.is_leaving:
            run.is_leaving = True
            self._queue.submit(run.run_id, None, "drop", drop, run.session.owner)

    def park(self, run: Run) -> None:
        """Have an idle run parked, once what it has submitted has ended."""

        async def park() -> None:
            if self._runs.find(run.run_id) is run:
                await self._parking.park_if_idle(run)

        if self._parking.is_idle(run):
            self._queue.submit(run.run_id, None, "park", park, run.session.owner)

    async def _drop(self, run: Run, reason: str) -> None:
        log.info("dropping %s: %s", run.run_id, reason)
        self._runs.remove(run, reason)
        await self._versions.evict_group(run.run_id, f"the training run {run.run_id} was dropped: {reason}")
        if run.parked is None:
            await self._engine.drop_model(run.run_id)
        await self._parking.forget(run)

    def _training_checkpoint(self, path: str, reader: Caller) -> Checkpoint:
        parsed = parse_path(path)
        if parsed.kind != "weights":
            raise UserError(
                f"path: {path} is a {KINDS[parsed.kind]} checkpoint, which cannot be trained on; load a path that "
                "save_state returned"
            )
        return self._checkpoints.get(parsed, reader)

    # Steps

    def forward_backward(
        self,
        caller: Caller,
        model_id: str,
        seq: int | None,
        data: list[Datum],
        loss_fn: str,
        config: dict[str, float | str],
        backward: bool,
    ) -> Future:
        async def run_together(batches: list[list[Datum]]) -> list[ForwardBackwardResult | TinkerError]:
            run = await self._parking.loaded(self._runs.get(model_id))
            return await self._steps.run(run, batches, loss_fn, config, backward)

        key = (loss_fn, tuple(sorted(config.items())), backward)
        tokens = sum(len(datum.tokens) for datum in data)
        return self.submit(caller, model_id, seq, step_kind(backward), Chunk(key, data, run_together, tokens))

    def optim_step(self, caller: Caller, model_id: str, seq: int | None, adam: AdamParams) -> Future:
        async def step(run: Run) -> dict:
            check_adam(adam)
            if not run.has_gradient:
                raise UserError(
                    "optim_step has no gradient to apply: no forward_backward of this run succeeded since its last "
                    "optim_step or load; call forward_backward first, and look at the error it returned"
                )
            metrics = await self._engine.optim_step(model_id, adam)
            run.has_gradient = False
            run.version += 1
            return {"metrics": {**metrics, "weights_version": float(run.version)}}

        return self.submit(caller, model_id, seq, "optim_step", self.on_run(model_id, step))

    def load_weights(
        self, caller: Caller, model_id: str, seq: int | None, path: str, with_optimizer: bool, reader: Caller
    ) -> Future:
        async def load(run: Run) -> dict:
            checkpoint = self._training_checkpoint(path, reader)
            check_same_shape(run.spec, checkpoint.spec, path)
            await self._engine.load_state(model_id, self._checkpoints.intact(checkpoint), with_optimizer)
            run.has_gradient = False
            run.version += 1
            return {"model_id": model_id, "path": path}

        return self.submit(caller, model_id, seq, "load_weights", self.on_run(model_id, load))

    # The way of every command

    def submit(self, caller: Caller, model_id: str, seq: int | None, kind: str, work: Action | Chunk) -> Future:
        """Put a command of a run into the queue; a dropped, unknown or finished run fails the future."""
        run = self._runs.find(model_id)
        owner = run.session.owner if run else self._journal.run_owner(model_id)
        if owner is not None and not may_see(caller, owner):
            return self.refused(kind, model_id, self._runs.unknown(model_id), caller)
        if not self._queue.knows(model_id):
            recalled = self._recalled(model_id, seq)
            return recalled or self.refused(kind, model_id, self._runs.absent(model_id), caller)
        if run:
            if run.session.finished:
                work = _refusing(UserError(
                    f"the session of {model_id} is finished ({run.session.finished}); create a new ServiceClient"))
            run.session.touch()
            run.last_request = time.time()
        return self._queue.submit(model_id, seq, kind, work, owner or "")

    def on_run(self, model_id: str, action: Callable[[Run], Awaitable[object]]) -> Action:
        """The action on the run as it is when its turn comes, back from disk if it was parked."""

        async def act() -> object:
            return await action(await self._parking.loaded(self._runs.get(model_id)))

        return act

    def reject(self, caller: Caller, model_id: str, seq: int | None, kind: str, error: TinkerError) -> Future:
        """Take the place of a command whose content cannot be read, so that a retry finds the same answer."""
        is_chunk = kind in (step_kind(True), step_kind(False))
        work = Chunk(("unreadable", kind), error, _each_to_its_own) if is_chunk else _refusing(error)
        return self.submit(caller, model_id, seq, kind, work)

    def _recalled(self, run_id: str, seq: int | None) -> Future | None:
        """The future of a command that an earlier server accepted."""
        record = self._journal.command(run_id, seq) if seq is not None else None
        return self._queue.recall(record, self._runs.absent(run_id)) if record else None

    def recall(self, request_id: str, caller: Caller) -> Future | None:
        """The future of an earlier server's request id, from the journal."""
        record = self._journal.command_of_request(request_id)
        if record is None or not may_see(caller, record.owner):
            return None
        return self._queue.recall(record, self._runs.absent(record.run_id))

    def refused(self, kind: str, model_id: str, error: TinkerError, caller: Caller) -> Future:
        future = self._futures.create(kind, model_id, caller or "")
        future.fail(error)
        return future


def step_kind(backward: bool) -> str:
    return "forward_backward" if backward else "forward"


def _refusing(error: TinkerError) -> Action:
    async def refuse() -> None:
        raise error

    return refuse


async def _each_to_its_own(errors: list[TinkerError]) -> list[TinkerError]:
    return errors
