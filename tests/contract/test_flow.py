"""The real SDK against the server: train, save, sample, resume."""

import numpy as np
import pytest
import tinker
from data import rl, sft, tensor
from fake_engine import BASE, CONTEXT, UNTIED
from tinker import types

pytestmark = pytest.mark.timeout(180)

PROMPT = types.ModelInput.from_ints([5, 6, 7])


def step(training, learning_rate=0.01, weight=1.0):
    backward = training.forward_backward([sft(weight=weight)], "cross_entropy")
    optim = training.optim_step(types.AdamParams(learning_rate=learning_rate))
    return backward.result(20), optim.result(20)


def sampled(client, **options):
    params = types.SamplingParams(max_tokens=2, **options)
    return client.sample(PROMPT, num_samples=1, sampling_params=params).result(20).sequences[0]


def test_trains_saves_and_samples(server, client, training):
    info = training.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (BASE, True, 8)
    output, stepped = step(training)
    assert output.metrics["loss:sum"] == pytest.approx(4 * 1.01)
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx([-1.01] * 4)
    assert stepped.metrics == {"grad_norm": 4.0, "weights_version": 2.0}
    sampler = training.save_weights_and_get_sampling_client().result(20)
    response = sampler.sample(PROMPT, num_samples=3, sampling_params=types.SamplingParams(max_tokens=5)).result(20)
    assert [s.tokens for s in response.sequences] == [[140] * 5] * 3
    assert response.sequences[0].logprobs == pytest.approx([-0.46] * 5)
    assert response.sequences[0].stop_reason == "length"
    assert len({s.sequence_id for s in response.sequences}) == 3
    assert not server.engine.overlapped


def test_commands_run_in_program_order_while_none_is_awaited(server, training):
    futures = []
    for _ in range(5):
        futures += [
            training.forward_backward([sft()], "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=0.001)),
        ]
    for future in futures:
        future.result(20)
    assert server.engine.names() == ["create_model", *["forward_backward", "optim_step"] * 5]


def test_all_adam_fields_reach_the_engine(server, training):
    adam = types.AdamParams(
        learning_rate=0.5, beta1=0.1, beta2=0.2, eps=1e-3, weight_decay=0.3, grad_clip_norm=0.4
    )
    training.forward_backward([sft()], "cross_entropy").result(20)
    training.optim_step(adam).result(20)
    got = server.engine.calls[-1][2]
    assert (got.learning_rate, got.beta1, got.beta2, got.eps, got.weight_decay, got.grad_clip_norm) == (
        0.5,
        0.1,
        0.2,
        1e-3,
        0.3,
        0.4,
    )


def test_metrics_that_are_not_finite_arrive(training):
    training.forward_backward([sft(weight=1e7)], "cross_entropy").result(20)
    metrics = training.optim_step(types.AdamParams()).result(20).metrics
    assert np.isnan(float(metrics["grad_norm"]))


def test_each_snapshot_keeps_its_own_weights(training):
    samplers = []
    for _ in range(2):
        step(training)
        samplers.append(training.save_weights_and_get_sampling_client().result(20))
    step(training)
    first, second = (sampled(sampler).tokens[0] for sampler in samplers)
    assert (first, second) == (140, 220)


def test_named_weights_sample_through_their_path(client, training):
    step(training)
    path = training.save_weights_for_sampler("final").result(20).path
    assert path.endswith(":train:0/sampler_weights/final")
    step(training)
    sampler = client.create_sampling_client(model_path=path).result(20)
    assert sampler.get_base_model() == BASE
    assert sampled(sampler).tokens == [140, 140]


def test_base_model_samples_without_training(client):
    assert sampled(client.create_sampling_client(base_model=BASE).result(20)).tokens == [100, 100]


def test_max_tokens_absent_is_the_rest_of_the_context(client):
    sampler = client.create_sampling_client(base_model=BASE).result(20)
    response = sampler.sample(PROMPT, num_samples=1, sampling_params=types.SamplingParams()).result(20)
    assert len(response.sequences[0].tokens) == CONTEXT - 3


def test_prompt_logprobs(client):
    sampler = client.create_sampling_client(base_model=BASE).result(20)
    assert sampler.compute_logprobs(PROMPT).result(20) == [None, pytest.approx(-1.006), pytest.approx(-1.007)]
    last = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result(20)
    assert last == [None, None, pytest.approx(-1.007)]


def test_topk_rows(client):
    sampler = client.create_sampling_client(base_model=BASE).result(20)
    response = sampler.sample(
        PROMPT,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=2),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
    ).result(20)
    assert response.topk_prompt_logprobs == [None, [(1, -1.0), (2, -2.0)], [(1, -1.0), (2, -2.0)]]
    assert response.sequences[0].topk_logprobs_np.token_ids.tolist() == [[100, 2, 3]] * 2


