"""The proof that a sampler means its weights: many versions asked side by side while training and syncs go on."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import tinker
from lifecycle import TINY
from real_server import start_server, stop_server
from tinker import types

ROUNDS = 20
PROMPT = list(range(100, 130))
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])


def datum(seed: int) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(0, 40_000, 33)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs={"target_tokens": tokens[1:].tolist()})


def step(training, seed: int) -> None:
    training.forward_backward([datum(seed)], "cross_entropy").result(120)
    training.optim_step(types.AdamParams(learning_rate=5e-3)).result(120)


def trainer_scores(training) -> np.ndarray:
    """float32[len(PROMPT) - 1]: what the trainer says of the prompt with the weights that it has now."""
    scored = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]), loss_fn_inputs={"target_tokens": PROMPT[1:]})
    return np.asarray(training.forward([scored], "cross_entropy").result(120).loss_fn_outputs[0]["logprobs"].data)


def ask(sampler):
    return sampler.sample(types.ModelInput.from_ints(PROMPT), 1, GREEDY, include_prompt_logprobs=True)


def answer(future) -> tuple[list[int], np.ndarray]:
    """Tokens, and the log-probabilities of prompt and tokens."""
    result = future.result(120)
    drawn = result.sequences[0]
    return list(drawn.tokens), np.asarray([*result.prompt_logprobs[1:], *drawn.logprobs])


def versions_of(client, training, base_model: str) -> dict:
    """The base, three named versions and two unnamed, each a step further, and what the trainer said of each."""
    samplers = {"base": (client.create_sampling_client(base_model=base_model), trainer_scores(training))}
    for n in range(5):
        step(training, n)
        if n % 2:
            sampler = training.save_weights_and_get_sampling_client().result(120)
        else:
            sampler = client.create_sampling_client(model_path=training.save_weights_for_sampler(f"v{n}").result(120).path)
        samplers[f"step {n + 1}"] = (sampler, trainer_scores(training))
    return samplers


def train_on(training, stop: threading.Event, done: list) -> None:
    """Steps and syncs until told to stop; `done` gets a line for each."""
    n = 100
    while not stop.is_set():
        step(training, n)
        done.append("step")
        if n % 3 == 0 and done.count("sync") < 10:
            answer(ask(training.save_weights_and_get_sampling_client().result(120)))
            done.append("sync")
        n += 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [8, pytest.param(0, marks=pytest.mark.full)], ids=["lora", "full"])
def test_each_sampler_gives_its_own_answer_while_training_goes_on(tmp_path, rank):
    process, url = start_server(tmp_path, TINY, "server.keep_versions=20")
    stop, done = threading.Event(), []
    try:
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        base_model = client.get_server_capabilities().supported_models[0].model_name
        training = client.create_lora_training_client(base_model=base_model, rank=rank, seed=1).result(120)
        samplers = versions_of(client, training, base_model)
        first = {name: answer(ask(sampler)) for name, (sampler, _) in samplers.items()}
        for name, (_, scores) in samplers.items():
            np.testing.assert_allclose(first[name][1][: len(scores)], scores, atol=1e-4)
        scores = [scores for _, scores in samplers.values()]
        gaps = [np.abs(a - b).max() for i, a in enumerate(scores) for b in scores[:i]]
        assert min(gaps) > 0.01, "versions too alike to be told apart"
        thread = threading.Thread(target=train_on, args=(training, stop, done), daemon=True)
        thread.start()
        rng = random.Random(0)
        for _ in range(ROUNDS):
            names = rng.sample(list(samplers), len(samplers))
            for name, future in [(name, ask(samplers[name][0])) for name in names]:
                tokens, logprobs = answer(future)
                assert tokens == first[name][0], name
                np.testing.assert_allclose(logprobs, first[name][1], atol=1e-4, err_msg=name)
        stop.set()
        thread.join(120)
        assert done.count("step") >= 5 and done.count("sync") >= 2, done
        client.close("success").result(60)
    finally:
        stop.set()
        code = stop_server(process)
    assert code == 0, (tmp_path / "server.log").read_text()[-3000:]
