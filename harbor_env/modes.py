"""The four modes: rollout, ppo, ppo-kl and grpo, from episodes to result files.

Owns what each mode does with episodes and writes. Starts neither the server nor ROCK.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harbor_env import files
from harbor_env.episode import Episode
from harbor_env.errors import SettingError
from harbor_env.learner import Learner
from harbor_env.training import Example, examples, group_advantages, is_nothing

log = logging.getLogger(__name__)
# (name, sampling client, folder for the trial's tree) -> the episode
Play = Callable[[str, Any, Path], Awaitable[Episode]]


@dataclass(frozen=True)
class Options:
    """The flags of a run, with the quick start's names."""

    max_train_transitions: int | None = None
    kl_beta: float = 0.0
    num_steps: int = 1
    group_size: int = 2
    rollout_concurrency: int = 1
    save_state: str | None = None
    reward_baseline: float = 0.0
    divide_by_deviation: bool = False

    def __post_init__(self):
        for name in ("num_steps", "rollout_concurrency", "max_train_transitions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.group_size < 2:
            raise SettingError(f"--group-size is {self.group_size}; a group of fewer than 2 has nothing to compare")
        if self.kl_beta < 0:
            raise SettingError(f"--kl-beta is {self.kl_beta}; it must be 0 or more")


@dataclass
class Outcome:
    """What the exit status says: whether all was done, and which steps were skipped and why."""

    complete: bool
    skipped: list[str]


async def run_rollout(play: Play, sampler: Any, folder: Path) -> Outcome:
    """One episode; summary.json and trajectory.txt."""
    episode = await play("rollout", sampler, folder)
    log.info("Rollout done: %s", _said(episode))
    files.write_json(folder / "summary.json", files.summary(episode))
    (folder / "trajectory.txt").write_text(files.trajectory_text(episode))
    return Outcome(episode.is_done, [])


async def run_ppo(play: Play, learner: Learner, folder: Path, options: Options, context: dict[str, Any]) -> Outcome:
    """One episode and one step on it. The advantage of its tokens is its reward less the baseline."""
    episode = await play("rollout", await learner.sampler(), folder)
    log.info("Rollout done: %s", _said(episode))
    (folder / "trajectory.txt").write_text(files.trajectory_text(episode))
    result = {**context, **files.summary(episode), "turns": files.turns(episode), "advantage": None, "kl_reference": None,
              "transitions_trained": 0, **_step_fields(None)}
    skipped = []
    if episode.is_done:
        result["advantage"] = episode.reward - options.reward_baseline
        rows = examples(episode.turns, result["advantage"], options.max_train_transitions)
        result["transitions_trained"] = sum(len(row.sequence.turns) for row in rows)
        step, result["kl_reference"] = await _train(learner, rows, options.kl_beta)
        skipped = [] if step else ["ppo: nothing to train on (every advantage is 0; see --reward-baseline)"]
        result |= _step_fields(step)
    else:
        skipped = [f"ppo: the episode has no valid reward ({episode.cause})"]
    for reason in skipped:
        log.warning("skipping train step: %s", reason)
    result["skipped"] = skipped
    files.write_json(folder / "result.json", result)
    await _save(learner, folder, options)
    return Outcome(episode.is_done, skipped)


async def run_grpo(play: Play, learner: Learner, folder: Path, options: Options, context: dict[str, Any]) -> Outcome:
    """`num_steps` groups of episodes of one task; a group of equal rewards is skipped, an invalid episode is left out."""
    sampler, steps, skipped, scored = await learner.sampler(), [], [], 0
    result = {**context, "steps": steps, "skipped": skipped, "group_size": options.group_size}
    for number in range(options.num_steps):
        began = time.monotonic()
        group = await _group(play, sampler, folder / f"step_{number:03d}", options, number)
        scored += sum(episode.is_done for episode in group)
        step, fields = await _grpo_step(learner, group, options, number)
        if step:
            sampler = step[1]
        else:
            skipped.append(f"step {number}: {fields['skipped']}")
            log.warning("skipping step %d: %s", number, fields["skipped"])
        fields["time_seconds"] = round(time.monotonic() - began, 1)
        files.write_json(folder / f"step_{number:03d}" / "step_result.json", fields)
        _write_rollouts(folder / f"step_{number:03d}", group, fields)
        steps.append(fields)
        files.write_json(folder / "result.json", result)
    await _save(learner, folder, options)
    return Outcome(scored > 0, skipped)


async def _group(play: Play, sampler: Any, folder: Path, options: Options, number: int) -> list[Episode]:
    places = asyncio.Semaphore(options.rollout_concurrency)
    done = 0

    async def one(i: int) -> Episode:
        nonlocal done
        async with places:
            episode = await play(f"step-{number:03d}-rollout-{i:02d}", sampler, folder / f"rollout_{i:02d}")
        done += 1
        log.info("rollout %d of %d done: %s", done, options.group_size, _said(episode))
        return episode

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(one(i)) for i in range(options.group_size)]
    return [task.result() for task in started]