def test_forward_leaves_no_gradient(training):
    assert training.forward([sft()], "cross_entropy").result(20).metrics["loss:sum"] == pytest.approx(4.04)
    with pytest.raises(tinker.RequestFailedError, match="no gradient to apply"):
        training.optim_step(types.AdamParams()).result(20)


def test_a_step_uses_the_gradient_up(training):
    step(training)
    with pytest.raises(tinker.RequestFailedError, match="no gradient to apply") as failure:
        training.optim_step(types.AdamParams()).result(20)
    assert failure.value.category == "user"


def test_resumes_with_and_without_the_optimizer(start_server, connect):
    server = start_server(max_runs=3)
    client = connect(server)
    training = client.create_lora_training_client(base_model=BASE, rank=4, train_mlp=False).result(20)
    step(training)
    path = training.save_state("resume").result(20).path
    step(training)
    expected = server.engine.models[training.model_id].weight
    assert expected == pytest.approx(0.04 + 0.08)
    resumed = client.create_training_client_from_state_with_optimizer(path).result(20)
    step(resumed)
    assert server.engine.models[resumed.model_id].weight == expected
    assert server.engine.models[resumed.model_id].spec.lora.train_mlp is False
    fresh = client.create_training_client_from_state(path).result(20)
    step(fresh)
    assert server.engine.models[fresh.model_id].weight == pytest.approx(0.04 + 0.04)
    training.load_state(path).result(20)
    assert server.engine.models[training.model_id].weight == pytest.approx(0.04)


def test_rl_losses_get_their_defaults(server, training):
    for loss_fn in ("importance_sampling", "ppo", "cispo", "dro"):
        training.forward_backward([rl(weights=tensor([1] * 4, np.float32))], loss_fn).result(20)
    configs = {call[3]: call[4] for call in server.engine.calls if call[0] == "forward_backward"}
    assert configs == {
        "importance_sampling": {},
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
    }


def test_the_settings_in_force_are_reported(server, client):
    tied = client.create_lora_training_client(base_model=BASE, rank=4).result(20)
    path = tied.save_state("a").result(20).path
    with server.http() as http:
        info = http.post("/get_info", json={"model_id": tied.model_id}).json()
        weights = http.post("/weights_info", json={"tinker_path": path}).json()
        session = http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()
    assert info["train_unembed"] is False and info["train_attn"] is True and "tied" in info["notes"][0]
    assert weights["train_unembed"] is False and weights["lora_rank"] == 4
    assert BASE in session["warning_message"] and UNTIED not in session["warning_message"]


def test_rank_zero_is_full_fine_tuning(server):
    with server.http() as http:
        session = http.post("/create_session", json={}).json()["session_id"]
        created = http.post(
            "/create_model",
            json={"session_id": session, "model_seq_id": 0, "base_model": UNTIED, "lora_config": {"rank": 0}},
        ).json()
        result = http.post("/retrieve_future", json={"request_id": created["request_id"]}).json()
        info = http.post("/get_info", json={"model_id": result["model_id"]}).json()
    assert server.engine.calls[0][2].lora is None
    assert info["is_lora"] is False
