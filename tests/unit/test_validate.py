from dataclasses import replace

import numpy as np
import pytest

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import (
    AdamParams,
    BaseModelInfo,
    Datum,
    LoraSpec,
    Matrix,
    ModelSpec,
    SampleRequest,
    SamplingParams,
)
from verl_tinker.core.validate import check_adam, check_batch, check_same_shape, check_spec
from verl_tinker.core.validate_sampling import check_sample

pytestmark = pytest.mark.timeout(120)

MODEL = BaseModelInfo("m", 16, 100, tied_embeddings=False, trainable=True, sampleable=True)


def datum(**inputs):
    return Datum(np.array([1, 2], np.int32), {name: np.asarray(value) for name, value in inputs.items()})


def test_a_batch_has_just_what_its_loss_reads():
    data = [
        datum(
            target_tokens=[3, 4],
            logprobs=np.float32([0, 0]),
            advantages=[1, 0],
            weights=np.float32([1, 1]),
            mask=np.float32([0, 1]),
        )
    ]
    checked, settings = check_batch(data, "ppo", {"clip_high_threshold": 2.0}, MODEL)
    assert sorted(checked[0].inputs) == ["advantages", "logprobs", "target_tokens"]
    assert checked[0].inputs["advantages"].dtype == np.float32
    assert checked[0].inputs["target_tokens"].dtype == np.int64
    assert settings == {"clip_low_threshold": 0.8, "clip_high_threshold": 2.0}


