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


class Before:
    """A run with a saved state, a named and an unnamed sampler, and what each must give later."""

    def __init__(self, url: str):
        self.service = tinker.ServiceClient(base_url=url)
        model = self.service.get_server_capabilities().supported_models[0].model_name
        self.training = self.service.create_lora_training_client(base_model=model, rank=8, seed=5).result(120)
        step(self.training)
        self.path = self.training.save_state("state").result(120).path
        named = self.training.save_weights_for_sampler("named").result(120).path
        self.snapshot = self.training.save_weights_and_get_sampling_client()
        self.next_step = step(self.training)
        self.sampler = self.service.create_sampling_client(model_path=named)
        self.tokens = greedy(self.sampler)

    def work(self, kind: str) -> list:
        """Futures of work that goes on for a while."""
        if kind == "training":
            return [self.training.forward_backward([datum()] * 64, "cross_entropy") for _ in range(4)]
        params = types.SamplingParams(max_tokens=1500, stop=[])
        return [self.sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params) for _ in range(8)]

    def check_that_clients_go_on(self) -> None:
        """The run says where to resume, and what resumes there is the same; the named sampler kept its weights."""
        with pytest.raises(tinker.RequestFailedError, match="create_training_client_from_state_with_optimizer") as told:
            self.training.optim_step(RATE).result(120)
        assert self.path in str(told.value)
        assert greedy(self.sampler) == self.tokens
        resumed = self.service.create_training_client_from_state_with_optimizer(self.path).result(120)
        assert step(resumed) == self.next_step
        self.service.close("success").result(20)


def check_server_error(future, words: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=words) as caught:
        future.result(timeout=240)
    assert caught.value.category == types.RequestErrorCategory.Server, caught.value


def test_a_killed_trainer(server):
    process, url = server
    before = Before(url)
    pending = before.work("training")
    victim(process, "ray::TinkerWorker").kill()
    check_server_error(pending[-1], "died|not answer")
    wait_until_ready(url)
    assert greedy(before.snapshot) == before.tokens
    before.check_that_clients_go_on()


@pytest.mark.full
def test_a_killed_sampler_costs_nobody_anything(server):
    """What waited is sampled by its successor, and training never heard of it."""
    process, url = server
    before = Before(url)
    pending = before.work("sampling")
    victim(process, "ray::SamplerServer").kill()
    second_step = step(before.training)
    drawn = [future.result(timeout=240).sequences[0] for future in pending]
    assert [len(sequence.tokens) for sequence in drawn] == [1500] * 8
    assert greedy(before.sampler) == greedy(before.snapshot) == before.tokens
    later = before.training.save_weights_and_get_sampling_client()
    assert greedy(later) != before.tokens
    resumed = before.service.create_training_client_from_state_with_optimizer(before.path).result(120)
    assert step(resumed) == before.next_step and step(resumed) == second_step
    before.service.close("success").result(20)


@pytest.mark.full
@pytest.mark.parametrize("name", ["raylet", "verl_tinker.start"])
def test_after_the_death_of_the_server_the_next_one_goes_on(tmp_path, name):
    """Its own, or Ray's, which ends every process that is connected to it."""
    process, url = start_server(tmp_path, TINY)
    members = family(process.pid)
    before = Before(url)
    pending = before.work("training")
    (process if name == "verl_tinker.start" else victim(process, name)).kill()
    assert process.wait(timeout=120) != 0
    _, alive = psutil.wait_procs(members, timeout=180)
    assert not alive, [p.cmdline()[:3] for p in alive]
    process, _ = start_server(tmp_path, TINY, port=int(url.rpartition(":")[2]))
    check_server_error(pending[-1], "started again")
    with pytest.raises(tinker.RequestFailedError, match="had no name"):
        greedy(before.snapshot)
    before.check_that_clients_go_on()
    assert stop_server(process) == 0
