"""Each flag that is advertised switches the newest SDK to the path it names, and off again."""

import pickle

import pytest
from data import sft
from fake_engine import BASE
from recording import Recorder
from server import wait_until
from tinker import types

from verl_tinker.api.body import MAX_BODY, MAX_DATUMS
from verl_tinker.api.flags import CLIENT_CONFIG, DYNAMIC_CONFIG, MOST, chosen

pytestmark = pytest.mark.timeout(180)

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=2)


@pytest.fixture
def heard(start_server, connect):
    """Start a server with changed flags; gives it, a client of it and the recorder of its exchanges."""

    def start(**changed_flags):
        recorders = []

        def wrap(app):
            recorders.append(Recorder(app))
            return recorders[0]

        server = start_server(changed_flags=changed_flags, wrap=wrap, poll_seconds=0.2)
        return server, connect(server), recorders[0]

    return start


def paths(recorder):
    return [exchange[1] for exchange in recorder.exchanges]


@pytest.mark.parametrize("on", [True, False])
def test_completion_polling(heard, on):
    server, client, recorder = heard(sample_use_retrieve_futures=on)
    sampler = client.create_sampling_client(base_model=BASE).result(20)
    samples = [sampler.sample(PROMPT, num_samples=1, sampling_params=PARAMS) for _ in range(10)]
    assert [s.result(20).sequences[0].tokens for s in samples] == [[100, 100]] * 10
    assert ("retrieve_futures" in paths(recorder)) is on


@pytest.mark.parametrize("on", [True, False])
def test_giving_up(heard, on):
    server, client, recorder = heard(sample_cancel_enabled=on, sample_use_retrieve_futures=True)
    sampler = client.create_sampling_client(base_model=BASE).result(20)
    server.engine.hold.add("sample")
    given_up = sampler.sample(PROMPT, num_samples=1, sampling_params=PARAMS)
    wait_until(lambda: any(path.startswith("retrieve_future") for path in paths(recorder)))
    assert given_up.future().cancel()
    if on:
        wait_until(lambda: server.engine.samples_at_once == 0)
    server.engine.hold.clear()
    assert sampler.sample(PROMPT, num_samples=1, sampling_params=PARAMS).result(20).sequences[0].tokens == [100, 100]
    assert ("cancel_future" in paths(recorder)) is on


@pytest.mark.parametrize("on", [True, False])
def test_numbers_of_clones(heard, on):
    server, client, recorder = heard(sample_join_sampling_session=on)
    sampler = pickle.loads(pickle.dumps(client.create_sampling_client(base_model=BASE).result(20)))
    assert sampler.sample(PROMPT, num_samples=1, sampling_params=PARAMS).result(20).sequences[0].tokens == [100, 100]
    assert ("join_sampling_session" in paths(recorder)) is on


@pytest.mark.parametrize("on", [True, False])
def test_compression(heard, on):
    server, client, recorder = heard(proto_compress_fwdbwd=on)
    training = client.create_lora_training_client(base_model=BASE, rank=4).result(20)
    assert training.forward_backward([sft()], "cross_entropy").result(20).metrics["loss:sum"] == pytest.approx(4.04)
    encodings = [exchange[2].get("content-encoding") for exchange in recorder.exchanges if exchange[1] == "forward_backward"]
    assert encodings == ["zstd" if on else None]


def test_an_unknown_flag_is_refused():
    with pytest.raises(ValueError, match="^sample_cancel is not a flag that clients know; there are .*sample_cancel_enabled"):
        chosen({"sample_cancel": True})


def test_no_flag_lets_a_client_send_what_the_server_refuses():
    assert MOST["fwdbwd_max_chunk_len"] <= MAX_DATUMS and 2 * MOST["fwdbwd_max_chunk_bytes_count"] <= MAX_BODY
    assert chosen({**CLIENT_CONFIG, **DYNAMIC_CONFIG}) == (CLIENT_CONFIG, DYNAMIC_CONFIG)
