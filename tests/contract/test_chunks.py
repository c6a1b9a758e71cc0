"""Chunks, custom losses and sparse tensors through the real SDK."""

import time

import numpy as np
import pytest
import tinker
from data import sft, tensor
from tinker import types

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def server(start_server):
    return start_server(changed_flags={"fwdbwd_max_chunk_len": 1})


def test_chunks_give_what_the_whole_gives(server, training):
    data = [sft(length=n, target=10 * n) for n in (2, 3, 4, 5)]
    output = training.forward_backward(data, "cross_entropy").result(20)
    assert [len(o["logprobs"].data) for o in output.loss_fn_outputs] == [2, 3, 4, 5]
    assert output.metrics["loss:sum"] == pytest.approx(sum(n * (1 + n / 100) for n in (2, 3, 4, 5)))
    assert server.engine.models[training.model_id].gradient == 14
    assert server.engine.names().count("forward_backward") == 1


def test_a_bad_chunk_fails_alone(server, training):
    bad = sft()
    del bad.loss_fn_inputs["target_tokens"]
    with pytest.raises(tinker.RequestFailedError, match="target_tokens") as failure:
        training.forward_backward([sft(), bad, sft()], "cross_entropy").result(20)
    assert failure.value.category == "user"
    training.optim_step(types.AdamParams()).result(20)
    assert server.engine.calls[1][:3] == ("forward_backward", training.model_id, 2)
    assert server.engine.names()[2:] == ["optim_step"]


def test_calls_that_wait_are_one_call_of_the_engine_where_the_preset_says_so(server, training):
    server.service._queue._pack_tokens = 100
    server.engine.hold.add("forward_backward")
    calls = [training.forward_backward([sft(length=n, target=10 * n)], "cross_entropy") for n in (2, 3, 4)]
    step = training.optim_step(types.AdamParams())
    while server.service.futures.pending < 4:
        time.sleep(0.01)
    server.engine.hold.clear()
    for n, call in zip((2, 3, 4), calls, strict=True):
        assert call.result(20).metrics["loss:sum"] == pytest.approx(n * (1 + n / 100))
    step.result(20)
    assert [call[2] for call in server.engine.calls if call[0] == "forward_backward"] == [1, 2]
    assert server.engine.names()[-1] == "optim_step"


def test_custom_loss(server, training):
    torch = pytest.importorskip("torch")

    def twice_the_sum(data, logprobs):
        return sum(2 * torch.sum(lp) for lp in logprobs), {"mine": 1.0}

    output = training.forward_backward_custom([sft(length=2), sft(length=3)], twice_the_sum).result(20)
    assert output.metrics["loss:sum"] == pytest.approx(2 * 5 * -1.01)
    assert output.metrics["mine"] == 1.0
    # The gradient of the loss is 2 for each token; the SDK sends it as weights with the sign turned.
    assert server.engine.models[training.model_id].gradient == -10


def test_wide_targets_dense_and_sparse(server, training):
    targets, weights = np.zeros((40, 8), np.int64), np.zeros((40, 8), np.float32)
    targets[3, 2], weights[3, 2], weights[5, 1] = 7, 0.5, -0.25
    for sparse in (False, True):
        make = types.TensorData.from_numpy
        pair = {"target_tokens": make(targets), "weights": make(weights)}
        if sparse:
            pair = {name: sparse_tensor(value) for name, value in (("target_tokens", targets), ("weights", weights))}
        datum = types.Datum(model_input=types.ModelInput.from_ints([1] * 40), loss_fn_inputs=pair)
        output = training.forward_backward([datum], "cross_entropy").result(20)
        logprobs = output.loss_fn_outputs[0]["logprobs"]
        assert list(logprobs.shape) == [40, 8]
        assert np.asarray(logprobs.data).reshape(40, 8)[3, 2] == pytest.approx(-1.007)
        assert output.metrics["loss:sum"] == pytest.approx(0.5 * 1.007 - 0.25)
    assert server.engine.models[training.model_id].gradient == 0.5


def sparse_tensor(dense: np.ndarray) -> types.TensorData:
    rows, columns = np.nonzero(dense)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    return types.TensorData(
        data=dense[rows, columns],
        dtype="int64" if dense.dtype == np.int64 else "float32",
        shape=list(dense.shape),
        sparse_crow_indices=crow.tolist(),
        sparse_col_indices=columns.tolist(),
    )


def test_weights_absent_are_ones(training):
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": tensor([10, 10], np.int64)}
    )
    assert training.forward_backward([datum], "cross_entropy").result(20).metrics["loss:sum"] == pytest.approx(2.02)
