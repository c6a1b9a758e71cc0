"""One client program for every SDK version: trains, saves, loads and samples, and prints the numbers it saw as JSON.

Owns the program. Does not know what the numbers should be: `test_matrix` does. Runs inside a version's environment:
`python driver.py URL`.
"""

import json
import io
import pickle
import sys
import tarfile
from urllib.request import urlopen

import tinker
from tinker import types

BASE = "fake/tied"
TIMEOUT = 60
# SDKs before 0.25 cut a batch at this many datums whatever the server says.
CHUNK = 1024
PROMPT = [5, 6, 7]


def now(value):
    """A client or a result: some versions return it where others return a future of it."""
    return value.result(TIMEOUT) if hasattr(value, "result") else value


def datum(length=1, target=10, weight=None):
    inputs = {"target_tokens": types.TensorData(data=[target] * length, dtype="int64", shape=[length])}
    if weight is not None:
        inputs["weights"] = types.TensorData(data=[weight] * length, dtype="float32", shape=[length])
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))), loss_fn_inputs=inputs
    )


def floats(values):
    return [None if value is None else round(float(value), 5) for value in values]


def outputs(result):
    return [floats(output["logprobs"].data) for output in result.loss_fn_outputs]


def step(training, learning_rate=0.001):
    return now(training.optim_step(types.AdamParams(learning_rate=learning_rate))).metrics["grad_norm"]


def weight_of(training):
    """What the fake engine holds, seen through a forward pass: the log-probability of token 0 is the weight minus 1."""
    return round(1 + outputs(now(training.forward([datum(target=0, weight=1.0)], "cross_entropy")))[0][0], 5)


def train(training):
    seen = {}
    result = now(training.forward([datum(3, 10, 0.5)], "cross_entropy"))
    seen["forward"] = [outputs(result), round(result.metrics["loss:sum"], 4)]
    data = [datum(1, 10, 0.0625)] * CHUNK + [datum(2, 20, -7.0)]
    backward = training.forward_backward(data, "cross_entropy")
    # Asked for before the result of the pass is read, as the SDK's documentation advises.
    stepping = training.optim_step(types.AdamParams(learning_rate=0.001))
    result = now(backward)
    rows = outputs(result)
    seen["chunks"] = [len(rows), rows[0], rows[-1], round(result.metrics["loss:sum"], 3)]
    seen["grad_norm"] = now(stepping).metrics["grad_norm"]
    seen["stepped"] = weight_of(training)
    result = now(training.forward_backward_custom([datum(2)], twice_the_sum))
    seen["custom"] = round(result.metrics["mine"], 5)
    seen["custom_grad_norm"] = step(training)
    seen["custom_stepped"] = weight_of(training)
    return seen


def twice_the_sum(data, logprobs):
    loss = sum(2 * row.sum() for row in logprobs)
    return loss, {"mine": loss.item()}


def resume(service, training):
    """Save, go on, then load with and without the optimizer, into new runs and into the live one."""
    state = now(training.save_state("state", ttl_seconds=7200)).path
    seen = {"state": state.replace(training.model_id, "RUN")}
    now(training.forward_backward([datum(weight=8.0)], "cross_entropy"))
    step(training)
    seen["went_on"] = weight_of(training)
    now(training.load_state(state))
    seen["loaded"] = weight_of(training)
    now(training.load_state_with_optimizer(state))
    now(training.forward_backward([datum(weight=8.0)], "cross_entropy"))
    step(training)
    seen["loaded_with_optimizer"] = weight_of(training)
    for name, create in (
        ("with_optimizer", service.create_training_client_from_state_with_optimizer),
        ("without_optimizer", service.create_training_client_from_state),
    ):
        resumed = now(create(state))
        now(resumed.forward_backward([datum(weight=8.0)], "cross_entropy"))
        step(resumed)
        seen[name] = weight_of(resumed)
    info = now(training.get_info())
    seen["info"] = [info.model_data.model_name, info.is_lora, info.lora_rank]
    return seen


def drawn(sampler, count=1, tokens=2, **more):
    params = types.SamplingParams(max_tokens=tokens, temperature=1.0, seed=3)
    prompt = types.ModelInput.from_ints(PROMPT)
    return sampler.sample(prompt, num_samples=count, sampling_params=params, **more)


