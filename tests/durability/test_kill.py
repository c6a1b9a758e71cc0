"""A server that is killed at any moment: what was saved is there, what was accepted is answered, nothing acts twice.

A client trains, saves and samples without a pause, and does what an SDK does when the server is away: it sends the
same call again. When it is told that its run is lost, it resumes from its last saved state. It knows the weight that
each state must have, so that each resumed run is checked bit for bit against the uninterrupted one.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from data import forward_backward_body, sft
from fake_engine import BASE, VOCAB
from fake_server import FakeServer
from raw import PROTOBUF
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

pytestmark = pytest.mark.timeout(300)
RATE, TARGET = 0.01, 10


class Lost(Exception):
    """The run is not live any more; `path` is where the server says to resume from."""

    def __init__(self, text: str):
        super().__init__(text)
        self.path = text.split("optimizer('")[1].split("'")[0] if "optimizer('" in text else None


class Client(threading.Thread):
    """Runs until `over`. `accepted` are the request ids it was ever given, `saved` the weight and moment by path."""

    def __init__(self, server: FakeServer):
        super().__init__(daemon=True)
        self.http = server.http(timeout=20)
        self.over, self.go, self.failure = threading.Event(), threading.Event(), None
        self.go.set()
        self.accepted: list[str] = []
        self.saved: dict[str, tuple[float, float]] = {}
        self.last: str | None = None
        self.resumed = self.steps = self.samples = 0

    def run(self) -> None:
        try:
            while not self.over.is_set():
                try:
                    self.train(self.begin())
                except Lost as lost:
                    # The newest state that the server knows is the one that this client saved last, or tried to.
                    assert lost.path is None or lost.path in self.saved, lost
                    self.last = lost.path or self.last
        except Exception as error:
            self.failure = error

    def call(self, endpoint: str, body: dict | bytes, **headers) -> httpx.Response:
        """Send until the server answers, as the SDK does."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            self.go.wait()
            try:
                answer = self.http.post(f"/{endpoint}", content=content, headers=headers)
                if answer.status_code not in (408, 429, 503):
                    return answer
            except httpx.TransportError:
                pass
            if self.over.is_set():
                raise Lost("the test is over")
            time.sleep(0.02)

    def submit(self, endpoint: str, body: dict | bytes, **headers) -> str:
        answer = self.call(endpoint, body, **headers)
        assert answer.status_code == 200, answer.text
        request = answer.json()["request_id"]
        self.accepted.append(request)
        return request

    def result(self, request: str):
        answer = self.call("retrieve_future", {"request_id": request}, Accept=PROTOBUF)
        if answer.status_code == 410:
            return None
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == PROTOBUF:
            decode = deserialize_sample_response if request.startswith("sample") else deserialize_forward_backward_output
            return decode(answer.content)
        content = answer.json()
        if "error" in content:
            assert content["category"] == "server", content
            raise Lost(content["error"])
        return content

    def begin(self) -> tuple[str, str, float, float]:
        session = self.call("create_session", {}).json()["session_id"]
        model = f"{session}:train:0"
        if self.last is None:
            body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
            self.result(self.submit("create_model", body))
            return session, model, 0.0, 0.0
        path = self.last
        body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        self.result(self.submit("load_weights", body))
        self.resumed += 1
        return session, model, *self.saved[path]

    def train(self, run: tuple[str, str, float, float]) -> None:
        session, model, weight, moment = run
        seq = 0
        for n in range(1_000_000):
            if self.over.is_set():
                return
            step = forward_backward_body(model, seq + 1, [sft(length=2, target=TARGET)], "cross_entropy", None)
            forward = self.submit("forward_backward", step, **{"Content-Type": PROTOBUF})
            adam = {"model_id": model, "seq_id": seq + 2, "adam_params": {"learning_rate": RATE}}
            stepped = self.submit("optim_step", adam)
            seen = np.asarray(self.result(forward).loss_fn_outputs[0]["logprobs"].data, np.float32)
            assert np.array_equal(seen, np.full(2, np.float32(weight - 1 - TARGET / 1000))), (seen, weight)
            self.result(stepped)
            weight, moment = weight + RATE * (2.0 + moment), 2.0
            self.steps += 1
            seq += 2
            if n % 2:
                seq += 1
                self.save(session, model, seq, f"state-{seq}", weight, moment)
            if n % 3 == 2:
                seq += 1
                self.sample(session, model, seq, n, weight)

    def save(self, session: str, model: str, seq: int, name: str, weight: float, moment: float) -> None:
        path = f"tinker://{model}/weights/{name}"
        self.saved[path] = (weight, moment)
        saved = self.result(self.submit("save_weights", {"model_id": model, "seq_id": seq, "path": name}))
        assert saved["path"] == path
        self.last = path

    def sample(self, session: str, model: str, seq: int, n: int, weight: float) -> None:
        named = {"model_id": model, "seq_id": seq, "path": f"sampler-{seq}"}
        path = self.result(self.submit("save_weights_for_sampler", named))["path"]
        body = {"session_id": session, "sampling_session_seq_id": n, "model_path": path}
        answer = self.call("create_sampling_session", body)
        assert answer.status_code == 200, answer.text
        for number in range(20):
            request = self.submit("asample", {
                "sampling_session_id": answer.json()["sampling_session_id"], "seq_id": number,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 1}})
            drawn = self.result(request)
            if drawn is not None:
                break
        # A named sampler outlives the server, and answers with its own weights.
        assert list(drawn.sequences[0].tokens) == [(100 + round(weight * 1000)) % VOCAB]
        self.samples += 1


