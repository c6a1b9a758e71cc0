"""A checkpoint that does not fit is refused by the future, in words that say what to use, and changes nothing."""

import asyncio

import httpx
import pytest
import tinker
from fake_engine import BASE, UNTIED
from tinker import types

from verl_tinker.core.checkpoints import parse_path
from verl_tinker.core.errors import EngineError

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


def test_a_checkpoint_that_lost_a_file_is_refused_before_the_engine_works(server, client, training, saved):
    rest = tinker.RestClient(base_url=server.url)
    links = rest.get_external_weights_urls(saved["external"]).result(20).urls
    run, kind, name = saved["state"].removeprefix("tinker://").split("/")
    with server.http() as http:
        archive = http.get(f"/training_runs/{run}/checkpoints/{kind}/{name}/archive").headers["location"]
    sampler = client.create_sampling_client(model_path=saved["sampler"]).result(20)
    store = server.service.catalog._checkpoints
    evicted = server.service.samplers._versions.evict_checkpoint(store.get(parse_path(saved["sampler"])).uid, "newer ones came")
    asyncio.run_coroutine_threadsafe(evicted, server.loop).result(20)
    for path, name in ((saved["state"], "state.json"), (saved["sampler"], "sampler.json"), (saved["external"], "weights.json")):
        (store.folder(parse_path(path)) / name).unlink()
    before = server.engine.names()
    prompt = types.ModelInput.from_ints([1, 2])
    for broken, call in (
        ("state", lambda: training.load_state(saved["state"]).result(20)),
        ("state", lambda: client.create_training_client_from_state_with_optimizer(saved["state"]).result(20)),
        ("state", lambda: rest.copy_weights(saved["state"], "p").result(20)),
        ("sampler", lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(20)),
        ("external", lambda: rest.get_external_weights_urls(saved["external"]).result(20)),
    ):
        with pytest.raises(tinker.TinkerError, match=f"{saved[broken]} is damaged: .* bytes were saved and .* are left") as failure:
            call()
        assert str(store.root) not in str(failure.value)
    assert "is damaged" in httpx.get(archive).json()["detail"]
    assert httpx.get(links["weights.json"]).status_code == 404
    assert server.engine.names() == before


@pytest.mark.parametrize("error", [
    EngineError("the trainer failed in load_run: FileNotFoundError: [Errno 2] No such file or directory: '{}/a b/o.safetensors'"),
    EngineError("the trainer failed in load_run: FileNotFoundError: No such file or directory: {}/o.safetensors"),
    OSError("Error while deserializing {}/o.safetensors"),
])
def test_what_fails_inside_names_files_and_no_folders_of_the_server(server, training, saved, error, caplog):
    folder = str(server.service.catalog._checkpoints.root)
    server.engine.fail["load_state"] = type(error)(str(error).format(folder))
    with pytest.raises(tinker.RequestFailedError, match="o.safetensors") as failure:
        training.load_state(saved["state"]).result(20)
    assert failure.value.category == "server" and "/o.safetensors" not in str(failure.value)
    assert folder not in str(failure.value) and folder in caplog.text
