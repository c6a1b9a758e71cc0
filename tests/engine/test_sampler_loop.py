"""vLLM in this process: versions, stop handling, and planted stale weights that must be caught."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import plain
import pytest
import torch
from safetensors.torch import load_file, save_file
from weights import adapter, full

from verl_tinker.core.errors import EngineError, Evicted, SyncError
from verl_tinker.core.types import SampleRequest, SamplingParams

pytestmark = pytest.mark.timeout(300)
PROMPT = np.arange(100, 130, dtype=np.int32)


@pytest.fixture(scope="module")
def tied() -> Path:
    from verl_tinker.models import resolve_model

    return resolve_model("bundled:tiny-tied")


@pytest.fixture(scope="module")
def loop(tied, tmp_path_factory):
    from verl_tinker.engine.cpu.environment import rollout_environment

    os.environ.update(rollout_environment(2, 1, str(tmp_path_factory.mktemp("vllm"))))
    from verl_tinker.engine.cpu import vllm_cpu
    from verl_tinker.engine.sampler import LORA_TARGETS
    from verl_tinker.engine.sampler_loop import SamplerLoop

    vllm_cpu.install()
    loop = SamplerLoop({
        "model": str(tied), "dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 16,
        "max_logprobs": 64, "logprobs_mode": "processed_logprobs", "seed": 0, "enable_lora": True, "max_loras": 2,
        "max_cpu_loras": 8, "max_lora_rank": 16, "lora_target_modules": LORA_TARGETS}, str(tied))
    yield loop
    loop.close()


def score(loop, version: int) -> np.ndarray:
    request = SampleRequest(PROMPT, 1, SamplingParams(max_tokens=1), prompt_logprobs=True)
    return loop.submit(request, version).result(timeout=60).prompt_logprobs[1:]


def reference(model: torch.nn.Module) -> np.ndarray:
    return plain.logprobs(model, PROMPT[:-1], PROMPT[1:]).detach().numpy()


def test_adapters_full_versions_and_the_base_answer_with_their_own_weights(loop, tied, tmp_path):
    wanted = {0: reference(plain.load_model(tied))}
    for version in (11, 12, 13):
        folder = adapter(tmp_path / f"a{version}", tied, version)
        loop.call(loop.load, version, str(folder), 8).result(timeout=60)
        wanted[version] = reference(plain.PlainRun(tied, folder).model)
    folder = full(tmp_path / "f14", tied, 0.01)
    loop.call(loop.load, 14, str(folder), 0).result(timeout=60)
    wanted[14] = reference(plain.load_model(folder))
    order = [0, 11, 14, 12, 0, 13, 14, 11, 12, 13, 0]
    futures = [loop.submit(SampleRequest(PROMPT, 1, SamplingParams(max_tokens=4), prompt_logprobs=True), v) for v in order]
    for version, future in zip(order, futures):
        result = future.result(timeout=120)
        assert result.version == version
        np.testing.assert_allclose(result.prompt_logprobs[1:], wanted[version], atol=1e-4)
    gaps = [np.abs(wanted[a] - wanted[b]).max() for a in wanted for b in wanted if a < b]
    assert min(gaps) > 1e-2, "the versions must differ for this test to mean anything"


def test_an_unloaded_version_is_refused_by_name(loop, tied, tmp_path):
    loop.call(loop.load, 21, str(adapter(tmp_path / "a", tied, 1)), 8).result(timeout=60)
    loop.call(loop.unload, 21).result(timeout=60)
    with pytest.raises(Evicted, match="21"):
        score(loop, 21)


def test_a_stale_adapter_is_caught_after_a_step_of_1e_6(loop, tied, tmp_path, monkeypatch):
    old = adapter(tmp_path / "old", tied, 5)
    new = adapter(tmp_path / "new", tied, 5)
    tensors = load_file(new / "adapter_model.safetensors")
    save_file({k: v + 1e-6 for k, v in tensors.items()}, new / "adapter_model.safetensors")
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter

    def stale(self, request):
        request.lora_path = str(old)
        return load(self, request)

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", stale)
    with pytest.raises(SyncError, match="31"):
        loop.call(loop.load, 31, str(new), 8).result(timeout=60)
    with pytest.raises(Evicted):
        score(loop, 31)
    monkeypatch.undo()
    loop.call(loop.load, 32, str(new), 8).result(timeout=60)


def test_a_stale_lm_head_is_caught_after_a_step_of_1e_6(loop, tied, tmp_path, monkeypatch):
    folder = full(tmp_path / "moved", tied, 1e-6)
    loop.call(loop.load, 41, str(folder), 0).result(timeout=60)
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    monkeypatch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda self, layer: None)
    with pytest.raises(SyncError, match="old weights"):
        score(loop, 41)
    monkeypatch.undo()
    np.testing.assert_allclose(score(loop, 41), reference(plain.load_model(folder)), atol=1e-4)
    np.testing.assert_allclose(score(loop, 0), reference(plain.load_model(tied)), atol=1e-4)


def test_full_weights_that_changed_on_their_way_are_caught(loop, tied, tmp_path):
    from verl_tinker.engine.fingerprints import write_fingerprints

    folder = full(tmp_path / "moved", tied, 0.01)
    tensors = load_file(folder / "model.safetensors")
    write_fingerprints(folder, tensors)
    loop.call(loop.load, 51, str(folder), 0).result(timeout=60)
    score(loop, 51), score(loop, 0)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[7] += 1e-6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SyncError, match=name):
        score(loop, 51)


def sample(loop, n: int = 1, **params):
    request = SampleRequest(PROMPT, n, SamplingParams(**{"max_tokens": 12, **params}))
    return loop.submit(request, 0).result(timeout=60).sequences


def test_stop_ids_strings_and_none_at_all(loop, tied):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tied)
    free = sample(loop, temperature=0.0, stop=[])[0]
    assert len(free.tokens) == 12 and free.stop_reason == "length"
    third = int(free.tokens[2])
    at_id = sample(loop, temperature=0.0, stop=[third])[0]
    first = int(np.flatnonzero(free.tokens == third)[0])
    assert at_id.stop_reason == "stop" and at_id.tokens.tolist() == free.tokens[: first + 1].tolist()
    text = tokenizer.decode(free.tokens[3:4]).strip()[-2:] or tokenizer.decode(free.tokens[3:4])
    at_text = sample(loop, temperature=0.0, stop=[text])[0]
    assert at_text.stop_reason == "stop" and len(at_text.tokens) <= 4
    assert text in tokenizer.decode(at_text.tokens), "the stop string stays in the output"


def test_seeds_reproduce_and_samples_of_one_request_differ(loop):
    first, again, other = (sample(loop, 4, seed=s) for s in (2**62 + 5, 2**62 + 5, 6))
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in again]
    assert [s.tokens.tolist() for s in first] != [s.tokens.tolist() for s in other]
    assert len({tuple(s.tokens) for s in first}) == 4


def test_top_k_prompt_log_probabilities_are_sorted_and_hold_the_likeliest(loop, tied):
    request = SampleRequest(PROMPT, 1, SamplingParams(max_tokens=1), True, 5, 3)
    result = loop.submit(request, 0).result(timeout=60)
    logits = torch.log_softmax(plain.load_model(tied)(torch.as_tensor(PROMPT[None].astype(np.int64))).logits[0], -1)
    values, ids = logits[:-1].topk(5)
    assert result.topk_prompt.ids[1:].tolist() == ids.tolist() and result.topk_prompt.ids[0].tolist() == [0] * 5
    np.testing.assert_allclose(result.topk_prompt.logprobs[1:], values.detach().numpy(), atol=1e-4)
    assert result.sequences[0].topk.ids.shape == (1, 3)


def test_greedy_samples_are_as_many_as_asked_for_and_all_the_same(loop):
    request = SampleRequest(PROMPT, 3, SamplingParams(max_tokens=4, temperature=0.0))
    sequences = loop.submit(request, 0).result(timeout=60).sequences
    assert len(sequences) == 3 and len({tuple(s.tokens.tolist()) for s in sequences}) == 1


def test_weights_that_give_no_numbers_are_an_error_not_an_answer(loop, tied, tmp_path):
    folder = adapter(tmp_path / "nan", tied, 30)
    tensors = {name: torch.full_like(t, 1e30) for name, t in load_file(folder / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    loop.call(loop.load, 30, str(folder), 8).result(timeout=60)
    with pytest.raises(EngineError, match="not numbers"):
        loop.submit(SampleRequest(PROMPT, 1, SamplingParams(max_tokens=2)), 30).result(timeout=60)
    loop.call(loop.unload, 30).result(timeout=60)
    assert np.isfinite(score(loop, 0)).all()