async def _grpo_step(learner: Learner, group: list[Episode], options: Options, number: int):
    """((step, sampler) or None, the fields of step_result.json)."""
    valid = [episode for episode in group if episode.is_done]
    returns = [episode.reward for episode in valid]
    advantages = group_advantages(returns, options.divide_by_deviation) if returns else []
    fields: dict[str, Any] = {
        "step": number, "rollouts_succeeded": len(valid),
        "rollouts_dropped": dict(Counter(episode.cause for episode in group if not episode.is_done)),
        "group_returns": returns, "group_advantages": advantages, "kl_reference": None, "skipped": None}
    if len(valid) < 2:
        fields["skipped"] = f"{len(valid)} of {len(group)} rollouts have a valid reward; two are needed"
    elif len(set(returns)) == 1:
        fields["skipped"] = f"all rewards are {returns[0]}, so there is nothing to train on"
    if fields["skipped"]:
        return None, fields | _step_fields(None)
    rows = [row for episode, advantage in zip(valid, advantages, strict=True)
            for row in examples(episode.turns, advantage, options.max_train_transitions)]
    step, fields["kl_reference"] = await _train(learner, rows, options.kl_beta)
    if step is None:
        fields["skipped"] = "nothing to train on: no turn of an episode with an advantage has sampled tokens"
    return step, fields | _step_fields(step)


async def _train(learner: Learner, rows: list[Example], beta: float):
    """((step, sampler) or None where nothing would change, the mean difference to the reference or None)."""
    kl = None
    if beta and rows:
        rows, kl = await learner.penalised(rows, beta)
    return (None if is_nothing(rows) else await learner.step(rows)), kl


def _step_fields(step) -> dict[str, Any]:
    if step is None:
        return {"fwdbwd_metrics": None, "optim_metrics": None, "train_elapsed": None, "published_sampling_client": None}
    return asdict(step[0])


def _write_rollouts(folder: Path, group: list[Episode], fields: dict[str, Any]) -> None:
    advantages = iter(fields["group_advantages"])
    for i, episode in enumerate(group):
        advantage = next(advantages) if episode.is_done else None
        files.write_json(folder / f"rollout_{i:02d}.json", files.rollout(episode, advantage))
        (folder / f"rollout_{i:02d}.txt").write_text(files.trajectory_text(episode))


async def _save(learner: Learner, folder: Path, options: Options) -> None:
    if options.save_state:
        files.write_json(folder / "checkpoint.json", await learner.save(options.save_state))


def _said(episode: Episode) -> str:
    scored = f"reward {episode.reward}" if episode.is_done else f"no valid reward ({episode.cause})"
    return f"{scored}, {len(episode.turns)} turns, {episode.seconds:.1f} s"