def sample(service, training):
    snapshot = now(training.save_weights_and_get_sampling_client())
    path = now(training.save_weights_for_sampler("final")).path
    named = now(service.create_sampling_client(model_path=path))
    base = now(service.create_sampling_client(base_model=BASE))
    now(training.forward_backward([datum(weight=8.0)], "cross_entropy"))
    step(training)
    response = now(drawn(snapshot, 2, 3))
    seen = {
        "sampler": path.replace(training.model_id, "RUN"),
        "drawn": [[list(s.tokens), floats(s.logprobs), str(s.stop_reason)] for s in response.sequences],
        "named": list(now(drawn(named)).sequences[0].tokens),
        "base": list(now(drawn(base)).sequences[0].tokens),
        "base_model": named.get_base_model(),
        "clone": list(now(drawn(pickle.loads(pickle.dumps(snapshot)))).sequences[0].tokens),
        "prompt": floats(now(snapshot.compute_logprobs(types.ModelInput.from_ints(PROMPT)))),
    }
    rich = now(drawn(base, include_prompt_logprobs=True, topk_prompt_logprobs=2))
    seen["prompt_of_base"] = floats(rich.prompt_logprobs)
    seen["topk"] = [row and [[token, round(logprob, 5)] for token, logprob in row] for row in rich.topk_prompt_logprobs]
    seen["many"] = sorted({tuple(now(f).sequences[0].tokens) for f in [drawn(named) for _ in range(20)]})
    # The server is told to stop the sample where the client and the flags know of that; nothing else may suffer.
    given_up = drawn(named)
    (given_up.future() if hasattr(given_up, "future") else given_up).cancel()
    seen["after_giving_up"] = list(now(drawn(named)).sequences[0].tokens)
    return seen


def rest(service, training):
    client, run = service.create_rest_client(), training.model_id
    state, weights = (f"tinker://{run}/{name}" for name in ("weights/state", "sampler_weights/final"))

    def listed(checkpoints):
        rows = [c for c in checkpoints if c.tinker_path.startswith(f"tinker://{run}/")]
        return sorted([c.checkpoint_id, c.checkpoint_type, c.expires_at is not None] for c in rows)

    found = now(client.get_training_run(run))
    info = now(client.get_weights_info_by_tinker_path(state))
    seen = {
        "models": sorted(m.model_name for m in now(service.get_server_capabilities()).supported_models),
        "run": [found.training_run_id == run, found.base_model, found.is_lora, found.lora_rank, found.user_metadata],
        "run_by_path": now(client.get_training_run_by_tinker_path(weights)).training_run_id == run,
        "in_runs": [r.training_run_id for r in now(client.list_training_runs(limit=1000)).training_runs].count(run),
        "weights": [info.base_model, info.is_lora, info.lora_rank],
        "of_run": listed(now(client.list_checkpoints(run)).checkpoints),
        "of_user": listed(now(client.list_user_checkpoints(limit=1000)).checkpoints),
    }
    now(client.set_checkpoint_ttl_from_tinker_path(state, None))
    now(client.set_checkpoint_ttl_from_tinker_path(weights, 7200))
    seen["after_ttl"] = listed(now(client.list_checkpoints(run)).checkpoints)
    now(client.delete_checkpoint_from_tinker_path(weights))
    seen["after_delete"] = listed(now(client.list_checkpoints(run)).checkpoints)
    return seen


def share(service, training):
    """What other programs may get of a run: publication, listings of sessions, and what only some versions offer."""
    client, run = service.create_rest_client(), training.model_id
    state, session = f"tinker://{run}/weights/state", run.split(":train:")[0]

    def public():
        return [c.public for c in now(client.list_checkpoints(run)).checkpoints if c.tinker_path == state]

    seen = {"public": public()}
    now(client.publish_checkpoint_from_tinker_path(state))
    seen["public"] += public()
    now(client.unpublish_checkpoint_from_tinker_path(state))
    seen["public"] += public()
    found = now(client.get_session(session))
    seen["session"] = [len(found.training_run_ids), found.training_run_ids.count(run), len(found.sampler_ids)]
    samplers = [now(client.get_sampler(sampler)) for sampler in found.sampler_ids]
    paths = [str(sampler.model_path).replace(run, "RUN") for sampler in samplers]
    seen["samplers"] = sorted([sampler.base_model, path] for sampler, path in zip(samplers, paths))
    seen["in_sessions"] = now(client.list_sessions(limit=1000)).sessions.count(session)
    if hasattr(client, "get_checkpoint_archive_url_from_tinker_path"):
        link = now(client.get_checkpoint_archive_url_from_tinker_path(state)).url
        with tarfile.open(fileobj=io.BytesIO(urlopen(link, timeout=TIMEOUT).read())) as tar:
            seen["archive"] = sorted(tar.getnames())
    if hasattr(training, "save_weights_external"):
        path = now(training.save_weights_external("out")).path
        urls = now(client.get_external_weights_urls(path)).urls
        contents = {name: urlopen(link, timeout=TIMEOUT).read().decode() for name, link in urls.items()}
        seen["external"] = [path.replace(run, "RUN"), contents]
        now(client.delete_checkpoint_from_tinker_path(path))
    if hasattr(service, "copy_weights"):
        copy = now(service.copy_weights(state, ttl_seconds=7200))
        seen["copy"] = [copy != state, weight_of(now(service.create_training_client_from_state(copy)))]
    return seen


def main(url):
    service = tinker.ServiceClient(base_url=url)
    training = now(
        service.create_lora_training_client(base_model=BASE, rank=8, seed=1, user_metadata={"made": "here"})
    )
    seen = {
        "train": train(training),
        "resume": resume(service, training),
        "sample": sample(service, training),
        "share": share(service, training),
        "rest": rest(service, training),
    }
    if hasattr(service, "close"):
        now(service.close("success"))
    print(json.dumps({"sdk": tinker.__version__, "seen": seen}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
