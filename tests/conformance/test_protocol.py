"""The HTTP side: what is not offered, what is not known, what cannot be read, and what must always be answered."""

import pytest
from programs import PROTOBUF, prompt_of

CALLS = ("create_session session_heartbeat create_model get_info forward_backward optim_step save_weights load_weights "
         "save_weights_for_sampler create_sampling_session asample retrieve_future weights_info").split()


def check_refusal(answer):
    """A 4xx with words: an empty 400 is taken for a fault of a proxy, and a 5xx is sent again for minutes."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.json()["detail"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_what_is_not_offered_is_not_found(method, http):
    answer = http.request(method, "no/where")
    assert answer.status_code == 404 and answer.json()["detail"]


@pytest.mark.parametrize("call", CALLS)
def test_bodies_that_cannot_be_read_are_refused(call, http):
    for body in (b"{", b"\xff\xfe", b"[" * 50_000):
        check_refusal(http.post(call, content=body, headers={"Content-Type": "application/json"}))


def test_protobuf_that_cannot_be_read_is_refused(http):
    for body in (b"\xff" * 20, b"\x0a\x7fshort"):
        check_refusal(http.post("forward_backward", content=body, headers={"Content-Type": PROTOBUF}))


def test_a_future_that_is_not_known_ends_the_wait(http):
    for request in ("nobody-knows-this", "sample-nobody-knows-this"):
        answer = http.post("retrieve_future", json={"request_id": request, "allow_metadata_only": False})
        # 410 and 404 end the wait by themselves; a 200 has to say that it is a failure.
        assert answer.status_code in (200, 404, 410)
        said = answer.json()
        if answer.status_code == 200:
            assert said["error"] and said["category"] in ("unknown", "server", "user")
        else:
            assert said["detail"]


@pytest.mark.parametrize("method, path", [
    ("GET", "training_runs/nobody:train:0"), ("GET", "samplers/nobody:sample:0"), ("GET", "sessions/nobody"),
    ("DELETE", "training_runs/nobody:train:0/checkpoints/weights/none")])
def test_things_that_are_not_known_are_not_found(method, path, http):
    answer = http.request(method, path)
    assert answer.status_code == 404 and answer.json()["detail"]


def test_a_sample_for_an_unknown_sampler_is_refused_at_once(http):
    words = {"chunks": [{"type": "encoded_text", "tokens": prompt_of(1)}]}
    body = {"sampling_session_id": "nobody:sample:0", "seq_id": 0, "num_samples": 1, "type": "sample", "prompt": words,
            "sampling_params": {"max_tokens": 1}}
    answer = http.post("asample", json=body)
    assert answer.status_code == 404 and answer.json()["detail"]


def test_a_command_of_an_unknown_run_is_told_by_its_future(http, wire):
    """A refused POST of a chunk would lock up the client; 404 is fine for single commands."""
    body = {"model_id": "nobody:train:0", "seq_id": 1, "adam_params": {}, "type": "optim_step"}
    answer = http.post("optim_step", json=body)
    if answer.status_code != 404:
        assert wire.result(answer.json()["request_id"])["category"] in ("user", "server")
    wire.run = "nobody:train:0"
    assert wire.result(wire.send_batch(1, []))["error"]


def test_background_calls(http, wire):
    config = http.post("client/config", json={"sdk_version": "0.38.0"})
    assert config.status_code == 200 and isinstance(config.json(), dict)
    assert http.post("client/dynamic_config", json={"sdk_version": "0.38.0"}).status_code in (200, 404)
    assert http.post("session_heartbeat", json={"session_id": wire.session, "type": "session_heartbeat"}).is_success
    events = {"events": [], "platform": "x", "sdk_version": "0.38.0", "session_id": wire.session, "session_index": 0}
    assert http.post("telemetry", json=events).is_success


def test_fields_of_newer_clients_are_ignored(wire):
    info = wire.post("get_info", model_id=wire.run, type="get_info", of_a_later_sdk={"anything": [1]})
    assert info["model_id"] == wire.run and info["model_data"]["model_name"] == wire.model


def test_capabilities(http, target):
    models = http.get("get_server_capabilities").json()["supported_models"]
    assert target.model in [model["model_name"] for model in models]
