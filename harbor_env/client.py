"""The client of a run: connects ROCK, the server and a mode, and writes below the run's results folder.

Owns the wiring. Is started by `run`, which keeps its output in client.log; a SettingError ends it with status 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from harbor_env.backend import Backend, backend, running_elsewhere
from harbor_env.episode import Episode, play
from harbor_env.errors import SettingError
from harbor_env.modes import Options, Outcome, run_grpo, run_ppo, run_rollout
from harbor_env.pull import Patience
from harbor_env.rock_sandbox import close_left_over, rock_sandbox
from harbor_env.settings import Settings, TaskFolder, load

log = logging.getLogger("harbor_env")
DEATH_GRACE_SECONDS, CLOSE_SECONDS = 60, 10
MODES = ("rollout", "ppo", "ppo-kl", "grpo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--task-root", help="the $TASK folder; by default the variable TASK")
    parser.add_argument("--task-id", help="must be the configured one")
    parser.add_argument("--base-url", help="a running server; without it one is started and ended with the run")
    parser.add_argument("--max-tokens", type=int, help="output tokens of one answer; must agree with the agent's two limits")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--lora-rank", type=int, default=32, help="0 trains all weights")
    parser.add_argument("--max-train-transitions", type=int, help="train on the first N turns of an episode only")
    parser.add_argument("--kl-beta", type=float, help="weight of the KL penalty against the base model; ppo-kl: 0.05")
    parser.add_argument("--num-steps", type=int, default=1)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--rollout-concurrency", type=int, default=1)
    parser.add_argument("--reward-baseline", type=float, default=0.0, help="ppo: what is taken from the reward")
    parser.add_argument("--divide-by-deviation", action="store_true", help="grpo: advantages over the group's deviation")
    parser.add_argument("--save-state", metavar="NAME", help="save the training state under this name at the end")
    parser.add_argument("--scripted", type=Path, metavar="FILE",
                        help="answers from this file instead of the model's; training on them is off-policy")
    parser.add_argument("--seed", type=int, help="makes adapters and draws repeatable")


def checked(options: argparse.Namespace) -> tuple[Settings, Options]:
    """Everything that can be refused before anything is started."""
    if options.scripted and not options.scripted.is_file():
        raise SettingError(f"--scripted is {options.scripted}, which is no file")
    settings = load(TaskFolder.found(options.task_root), max_tokens=options.max_tokens, task_id=options.task_id)
    training = options.mode != "rollout"
    if training and settings.runtime.rollout_only:
        raise SettingError("this folder was configured with --rollout-only; configure a new one without it for training")
    temperature = settings.runtime.client.temperature
    if training and temperature != 1.0:
        raise SettingError(f"client.temperature is {temperature}; training compares log-probabilities with the "
                           "sampler's, which are those of the model at temperature 1.0 only")
    beta = options.kl_beta if options.kl_beta is not None else (0.05 if options.mode == "ppo-kl" else 0.0)
    return settings, Options(options.max_train_transitions, beta, options.num_steps, options.group_size,
                             options.rollout_concurrency, options.save_state, options.reward_baseline,
                             options.divide_by_deviation)


async def run(options: argparse.Namespace, results: Path, job: str) -> Outcome:
    """The whole of a run; its result files lie below `results`."""
    settings, mode = checked(options)
    print(f"Results dir: {results}", flush=True)
    results.mkdir(parents=True)
    for name in await close_left_over(settings.harbor.environment, settings.folder.notes):
        log.info("closed sandbox %s, which a killed run had left", name)
    async with AsyncExitStack() as stack:
        if options.base_url:
            server = running_elsewhere(options.base_url)
        else:
            server = await stack.enter_async_context(backend(settings.folder, settings.runtime.backend, job))
        return await _while_it_lives(server, asyncio.create_task(_with_server(server, options, settings, mode, results)))


async def _while_it_lives(server: Backend, work: asyncio.Task) -> Outcome:
    """The SDK asks a dead server for minutes. An episode ends by itself with its cause; anything else is ended here."""
    try:
        await asyncio.wait({work, server.died}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait({work}, timeout=DEATH_GRACE_SECONDS)
        if not work.done():
            raise SettingError(server.died.result())
        return work.result()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _with_server(server: Backend, options: argparse.Namespace, settings: Settings, mode: Options,
                       results: Path) -> Outcome:
    import tinker

    service = tinker.ServiceClient(base_url=server.url, api_key=os.environ.get("TINKER_API_KEY", "tml-local"))
    try:
        return await _with_service(service, server, options, settings, mode, results)
    finally:
        # The end of its session frees the workers at once; all weights can be trained by one run at a time only.
        with suppress(Exception):
            await asyncio.wait_for(service.close("success"), CLOSE_SECONDS)


async def _with_service(service, server: Backend, options: argparse.Namespace, settings: Settings, mode: Options,
                        results: Path) -> Outcome:
    from harbor_env.learner import Learner

    model = settings.runtime.client.model
    episodes = _player(server, settings, options)
    context = {"mode": options.mode, "task_id": settings.harbor.task.id, "model": model,
               "learning_rate": options.learning_rate, "lora_rank": options.lora_rank, "kl_beta": mode.kl_beta}
    if options.mode == "rollout":
        return await run_rollout(episodes, await service.create_sampling_client(base_model=model), results)
    learner = await asyncio.to_thread(Learner, service, model, options.lora_rank, options.learning_rate, options.seed)
    run_mode = run_grpo if options.mode == "grpo" else run_ppo
    return await run_mode(episodes, learner, results, mode, context)


def _player(server: Backend, settings: Settings, options: argparse.Namespace):
    """How a mode has the task played once."""
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    from harbor_env.policy import Policy, TinkerSampler
    from harbor_env.scripted import Script

    client, seed = settings.runtime.client, options.seed
    renderer = get_renderer(client.renderer, get_tokenizer(client.tokenizer))
    script = Script(options.scripted, renderer) if options.scripted else None
    played = 0

    async def one(name: str, sampling_client: Any, folder: Path) -> Episode:
        nonlocal played
        first = None if seed is None else seed + 10_000 * played
        played += 1
        sampler = (script.sampler(sampling_client) if script else
                   TinkerSampler(sampling_client, client.temperature, first, server.died))
        policy = Policy(sampler, renderer, settings.budget, name, client.turn_seconds)
        sandbox = rock_sandbox(settings.harbor.environment, settings.folder.notes)
        patience = Patience(silence=client.silence_seconds)
        return await play(name, settings.harbor, policy, sandbox, folder / "harbor", patience)

    return one


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harbor_env.client")
    add_arguments(parser)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--job", required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # The SDK logs every failed call with its traceback, also those that it expects; ours say what went wrong.
    logging.getLogger().handlers[0].addFilter(lambda record: not record.pathname.endswith("rock/utils/http.py"))
    try:
        outcome = asyncio.run(_interruptible(run(options, options.results, options.job)))
    except SettingError as error:
        log.error("%s", error)
        return 2
    except asyncio.CancelledError:
        log.error("interrupted")
        return 130
    left = {"complete": outcome.complete, "skipped": outcome.skipped}
    (options.results.parent.parent / "outcome.json").write_text(json.dumps(left))
    return 0 if outcome.complete else 1


async def _interruptible(work) -> Outcome:
    """Ctrl-C and SIGTERM end the run in order: sandboxes are closed, and the server is ended."""
    task = asyncio.create_task(work)
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, task.cancel)
    return await task


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
