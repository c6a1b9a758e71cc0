"""Bad content is reported by the future, in words that help, and the next good command works."""

import re

import pytest
import tinker
from data import rl, sft, tensor
from fake_engine import BASE, CONTEXT
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from verl_tinker.core.errors import EngineError, SyncError

pytestmark = pytest.mark.timeout(180)


def datum(tokens, **inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={name: tensor(values, dtype) for name, (values, dtype) in inputs.items()},
    )


BAD_BATCHES = {
    "unknown loss": ([sft()], "cross_entrpy", None, "did you mean 'cross_entropy'"),
    "known loss that is not here": (
        [rl()], "custom", None,
        "cispo, cross_entropy, custom_from_config, dro, gspo, importance_sampling, ppo, stable_reinforce"),
    "mask of gspo": ([rl()], "gspo", None, r"'sequence_ratio_mask'\] is missing"),
    "no provenance": ([rl()], "stable_reinforce", None, r"data\[0\].loss_fn_input_spans is missing"),
    "missing input": ([sft(), sft()], "ppo", None, r"data\[0\].loss_fn_inputs\['logprobs'\] is missing"),
    "ragged": (
        [sft(), datum([1, 2, 3], target_tokens=([4, 5], "int64"))],
        "cross_entropy",
        None,
        r"data\[1\].*target_tokens.*shape \[2\].*3 tokens",
    ),
    "ragged weights": (
        [datum([1, 2], target_tokens=([4, 5], "int64"), weights=([1.0], "float32"))],
        "cross_entropy",
        None,
        r"weights.*shape \[1\].*\[2\]",
    ),
    "wide targets in RL": (
        [datum([1], target_tokens=([[4, 5]], "int64"))],
        "importance_sampling",
        None,
        r"importance_sampling needs \[1\]",
    ),
    "out of vocabulary": ([datum([1000], target_tokens=([1], "int64"))], "cross_entropy", None, "token id 1000"),
    "negative target": ([datum([1], target_tokens=([-100], "int64"))], "cross_entropy", None, "token id -100"),
    "nan": ([sft(weight=float("nan"))], "cross_entropy", None, "not finite at position 0"),
    "config key": ([rl()], "ppo", {"clip_low_treshold": 0.5}, "did you mean 'clip_low_threshold'"),
    "config of no config": ([sft()], "cross_entropy", {"beta": 0.5}, "it has no settings"),
    "config text": ([rl()], "dro", {"beta": "high"}, "give a finite number"),
    "crossed thresholds": (
        [rl(clip_low_threshold=tensor([0.5] * 4, "float32"), clip_high_threshold=tensor([0.6, 0.6, 0.4, 0.6], "float32"))],
        "ppo",
        None,
        "clip_low_threshold is above clip_high_threshold at position 2",
    ),
    "thresholds of a loss that does not clip": (
        [rl(clip_low_threshold=tensor([0.5] * 4, "float32"))], "dro", None, "dro does not clip; leave it out"),
    "too long": ([sft(length=CONTEXT + 1)], "cross_entropy", None, f"{CONTEXT + 1} tokens; the context"),
    "empty datum": ([datum([], target_tokens=([], "int64"))], "cross_entropy", None, "is empty"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batch(case, server, raw):
    data, loss_fn, config, text = BAD_BATCHES[case]
    error = raw.result(raw.forward_backward(1, data, loss_fn, config))
    assert error["category"] == "user"
    assert re.search(text, error["error"]), error["error"]
    assert raw.binary(raw.forward_backward(2)).metrics["loss:sum"] == pytest.approx(4.04)
    assert server.engine.names() == ["create_model", "forward_backward"]


def test_empty_batch_and_image(raw):
    empty = pb.ForwardBackwardRequest(model_id=raw.model, seq_id=1, loss_fn="cross_entropy")
    image = pb.ForwardBackwardRequest(model_id=raw.model, seq_id=2, loss_fn="cross_entropy")
    image.data.add().model_input.add().image.data = b"png"
    for message, text in ((empty, "data is empty"), (image, "'image'")):
        answer = raw.http.post(
            "/forward_backward",
            content=message.SerializeToString(),
            headers={"Content-Type": "application/x-protobuf"},
        )
        error = raw.result(answer.json()["request_id"])
        assert error["category"] == "user" and text in error["error"]


def targets(data, shape=None, dtype="int64", **sparse):
    return {"target_prompt_logprobs": {"data": data, "dtype": dtype, "shape": shape, **sparse}}


BAD_SAMPLES = {
    "over the context": ({"prompt": [1] * 60, "params": {"max_tokens": 10}}, "more than the context"),
    "full context": ({"prompt": [1] * CONTEXT, "params": {}}, "more than the context"),
    "temperature": ({"params": {"temperature": -1}}, "temperature"),
    "top_p": ({"params": {"top_p": 0}}, "top_p"),
    "top_k": ({"params": {"top_k": -2}}, "top_k"),
    "max_tokens": ({"params": {"max_tokens": 0}}, "max_tokens"),
    "num_samples": ({"num_samples": 0}, "num_samples"),
    "mixed stops": ({"params": {"stop": ["a", 3]}}, "mixes"),
    "empty prompt": ({"prompt": []}, "prompt is empty"),
    "vocabulary": ({"prompt": [5000]}, "token id 5000"),
    "last n": ({"prompt_logprobs_last_n": 1}, "prompt_logprobs"),
    "too many alternatives": ({"prompt_alt_tokens_k": 129}, "prompt_alt_tokens_k is 129; give 0 to 128"),
    "negative alternatives": ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k is -1"),
    "flat targets": (targets([1]), "target_prompt_logprobs has shape [1]; a prompt of 2 tokens needs [1, K]"),
    "targets of other length": (targets([1, 2], [2, 1]), "has shape [2, 1]; a prompt of 2 tokens needs [1, K]"),
    "targets that are numbers": (targets([1.5], [1, 1], dtype="float32"), "float32; send token ids as int64"),
    "targets outside": (targets([1000], [1, 1]), "target_prompt_logprobs holds token id 1000 in row 0"),
    "negative targets": (targets([-2], [1, 1]), "target_prompt_logprobs holds token id -2"),
    "no targets": (targets([-1, -1], [1, 2]), "target_prompt_logprobs asks for no id"),
    "too many targets": (targets([1] * 129, [1, 129]), "asks for 129 ids; at most 128"),
    "targets that do not fill": (targets([1], [1, 2]), "do not fill its shape [1, 2]"),
    "sparse targets": (
        targets([1], [1, 2], sparse_crow_indices=[0, 2], sparse_col_indices=[0]), "crow_indices must have 2"),
    "sparse targets of no shape": (targets([1], sparse_crow_indices=[0, 1], sparse_col_indices=[0]), "two dimensions"),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_bad_sample(case, raw):
    body, text = BAD_SAMPLES[case]
    sampler = raw.base_sampler()
    error = raw.result(raw.sample(sampler, **body))
    assert error["category"] == "user" and text in error["error"]
    assert raw.binary(raw.sample(sampler, seq=1)).sequences[0].tokens == [100]


def test_engine_failures_are_the_servers(server, training):
    server.engine.fail["forward_backward"] = EngineError("worker 1 died")
    server.engine.fail["optim_step"] = ValueError("a bug")
    with pytest.raises(tinker.RequestFailedError, match="worker 1 died.*no gradient") as failure:
        training.forward_backward([sft()], "cross_entropy").result(20)
    assert failure.value.category == "server"
    training.forward_backward([sft()], "cross_entropy").result(20)
    with pytest.raises(tinker.RequestFailedError, match="ValueError: a bug") as failure:
        training.optim_step(types.AdamParams()).result(20)
    assert failure.value.category == "server"
    assert training.optim_step(types.AdamParams()).result(20).metrics == {"grad_norm": 4.0, "weights_version": 2.0}


def test_weights_that_fail_the_check_are_not_served(server, client, training):
    server.engine.fail["load_version"] = SyncError("sampler and trainer differ by 0.3")
    with pytest.raises(tinker.RequestFailedError, match=r"differ by 0\.3"):
        training.save_weights_for_sampler("a").result(20)
    path = f"tinker://{training.model_id}/sampler_weights/a"
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_sampling_client(model_path=path).result(20)
    assert training.save_weights_for_sampler("a").result(20).path == path


def test_unknown_things(client, training):
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        training.load_state(f"tinker://{training.model_id}/weights/none").result(20)
    with pytest.raises(tinker.RequestFailedError, match="not a checkpoint path"):
        client.create_training_client_from_state("tinker://x/y").result(20)
    with pytest.raises(tinker.RequestFailedError, match=f"'fake/tide'.*did you mean '{BASE}'"):
        client.create_lora_training_client(base_model="fake/tide").result(20)
    with pytest.raises(tinker.BadRequestError, match="did you mean"):
        client.create_sampling_client(base_model="fake/tide").result(20)


def test_unknown_model_is_told_by_the_future(raw):
    raw.model = "nobody:train:0"
    for request in (raw.forward_backward(1), raw.optim_step(2), raw.snapshot(3, 0)):
        error = raw.result(request)
        assert error["category"] == "user" and "not a training run of this server" in error["error"]


def test_names_and_existing_names(training):
    training.save_state("a").result(20)
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        training.save_state("a").result(20)
    training.save_state("a", overwrite=True).result(20)
    for name in ("a/b", "..", ".hidden", "", "ö", "x" * 201):
        with pytest.raises(tinker.RequestFailedError, match="cannot be used") as failure:
            training.save_state(name).result(20)
        assert failure.value.category == "user"


def test_another_optimizer_is_refused(raw):
    body = {"model_id": raw.model, "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}
    error = raw.result(raw.post("optim_step", **body)["request_id"])
    assert error["category"] == "user" and "dimuon" in error["error"]


@pytest.mark.parametrize("field, value", [("beta1", 1.0), ("learning_rate", -1.0), ("grad_clip_norm", -0.5)])
def test_bad_adam(raw, field, value):
    raw.forward_backward(1)
    accepted = raw.post("optim_step", model_id=raw.model, seq_id=2, adam_params={field: value})
    error = raw.result(accepted["request_id"])
    assert error["category"] == "user" and f"adam_params.{field}" in error["error"]
