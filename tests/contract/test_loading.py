"""A checkpoint that does not fit is refused by the future, in words that say what to use, and changes nothing."""

import pytest
import tinker
from fake_engine import BASE, UNTIED

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def server(start_server):
    return start_server(max_runs=4)


@pytest.fixture
def saved(training):
    """A path of each kind, from a run of rank 8."""
    return {
        "state": training.save_state("a").result(20).path,
        "sampler": training.save_weights_for_sampler("a").result(20).path,
        "external": training.save_weights_external("a").result(20).path,
    }


def refusal(future) -> str:
    with pytest.raises(tinker.RequestFailedError) as failure:
        future.result(20)
    assert failure.value.category == "user"
    return str(failure.value)


@pytest.mark.parametrize("kind", ["sampler", "external"])
def test_weights_alone_are_not_trained_on(server, client, training, saved, kind):
    before = server.engine.names()
    for load in (
        training.load_state,
        training.load_state_with_optimizer,
        client.create_training_client_from_state,
        client.create_training_client_from_state_with_optimizer,
    ):
        text = refusal(load(saved[kind]))
        assert f"is a {kind} checkpoint, which cannot be trained on; load a path that save_state returned" in text
    assert server.engine.names() == before


@pytest.mark.parametrize("kind, word", [("state", "training"), ("external", "external")])
def test_only_sampler_weights_are_sampled(client, saved, kind, word):
    with pytest.raises(tinker.BadRequestError, match=f"is a {word} checkpoint, which cannot be sampled; save with"):
        client.create_sampling_client(model_path=saved[kind]).result(20)


@pytest.mark.parametrize(
    "other, words",
    [
        ({"base_model": BASE, "rank": 4}, ("LoRA of rank 8 on attn[+]mlp", "LoRA of rank 4 on attn[+]mlp")),
        ({"base_model": BASE, "rank": 8, "train_mlp": False}, ("rank 8 on attn[+]mlp", "rank 8 on attn;")),
        ({"base_model": UNTIED, "rank": 8, "train_unembed": False}, (f"holds {BASE}", f"the run is {UNTIED}")),
    ],
)
def test_a_state_of_another_shape_is_not_loaded(server, client, saved, other, words):
    run = client.create_lora_training_client(**other).result(20)
    before = server.engine.names()
    with pytest.raises(tinker.RequestFailedError, match=".*".join(words)) as failure:
        run.load_state(saved["state"]).result(20)
    assert "create a training client from this state instead" in str(failure.value)
    assert failure.value.category == "user" and server.engine.names() == before
    assert client.create_training_client_from_state(saved["state"]).result(20).get_info().lora_rank == 8


def test_a_state_is_not_made_into_another_base_model(client, saved):
    text = refusal(client.create_training_client_from_state(saved["state"], base_model=UNTIED))
    assert f"base_model {UNTIED!r} does not fit" in text and BASE in text
