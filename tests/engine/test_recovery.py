"""Workers of the real engine that are killed: what clients are told, and how they go on."""

from __future__ import annotations

import time

import httpx
import psutil
import pytest
import tinker
from lifecycle import TINY, assert_nothing_left, family, folders, shared_memory
from real_server import start_server, stop_server
from tinker import types

pytestmark = pytest.mark.timeout(600)
RATE = types.AdamParams(learning_rate=1e-2)


@pytest.fixture
def server(tmp_path):
    before = shared_memory(), folders()
    process, url = start_server(tmp_path, TINY)
    yield process, url
    members = family(process.pid)
    assert stop_server(process) == 0, (tmp_path / "server.log").read_text()[-3000:]
    assert_nothing_left(members, url, *before)


def datum() -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints([10, 20, 30]), loss_fn_inputs={"target_tokens": [20, 30, 40]})


def step(training) -> list[float]:
    output = training.forward_backward([datum()], "cross_entropy").result(120)
    training.optim_step(RATE).result(120)
    return list(output.loss_fn_outputs[0]["logprobs"].data)


def greedy(sampling) -> list[int]:
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    return sampling.sample(types.ModelInput.from_ints([10, 20]), 1, params).result(120).sequences[0].tokens


def victim(process, name: str) -> psutil.Process:
    return next(p for p in family(process.pid) if name in (p.cmdline() or [""])[0])


def wait_until_ready(url: str) -> float:
    """Seconds until the server has noticed the death and is ready again."""
    begin = time.monotonic()
    states = []
    while time.monotonic() < begin + 240:
        answer = httpx.get(f"{url}/api/v1/healthz", timeout=60)
        states.append(answer.status_code)
        if answer.status_code == 200 and 503 in states:
            return time.monotonic() - begin
        assert answer.json().get("status") != "failed", answer.text
        time.sleep(0.2)
    raise AssertionError(f"the server is not ready again; last {answer.text}")


def check_death(process, url: str, name: str, while_training: bool) -> None:
    """Kill a worker while it works; the run ends with the reason, its checkpoints resume, its samplers go on."""
    service = tinker.ServiceClient(base_url=url)
    model = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=model, rank=8, seed=5).result(120)
    step(training)
    path = training.save_state("state").result(120).path
    named = training.save_weights_for_sampler("named").result(120).path
    snapshot = training.save_weights_and_get_sampling_client()
    expected = step(training)
    sampler = service.create_sampling_client(model_path=named)
    before = greedy(sampler)

    if while_training:
        pending = [training.forward_backward([datum()] * 64, "cross_entropy") for _ in range(4)]
    else:
        params = types.SamplingParams(max_tokens=1500, stop=[])
        pending = [sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params) for _ in range(8)]
    victim(process, name).kill()
    for future in pending[-1:]:
        with pytest.raises(tinker.RequestFailedError) as caught:
            future.result(timeout=120)
        assert caught.value.category == types.RequestErrorCategory.Server, caught.value
        assert "died" in str(caught.value) or "not answer" in str(caught.value), caught.value
    wait_until_ready(url)

    with pytest.raises(tinker.RequestFailedError, match="create_training_client_from_state_with_optimizer") as told:
        training.optim_step(RATE).result(120)
    assert path in str(told.value)
    assert greedy(sampler) == before and greedy(snapshot) == before
    resumed = service.create_training_client_from_state_with_optimizer(path).result(120)
    assert step(resumed) == expected
    service.close("success").result(20)


def test_a_killed_trainer_and_a_killed_sampler(server):
    process, url = server
    check_death(process, url, "ray::TinkerWorker", while_training=True)
    check_death(process, url, "ray::SamplerServer", while_training=False)


@pytest.mark.full
def test_a_killed_ray(server):
    process, url = server
    check_death(process, url, "raylet", while_training=True)
