"""The same calls on whatever Tinker server answers, timed; one JSON line for each measurement.

Owns the calls. Needs only the SDK, of a version that both servers know (0.24.1). Does not start servers: `compare` does.

    python bench/peers/driver.py URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

import tinker
from tinker import types

RANK, SEQUENCES, LENGTH, NEW_TOKENS, REPEATS = 32, 16, 256, 64, 3
BURST, BURST_TOKENS = 512, 16
VOCAB = 40_000


def say(name: str, value) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


def row(length: int, salt: int) -> types.Datum:
    tokens = [(7 * i + 13 * salt) % VOCAB for i in range(1, length + 2)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[length]),
        "weights": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length])})


def timed(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def training(client: tinker.TrainingClient) -> None:
    adam, tiny, batch = types.AdamParams(learning_rate=1e-4), [row(8, 1), row(8, 2)], [row(LENGTH, i) for i in range(SEQUENCES)]
    calls = {"forward_backward": lambda: client.forward_backward(tiny, "cross_entropy").result(),
             "optim_step": lambda: client.optim_step(adam).result()}
    say("first tiny forward_backward, s", timed(calls["forward_backward"]))
    say("first optim_step, s", timed(calls["optim_step"]))
    times = {name: [] for name in calls}
    for _ in range(20):
        for name, one in calls.items():
            times[name].append(1000 * timed(one))
    for name, found in times.items():
        say(f"tiny {name}, ms p50", statistics.median(found))
    whole = lambda: client.forward_backward(batch, "cross_entropy").result()  # noqa: E731
    say("first 16 x 256, s", timed(whole))
    say("training, tokens a second", SEQUENCES * LENGTH / statistics.median(timed(whole) for _ in range(REPEATS)))
    client.optim_step(adam).result()


async def sampled(client: tinker.SamplingClient, count: int, tokens: int) -> tuple[int, int]:
    """(tokens that came, requests that failed)."""
    async def one(salt: int):
        prompt = types.ModelInput.from_ints([(3 * i + 11 * salt) % VOCAB for i in range(1, 33)])
        params = types.SamplingParams(max_tokens=tokens, temperature=1.0, seed=salt, stop=[])
        return await client.sample_async(prompt, 1, params)

    answers = await asyncio.gather(*(one(salt) for salt in range(count)), return_exceptions=True)
    good = [a for a in answers if not isinstance(a, BaseException)]
    return sum(len(s.tokens) for a in good for s in a.sequences), count - len(good)


def sampling(client: tinker.SamplingClient) -> None:
    for at_once in (1, 16, 64):
        say(f"first {at_once} samples, s", timed(lambda: asyncio.run(sampled(client, at_once, NEW_TOKENS))))
        rates = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            tokens, failed = asyncio.run(sampled(client, at_once, NEW_TOKENS))
            rates.append(tokens / (time.perf_counter() - began))
        say(f"sampling at {at_once}, tokens a second", statistics.median(rates))
    began = time.perf_counter()
    tokens, failed = asyncio.run(sampled(client, BURST, BURST_TOKENS))
    say("512 samples at once, s", time.perf_counter() - began)
    say("512 samples at once, failed", failed)


def main(url: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    began = time.perf_counter()
    client = service.create_lora_training_client(base_model=model, rank=RANK, seed=0)
    say("create_model, s", time.perf_counter() - began)
    training(client)
    began = time.perf_counter()
    sampler = client.save_weights_and_get_sampling_client("bench")
    asyncio.run(sampled(sampler, 1, 1))
    say("save to first token, s", time.perf_counter() - began)
    sampling(sampler)


if __name__ == "__main__":
    main(*sys.argv[1:])
