"""The JSON forms that older SDKs send and read."""

import pytest

pytestmark = pytest.mark.timeout(180)


def content(targets, **more):
    return {
        "data": [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                "loss_fn_inputs": {"target_tokens": targets, **more},
            }
        ],
        "loss_fn": "cross_entropy",
    }


DENSE = {"data": [10, 20], "dtype": "int64", "shape": [2]}


def test_forward_backward_and_forward(server, raw):
    backward = raw.post(
        "forward_backward", model_id=raw.model, seq_id=1, forward_backward_input=content(DENSE), unknown_field=1
    )
    result = raw.result(backward["request_id"])
    assert result["metrics"]["loss:sum"] == pytest.approx(2.03)
    assert result["loss_fn_outputs"][0]["logprobs"]["shape"] == [2]
    raw.result(raw.post("forward", model_id=raw.model, seq_id=2, forward_input=content(DENSE))["request_id"])
    assert [call[5] for call in server.engine.calls if call[0] == "forward_backward"] == [True, False]


def test_sparse_tensors(server, raw):
    sparse = {
        "data": [7],
        "dtype": "int64",
        "shape": [2, 3],
        "sparse_crow_indices": [0, 0, 1],
        "sparse_col_indices": [2],
    }
    accepted = raw.post("forward_backward", model_id=raw.model, seq_id=1, forward_backward_input=content(sparse))
    logprobs = raw.result(accepted["request_id"])["loss_fn_outputs"][0]["logprobs"]
    assert logprobs["shape"] == [2, 3] and logprobs["data"][5] == pytest.approx(-1.007)


def test_content_that_cannot_be_read_is_told_by_the_future(raw):
    bad = [{"data": ["a"], "dtype": "int64"}, {"data": [1], "dtype": "bool"}, {"data": [2**70], "dtype": "int64"}]
    for seq, targets in enumerate(bad, start=1):
        accepted = raw.post(
            "forward_backward", model_id=raw.model, seq_id=seq, forward_backward_input=content(targets)
        )
        error = raw.result(accepted["request_id"])
        assert error["category"] == "user" and "target_tokens" in error["error"]


def test_samples(raw):
    request = raw.sample(raw.base_sampler(), prompt_logprobs=True, topk_prompt_logprobs=1, params={"max_tokens": 1})
    result = raw.result(request)
    assert result["sequences"] == [{"stop_reason": "length", "tokens": [100], "logprobs": [-0.5]}]
    assert result["prompt_logprobs"] == [None, pytest.approx(-1.002)]
    assert result["topk_prompt_logprobs"] == [None, [[1, -1.0]]]
