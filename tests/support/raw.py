"""Raw requests, for what the SDK would not send or would hide."""

from __future__ import annotations

from data import forward_backward_body, sft
from fake_engine import BASE
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

PROTOBUF = "application/x-protobuf"


class Raw:
    """One HTTP client with a session, a model and the shapes of the usual requests."""

    def __init__(self, http, base_model: str = BASE):
        self.http = http
        self.session = http.post("/create_session", json={"tags": []}).json()["session_id"]
        self.model = f"{self.session}:train:0"
        self.base_model = base_model

    def post(self, endpoint: str, /, **body) -> dict:
        answer = self.http.post(f"/{endpoint}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def create(self, number: int = 0, rank: int = 4) -> dict:
        accepted = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=self.base_model,
            lora_config={"rank": rank},
        )
        return self.result(accepted["request_id"])

    def forward_backward(self, seq: int, data=None, loss_fn: str = "cross_entropy", config=None, **headers) -> str:
        body = forward_backward_body(self.model, seq, data or [sft()], loss_fn, config)
        answer = self.http.post("/forward_backward", content=body, headers={"Content-Type": PROTOBUF, **headers})
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    def optim_step(self, seq: int, learning_rate: float = 0.01) -> str:
        adam = {"learning_rate": learning_rate}
        return self.post("optim_step", model_id=self.model, seq_id=seq, adam_params=adam)["request_id"]

    def snapshot(self, seq: int, number: int) -> str:
        return self.post(
            "save_weights_for_sampler", model_id=self.model, seq_id=seq, sampling_session_seq_id=number
        )["request_id"]

    def sample(self, sampler: str, seq: int = 0, prompt=(1, 2), **more) -> str:
        params = more.pop("params", {"max_tokens": 1})
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": params,
            **more,
        }
        return self.post("asample", **body)["request_id"]

    def base_sampler(self, number: int = 100) -> str:
        return self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=number,
            base_model=self.base_model,
        )["sampling_session_id"]

    def result(self, request_id: str) -> dict:
        answer = self.http.post("/retrieve_future", json={"request_id": request_id})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def binary(self, request_id: str):
        """A result as protobuf, decoded by the SDK's own functions; an error as its JSON."""
        answer = self.http.post("/retrieve_future", json={"request_id": request_id}, headers={"Accept": PROTOBUF})
        if answer.headers["content-type"] != PROTOBUF:
            return answer.json()
        decode = deserialize_sample_response if request_id.startswith("sample") else deserialize_forward_backward_output
        return decode(answer.content)
