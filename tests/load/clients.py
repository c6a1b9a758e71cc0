"""Client processes that load a server with the tests' engine, and judge each answer by what that engine must give.

Owns the traffic and its bookkeeping. Does not decide what is enough: the tests do.

    python tests/load/clients.py samples URL --first N --count N
    python tests/load/clients.py training|heartbeats URL --until FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import tinker
from tinker import types

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

from data import sft  # noqa: E402
from fake_engine import BASE, OWN, drawn_tokens  # noqa: E402

os.environ.setdefault("TINKER_API_KEY", "tml-load")
TOKENS, SECONDS = 4, 300
# SDKs beat every ten seconds; this client does all the time.
BEAT_SECONDS = 0.02


def prompt_of(number: int) -> list[int]:
    """A prompt that only this number has, and whose first part gives it an answer of its own."""
    return [7, OWN + number % OWN, 1 + number // OWN]


def is_own(number: int, answer: types.SampleResponse) -> bool:
    """The tokens are those of the prompt's sum, and the scores those of each of its tokens."""
    prompt = prompt_of(number)
    tokens = drawn_tokens(0.0, prompt, TOKENS).tolist()
    scores = -1 - np.array(prompt[1:]) / 1000
    return list(answer.sequences[0].tokens) == tokens and np.allclose(answer.prompt_logprobs[1:], scores, atol=1e-6)


async def samples(url: str, first: int, count: int) -> dict:
    """All requests at once, as the SDK sends them."""
    service = tinker.ServiceClient(base_url=url)
    sampler = await service.create_sampling_client(base_model=BASE)
    params = types.SamplingParams(max_tokens=TOKENS, stop=[])
    seconds: list[float] = []
    ids: list[str] = []
    wrong: list[int] = []

    async def one(number: int) -> None:
        began = time.perf_counter()
        prompt = types.ModelInput.from_ints(prompt_of(number))
        answer = await sampler.sample(prompt, 1, params, include_prompt_logprobs=True)
        seconds.append(time.perf_counter() - began)
        ids.append(answer.sequences[0].sequence_id)
        if not is_own(number, answer):
            wrong.append(number)

    await asyncio.gather(*(one(number) for number in range(first, first + count)))
    service.close("success").result(SECONDS)
    return {"seconds": seconds, "ids": ids, "wrong": wrong}


async def training(url: str, until: Path) -> dict:
    """Gradients and steps, of which each must act once: their sum is known."""
    service = tinker.ServiceClient(base_url=url)
    run = await service.create_lora_training_client(base_model=BASE, rank=8)
    expected = moment = 0.0
    steps, adam = 0, types.AdamParams(learning_rate=1e-6)
    while not until.exists() or steps < 3:
        data = [sft(weight=float(steps % 5 + 1)), sft(length=3)]
        for future in (run.forward_backward(data, "cross_entropy"), run.optim_step(adam)):
            await future
        gradient = 4.0 * (steps % 5 + 1) + 3.0
        expected, moment, steps = expected + 1e-6 * (gradient + moment), gradient, steps + 1
    output = await run.forward([sft(target=0)], "cross_entropy")
    service.close("success").result(SECONDS)
    return {"steps": steps, "weight": float(output.loss_fn_outputs[0]["logprobs"].data[0]) + 1, "expected": expected}


async def heartbeats(url: str, until: Path) -> dict:
    """Beats of a session, each with the time that the SDK gives it."""
    failed, seconds = [], []
    async with httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"X-API-Key": "tml-load"}, timeout=10) as http:
        session = (await http.post("/create_session", json={})).json()["session_id"]
        while not until.exists() or len(seconds) < 3:
            began = time.perf_counter()
            try:
                status = (await http.post("/session_heartbeat", json={"session_id": session})).status_code
            except httpx.TransportError as error:
                status = repr(error)
            seconds.append(time.perf_counter() - began)
            if status != 200:
                failed.append(status)
            await asyncio.sleep(BEAT_SECONDS)
    return {"failed": failed, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("samples", "training", "heartbeats"))
    parser.add_argument("url")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--until", type=Path, help="go on until this file is there")
    options = parser.parse_args()
    work = {
        "samples": lambda: samples(options.url, options.first, options.count),
        "training": lambda: training(options.url, options.until),
        "heartbeats": lambda: heartbeats(options.url, options.until),
    }[options.what]
    print(json.dumps(asyncio.run(work())))


if __name__ == "__main__":
    main()
