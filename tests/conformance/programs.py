"""What the tests of the kit send: small data, a training step, raw calls with sequence numbers of one's own choice.

Owns the sizes, which every model and context has room for. Does not judge answers.
"""

from __future__ import annotations

import numpy as np
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

SECONDS = 300
PROTOBUF = "application/x-protobuf"
# Every tokenizer has these ids, and the tests' engine answers prompts with ids from 500 up in their own way.
TOKENS = range(10, 900)
NOTHING_CARRIED = {"beta1": 0.0, "beta2": 0.0}


def now(future):
    return future.result(SECONDS)


def prompt_of(seed: int, length: int = 8) -> list[int]:
    drawn = np.random.default_rng(seed).integers(TOKENS.start, TOKENS.stop, length)
    return [511, *drawn[1:].tolist()]


def prompt(seed: int, length: int = 8) -> types.ModelInput:
    return types.ModelInput.from_ints(prompt_of(seed, length))


def tensor(values, dtype) -> types.TensorData:
    return types.TensorData.from_numpy(np.asarray(values, dtype))


def datum(seed: int, length: int = 6, weight: float = 1.0, **inputs) -> types.Datum:
    """A sequence with targets of its own; more inputs take the place of the weights."""
    rng = np.random.default_rng(1000 + seed)
    tokens, targets = rng.integers(TOKENS.start, TOKENS.stop, (2, length))
    inputs = inputs or {"weights": tensor([weight] * length, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens.tolist()),
        loss_fn_inputs={"target_tokens": tensor(targets, np.int64), **inputs},
    )


def scored(seed: int, advantages, sampled) -> types.Datum:
    """A sequence for a loss of reinforcement learning, with advantages and the sampler's log-probabilities."""
    return datum(seed, len(advantages), advantages=tensor(advantages, np.float32), logprobs=tensor(sampled, np.float32))


def batch(first: int, count: int) -> list[types.Datum]:
    """Sequences of different lengths, so that a mean is not a sum."""
    return [datum(first + n, length=3 + 2 * n) for n in range(count)]


def step(training, learning_rate: float = 5e-3, **adam):
    return training.optim_step(types.AdamParams(learning_rate=learning_rate, eps=1e-6, **adam))


def train(training, data, **adam):
    """One forward_backward and one step, submitted together."""
    pending = [training.forward_backward(data, "cross_entropy"), step(training, **adam)]
    return [now(future) for future in pending]


PROBE = batch(900, 3)


def weights_of(training) -> np.ndarray:
    """The model as numbers: its log-probabilities of fixed data."""
    return rows(now(training.forward(PROBE, "cross_entropy")))


def rows(output) -> np.ndarray:
    return np.concatenate([np.asarray(out["logprobs"].data, np.float64).ravel() for out in output.loss_fn_outputs])


def greedy(sampler, seed: int = 1, max_tokens: int = 6, stop=(), **more):
    """The answer at temperature 0; by default nothing stops it but its length."""
    stop = list(stop) if isinstance(stop, tuple) else stop
    params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop)
    return now(sampler.sample(prompt(seed), num_samples=1, sampling_params=params, **more))


class Wire:
    """A session and a run made by plain HTTP calls, for what the SDK would not send or would hide."""

    def __init__(self, http, model: str):
        self.http = http
        self.session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")["session_id"]
        self.run = f"{self.session}:train:0"
        self.model = model

    def post(self, endpoint: str, /, **body) -> dict:
        answer = self.http.post(endpoint, json=body)
        assert answer.is_success, (endpoint, answer.status_code, answer.text)
        return answer.json()

    def create(self, rank: int = 8, seed: int = 1) -> None:
        lora = {"rank": rank, "seed": seed, "train_unembed": False, "train_mlp": True, "train_attn": True}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": self.model, "lora_config": lora}
        assert self.result(self.post("create_model", **body)["request_id"])["model_id"] == self.run

    def send_batch(self, seq: int, data, loss_fn: str = "cross_entropy", forward_only: bool = False) -> str:
        content = types.ForwardBackwardInput(data=data, loss_fn=loss_fn)
        request = types.ForwardBackwardRequest(forward_backward_input=content, model_id=self.run, seq_id=seq)
        message = forward_backward_request_to_proto(request)
        message.forward_only = forward_only
        body, headers = message.SerializeToString(), {"Content-Type": PROTOBUF}
        answer = self.http.post("forward_backward", content=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json()["request_id"]

    def step(self, seq: int, learning_rate: float = 5e-3) -> str:
        adam = {"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.0}
        return self.post("optim_step", model_id=self.run, seq_id=seq, adam_params={**adam, "grad_clip_norm": 0.0},
                         type="optim_step")["request_id"]

    def weights(self, seq: int) -> np.ndarray:
        return rows(self.result(self.send_batch(seq, PROBE, forward_only=True)))

    def result(self, request_id: str):
        """The result, decoded; an error as the JSON that it is. Polls as often as the server asks for."""
        for _ in range(1000):
            body = {"request_id": request_id, "allow_metadata_only": False}
            answer = self.http.post("retrieve_future", json=body, headers={"Accept": PROTOBUF})
            if answer.status_code != 408 and b'"try_again"' not in answer.content[:200]:
                break
        assert answer.is_success, (answer.status_code, answer.text)
        if PROTOBUF not in answer.headers["content-type"]:
            return answer.json()
        try:
            found = deserialize_forward_backward_output(answer.content)
            if found.loss_fn_outputs:
                return found
        except Exception:  # noqa: BLE001  the two messages have no tag that tells them apart
            pass
        return deserialize_sample_response(answer.content)
