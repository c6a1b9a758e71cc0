"""JSON, protobuf and zstd are the same data to the engine, bit for bit, and the same results to the client."""

import json

import numpy as np
import pytest
import zstandard
from data import forward_backward_body
from raw import PROTOBUF
from tinker import types
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

pytestmark = pytest.mark.timeout(180)

# float32 values that a detour over decimal text or another width would change: signs of zero, subnormals, extremes.
ODD = [-0.0, 0.1, 1 / 3, 1e-45, 1.1754944e-38, -1.5e38, 16777217.0, 1e-7, 2.5, -1.0]


def sparse(dense):
    rows, columns = np.nonzero(dense)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    return {
        "data": dense[rows, columns],
        "dtype": "int64" if dense.dtype == np.int64 else "float32",
        "shape": list(dense.shape),
        "sparse_crow_indices": crow.tolist(),
        "sparse_col_indices": columns.tolist(),
    }


def dense(values):
    values = np.asarray(values)
    return {"data": values.ravel(), "dtype": values.dtype.name, "shape": list(values.shape)}


def batch():
    """Datums as plain content: token chunks and tensors, dense and sparse, flat and wide."""
    rng = np.random.default_rng(5)
    odd = np.asarray(ODD, np.float32)
    wide = np.zeros((6, 9), np.int64)
    wide[1, 2], wide[4, 8] = 7, 999
    weights = np.zeros((6, 9), np.float32)
    weights[0, 0], weights[4, 8] = 1e-45, -0.3
    return [
        ([list(range(10))], {"target_tokens": dense(np.arange(990, 1000)), "weights": dense(odd)}),
        ([[1, 2], [3], [4, 5, 6]], {"target_tokens": sparse(wide), "weights": sparse(weights)}),
        ([[9] * 6], {"target_tokens": dense(wide), "weights": dense(rng.normal(size=(6, 9)).astype(np.float32))}),
        ([[1]], {"target_tokens": dense(np.asarray([0]))}),
    ]


def as_json():
    def plain(tensor):
        return {**tensor, "data": tensor["data"].tolist()}

    data = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens} for tokens in chunks]},
            "loss_fn_inputs": {name: plain(tensor) for name, tensor in inputs.items()},
        }
        for chunks, inputs in batch()
    ]
    return {"data": data, "loss_fn": "cross_entropy"}


def as_protobuf(model_id, seq):
    data = [
        types.Datum(
            model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens) for tokens in chunks]),
            loss_fn_inputs={name: types.TensorData(**tensor) for name, tensor in inputs.items()},
        )
        for chunks, inputs in batch()
    ]
    return forward_backward_body(model_id, seq, data)


def bits(datum):
    inputs = {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in sorted(datum.inputs.items())}
    return datum.tokens.dtype.name, datum.tokens.tobytes(), inputs


@pytest.fixture
def reached(server):
    """The bits of every batch that reaches the engine."""
    batches, inner = [], server.engine.forward_backward

    async def forward_backward(model_id, data, *rest):
        batches.append([bits(datum) for datum in data])
        return await inner(model_id, data, *rest)

    server.engine.forward_backward = forward_backward
    return batches


def test_every_encoding_reaches_the_engine_as_the_same_bits(server, reached, raw):
    requests = [raw.post("forward", model_id=raw.model, seq_id=1, forward_input=as_json())["request_id"]]
    requests.append(
        raw.post("forward_backward", model_id=raw.model, seq_id=2, forward_backward_input=as_json())["request_id"]
    )
    for seq, encoding in ((3, {}), (4, {"Content-Encoding": "zstd"})):
        body = as_protobuf(raw.model, seq)
        content = zstandard.compress(body) if encoding else body
        answer = raw.http.post("/forward_backward", content=content, headers={"Content-Type": PROTOBUF, **encoding})
        requests.append(answer.json()["request_id"])
    # JSON may be compressed as well.
    text = json.dumps({"model_id": raw.model, "seq_id": 5, "forward_input": as_json()}).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
    answer = raw.http.post("/forward", content=zstandard.compress(text), headers=headers)
    requests.append(answer.json()["request_id"])
    results = [raw.result(request) for request in requests]
    assert len(reached) == 5
    assert all(batch == reached[0] for batch in reached[1:])
    expected = np.asarray(ODD, np.float32)
    assert reached[0][0][2]["weights"] == ("float32", (10,), expected.tobytes())
    assert all(result["loss_fn_outputs"] == results[0]["loss_fn_outputs"] for result in results)


def test_training_results_are_the_same_in_both_encodings(raw):
    request = raw.forward_backward(1)
    text = raw.result(request)
    answer = raw.http.post("/retrieve_future", json={"request_id": request}, headers={"Accept": PROTOBUF})
    binary = deserialize_forward_backward_output(answer.content)
    for row, output in zip(text["loss_fn_outputs"], binary.loss_fn_outputs, strict=True):
        assert row["logprobs"]["data"] == output["logprobs"].tolist() == pytest.approx([-1.01] * 4)
    assert text["metrics"] == binary.metrics


def test_samples_are_the_same_in_both_encodings(raw):
    request = raw.sample(raw.base_sampler(), prompt=range(3, 9), num_samples=2, prompt_logprobs=True,
                         topk_prompt_logprobs=3, params={"max_tokens": 4})
    text = raw.result(request)
    answer = raw.http.post("/retrieve_future", json={"request_id": request}, headers={"Accept": PROTOBUF})
    binary = deserialize_sample_response(answer.content)
    assert text["prompt_logprobs"] == binary.prompt_logprobs
    assert text["topk_prompt_logprobs"] == [row and [list(cell) for cell in row] for row in binary.topk_prompt_logprobs]
    drawn = [(s.tokens, s.logprobs, s.stop_reason) for s in binary.sequences]
    assert [(s["tokens"], s["logprobs"], s["stop_reason"]) for s in text["sequences"]] == drawn and len(drawn) == 2
