"""One episode: a sandbox, the model service and Harbor's job in it, the policy that answers, and what came of it.

Owns the order of these and their end. Whatever goes wrong, the sandbox is closed and the episode says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from harbor_env.errors import EpisodeError, JobFailed, ModelServiceFailed
from harbor_env.job import HarborJob
from harbor_env.model_service import ModelService
from harbor_env.pull import Patience, PullRunner
from harbor_env.record import Turn
from harbor_env.results import Trial, read_job
from harbor_env.sandbox import Sandbox, run
from harbor_env.settings import HarborSettings

log = logging.getLogger(__name__)


@dataclass
class Episode:
    """What came of it. `reward` is None where there is none that counts; `cause` and `error` then say why."""

    name: str
    task_id: str
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    cause: str | None = None
    error: str | None = None
    seconds: float = 0.0
    trial: Trial | None = None

    @property
    def is_done(self) -> bool:
        """Played to its end and validly scored."""
        return self.reward is not None


class Answering:
    """What an episode needs of a policy: answers, and the turns so far."""

    turns: list[Turn]
    answer: Callable[[int, dict], Awaitable[dict]]


async def play(name: str, settings: HarborSettings, policy: Answering, sandbox: AbstractAsyncContextManager[Sandbox],
               results: Path, patience: Patience = Patience()) -> Episode:
    """Play the task once. Never raises an EpisodeError: the episode holds it."""
    episode, began = Episode(name, settings.task.id, policy.turns), time.monotonic()
    try:
        async with sandbox as running:
            await _play_in(running, episode, settings, policy, results, patience)
    except EpisodeError as error:
        episode.reward, episode.cause, episode.error = None, error.cause, str(error)
        log.warning("%s ended without a score: %s: %s", name, error.cause, error)
    episode.seconds = time.monotonic() - began
    return episode


async def _play_in(sandbox: Sandbox, episode: Episode, settings: HarborSettings, policy: Answering, results: Path,
                   patience: Patience) -> None:
    job = HarborJob(sandbox, settings, episode.name)
    await job.prepare()
    place = settings.model_service
    folder = f"{settings.job.work_dir}/{episode.name}/model-service"
    service = ModelService(sandbox, port=place.port, host=place.bind_host, folder=folder, command=place.rock,
                           python=place.python)
    await service.start()
    try:
        await job.start(f"http://{await _address(sandbox, place.bind_host)}:{place.port}/v1")
        await _answer_until_done(job, PullRunner(service, policy.answer, patience))
    except EpisodeError:
        await _keep_what_there_is(job, results)
        raise
    finally:
        await _quietly(service.stop())
    trials = read_job(await job.collect(results))
    if len(trials) != 1:
        raise JobFailed(f"the job has {len(trials)} trials; one was asked for")
    episode.trial = trials[0]
    episode.reward = trials[0].checked_reward()


async def _answer_until_done(job: HarborJob, runner: PullRunner) -> None:
    """The runner ends with the job, the job with the runner's error. The service's own end ends neither."""
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await job.wait()
        finally:
            ended.set()

    waiting, running = asyncio.create_task(wait()), asyncio.create_task(runner.run(ended))
    try:
        await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (running, waiting):
            if task.done() and not task.cancelled() and task.exception():
                raise task.exception()
    finally:
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(waiting, running, return_exceptions=True)
        if not ended.is_set() or waiting.cancelled():
            await _quietly(job.kill())


async def _address(sandbox: Sandbox, bind_host: str) -> str:
    """Where a task's container finds the sandbox: its first address, which is that of its Docker bridge."""
    if bind_host != "0.0.0.0":
        return bind_host
    words = (await run(sandbox, ["hostname", "-I"], ModelServiceFailed)).split()
    if not words:
        raise ModelServiceFailed("the sandbox has no address")
    return words[0]


async def _keep_what_there_is(job: HarborJob, results: Path) -> None:
    """The logs of an episode that failed are wanted most."""
    await _quietly(job.kill())
    await _quietly(job.collect(results))


async def _quietly(call: Awaitable) -> None:
    try:
        await asyncio.wait_for(call, 60)
    except (EpisodeError, TimeoutError, OSError) as error:
        log.info("left aside: %s", error)