def test_absent_weights_are_ones_in_the_shape_of_the_targets():
    checked, settings = check_batch([datum(target_tokens=[[3, 4, 0], [5, 6, 0]])], "cross_entropy", {}, MODEL)
    assert checked[0].inputs["weights"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert settings == {}


@pytest.mark.parametrize("weights", [[0.5, -2.0], [0.0, 0.0]])
def test_weights_of_any_sign_pass(weights):
    checked, _ = check_batch([datum(target_tokens=[3, 4], weights=weights)], "cross_entropy", {}, MODEL)
    assert checked[0].inputs["weights"].tolist() == weights


@pytest.mark.parametrize(
    "loss_fn, config, inputs, text",
    [
        ("cross_entropy", {}, {"target_tokens": np.float32([1, 2])}, "send token ids as int64"),
        ("cross_entropy", {}, {"target_tokens": [[[1]], [[2]]]}, r"shape \[2, 1, 1\]"),
        ("cross_entropy", {}, {"target_tokens": np.zeros((2, 0), int)}, r"shape \[2, 0\]"),
        ("cross_entropy", {}, {"target_tokens": [[1], [200]]}, r"token id 200 at position \(1, 0\)"),
        ("cross_entropy", {}, {"target_tokens": [1, 2], "weights": [[1.0], [1.0]]}, r"must match target_tokens, \[2\]"),
        ("ppo", {"clip_low_threshold": 2.0}, {}, "above clip_high_threshold"),
        ("dro", {"beta": float("inf")}, {}, "finite"),
    ],
)
def test_refusals(loss_fn, config, inputs, text):
    with pytest.raises(UserError, match=text):
        check_batch([datum(**inputs)], loss_fn, config, MODEL)


def test_specs():
    assert check_spec(ModelSpec("m", LoraSpec(rank=0)), MODEL, "adamw").lora is None
    with pytest.raises(UserError, match="rank"):
        check_spec(ModelSpec("m", LoraSpec(rank=-1)), MODEL, "adamw")
    with pytest.raises(UserError, match="at least one"):
        check_spec(ModelSpec("m", LoraSpec(4, None, False, False, False)), MODEL, "adamw")
    with pytest.raises(UserError, match="lora_config.seed"):
        check_spec(ModelSpec("m", LoraSpec(4, seed=2**70)), MODEL, "adamw")
    with pytest.raises(UserError, match="adamw"):
        check_spec(ModelSpec("m", LoraSpec()), MODEL, "dimuon")


@pytest.mark.parametrize("fields, text", [
    ({"learning_rate": float("nan")}, "finite"), ({"learning_rate": 1e300}, "at most 1e"), ({"eps": 1e7}, "at most 1e"),
    ({"weight_decay": -1.0}, "at least 0"), ({"beta2": 1.0}, "below 1")])
def test_adam_fields_that_could_ruin_an_update(fields, text):
    assert check_adam(AdamParams(grad_clip_norm=1e30)) == AdamParams(grad_clip_norm=1e30)
    with pytest.raises(UserError, match=f"adam_params.{next(iter(fields))} .*{text}"):
        check_adam(AdamParams(**fields))


def test_only_the_same_shape_loads():
    spec = ModelSpec("m", LoraSpec(rank=4, seed=1))
    check_same_shape(spec, ModelSpec("m", LoraSpec(rank=4, seed=2)), "p")
    for other in (ModelSpec("n", spec.lora), ModelSpec("m", None), ModelSpec("m", LoraSpec(rank=8))):
        with pytest.raises(UserError, match="create a training client from this state"):
            check_same_shape(spec, other, "p")


def sample(prompt=(1, 2), **params):
    return SampleRequest(np.array(prompt, np.int32), 1, SamplingParams(**params))


def test_max_tokens():
    assert check_sample(sample(), MODEL).params.max_tokens == 14
    assert check_sample(sample(max_tokens=14), MODEL).params.max_tokens == 14
    with pytest.raises(UserError, match=r"prompt \(2 tokens\) plus sampling_params.max_tokens \(15\)"):
        check_sample(sample(max_tokens=15), MODEL)


def test_a_model_that_ranks_fewer_tokens_says_what_to_raise():
    model = replace(MODEL, max_topk=20, max_topk_key="distillation.teacher_models.t.inference.engine_kwargs.vllm.max_logprobs")
    check_sample(replace(sample(), topk_prompt_logprobs=20), model)
    with pytest.raises(UserError, match="topk_prompt_logprobs is 21; give 0 to 20, or raise distillation.teacher_models.t.inf"):
        check_sample(replace(sample(), topk_prompt_logprobs=21), model)


def test_what_vllm_would_refuse():
    for temperature in (float("nan"), -0.1, 1e300):
        with pytest.raises(UserError, match="temperature"):
            check_sample(sample(temperature=temperature), MODEL)
    request = sample()
    limit = min(MODEL.max_topk, MODEL.vocab_size)
    check_sample(replace(request, topk_prompt_logprobs=limit), MODEL)
    with pytest.raises(UserError, match=f"topk_prompt_logprobs is {limit + 1}; give 0 to {limit}"):
        check_sample(replace(request, topk_prompt_logprobs=limit + 1), MODEL)


@pytest.mark.parametrize("stop", [None, [], ["a", "b"], [1, 2]])
def test_stops(stop):
    assert check_sample(sample(stop=stop), MODEL).params.stop == stop


@pytest.mark.parametrize("stop", [[""], [100], [-1], ["a", 1]])
def test_bad_stops(stop):
    with pytest.raises(UserError, match="stop"):
        check_sample(sample(stop=stop), MODEL)


def test_top_k_targets_and_alternatives_share_the_width():
    big = replace(MODEL, vocab_size=1000)
    request = replace(sample(range(5)), topk_prompt_logprobs=100)
    check_sample(replace(request, prompt_alt_k=28), big)
    with pytest.raises(UserError, match="prompt_alt_tokens_k is 29; give 0 to 28, beside a topk_prompt_logprobs of 100"):
        check_sample(replace(request, prompt_alt_k=29), big)
    for asked, fits in ((4 * 20, True), (4 * 20 + 1, False)):
        # All in one row: what counts is how many there are for each scored position on average.
        targets = Matrix(np.arange(asked), (4, 1000), np.array([0, 0, asked, asked, asked]), np.arange(asked))
        wide = replace(request, prompt_alt_k=8, target_prompt=targets)
        if fits:
            check_sample(wide, big)
        else:
            with pytest.raises(UserError, match="target_prompt_logprobs asks for 81 ids; at most 80 go with a prompt of 5"):
                check_sample(wide, big)
    with pytest.raises(UserError, match="prompt_alt_tokens_k is 101; give 0 to 100"):
        check_sample(replace(sample(), prompt_alt_k=101), MODEL)