def check_disk(folder: Path, http: httpx.Client) -> None:
    """The listing is what lies on the disk, each of it whole, and nothing half-made is left."""
    listed = {c["tinker_path"] for c in http.get("/checkpoints?limit=10000").json()["checkpoints"]}
    on_disk = {json.loads(file.read_text())["tinker_path"]: file.parent for file in folder.glob("*/*/*/meta.json")}
    assert listed == set(on_disk)
    for path, place in on_disk.items():
        content = json.loads((place / ("state.json" if "/weights/" in path else "sampler.json")).read_text())
        assert content is not None
    assert not [p for p in folder.rglob("*") if p.name.endswith((".part", ".replaced")) or ".removed-" in p.name]
    unfinished = folder / ".unfinished"
    assert not unfinished.exists() or len(list(unfinished.iterdir())) <= 1


def check_answers(client: Client, http: httpx.Client) -> None:
    """Every operation that was ever accepted has an answer now, and samples may be sent again."""
    for request in client.accepted[-200:]:
        answer = http.post("/retrieve_future", json={"request_id": request})
        if request.startswith("sample"):
            assert answer.status_code in (200, 408, 410), answer.text
        else:
            assert answer.status_code in (200, 408), answer.text


def run_with_kills(folder: Path, kills: int, seed: int) -> Client:
    rng = random.Random(seed)
    server = FakeServer(folder, "--delay", "0.003", "--poll-seconds", "2").start()
    client = Client(server)
    client.start()
    try:
        for _ in range(kills):
            time.sleep(rng.uniform(0.02, 1.2))
            # The checks look at what the dead server left, before anybody adds to it.
            client.go.clear()
            server.kill()
            server.start()
            with server.http() as http:
                check_disk(folder, http)
                check_answers(client, http)
            client.go.set()
            assert client.failure is None, repr(client.failure)
        time.sleep(1.0)
    finally:
        client.over.set()
        client.go.set()
        client.join(30)
        server.stop()
    if client.failure:
        raise client.failure
    return client


def test_three_kills(tmp_path):
    client = run_with_kills(tmp_path, 3, seed=1)
    assert client.resumed >= 1 and client.steps > 20 and client.samples > 3


@pytest.mark.full
def test_twenty_kills(tmp_path):
    client = run_with_kills(tmp_path, 20, seed=2)
    assert client.resumed >= 10 and client.steps > 100 and client.samples > 20
