"""Small training data for SDK clients and raw requests."""

from __future__ import annotations

import numpy as np
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto


def tensor(values, dtype) -> types.TensorData:
    return types.TensorData.from_numpy(np.asarray(values, dtype))


def sft(length: int = 4, weight: float = 1.0, target: int = 10) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={
            "target_tokens": tensor([target] * length, np.int64),
            "weights": tensor([weight] * length, np.float32),
        },
    )


def rl(length: int = 4, advantage: float = 1.0, **more) -> types.Datum:
    inputs = {
        "target_tokens": tensor([10] * length, np.int64),
        "logprobs": tensor([-1.0] * length, np.float32),
        "advantages": tensor([advantage] * length, np.float32),
        **more,
    }
    return types.Datum(model_input=types.ModelInput.from_ints(list(range(1, length + 1))), loss_fn_inputs=inputs)


def forward_backward_body(model_id: str, seq_id: int, data, loss_fn: str = "cross_entropy", config=None) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config),
        model_id=model_id,
        seq_id=seq_id,
    )
    return forward_backward_request_to_proto(request).SerializeToString()
