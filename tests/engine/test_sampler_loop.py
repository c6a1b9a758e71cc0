"""vLLM in this process: versions, stop handling, and planted stale weights that must be caught."""

from __future__ import annotations

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


@pytest.mark.parametrize("n", [1, 3])
def test_tokens_are_told_as_they_are_drawn_and_are_those_of_the_result(loop, n):
    request = SampleRequest(PROMPT, n, SamplingParams(max_tokens=12, seed=4, stop=[]), topk_sample_logprobs=2)
    plainly, told = loop.submit(request, 0).result(timeout=60), []
    result = loop.submit(request, 0, told.append).result(timeout=60)
    assert len(told) >= 8 * n and result.version == 0
    for index, sequence in enumerate(result.sequences):
        parts = [part for part in told if part.index == index]
        seen = sum(len(part.tokens) for part in parts)
        assert sequence.tokens.tolist() == plainly.sequences[index].tokens.tolist() and seen >= 8
        assert np.concatenate([part.tokens for part in parts]).tolist() == sequence.tokens[:seen].tolist()
        np.testing.assert_array_equal(np.concatenate([part.logprobs for part in parts]), sequence.logprobs[:seen])
        np.testing.assert_array_equal(np.concatenate([part.topk.ids for part in parts]), sequence.topk.ids[:seen])


def test_weights_that_give_no_numbers_are_an_error_not_an_answer(loop, tied, tmp_path):
    folder = adapter(tmp_path / "nan", tied, 30)
    tensors = {name: torch.full_like(t, 1e30) for name, t in load_file(folder / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    loop.call(loop.load, 30, str(folder), 8).result(timeout=60)
    with pytest.raises(EngineError, match="not numbers"):
        loop.submit(SampleRequest(PROMPT, 1, SamplingParams(max_tokens=2)), 30).result(timeout=60)
    with pytest.raises(EngineError, match="not numbers"):
        loop.submit(SampleRequest(PROMPT, 1, SamplingParams(max_tokens=9, stop=[])), 30, pytest.fail).result(timeout=60)
    loop.call(loop.unload, 30).result(timeout=60)
    assert np.isfinite(score(loop, 0)).all()


def distributions(model: torch.nn.Module, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """float32[T, V]: log-probabilities of each of the tokens after the prompt, at a temperature."""
    whole = np.concatenate([PROMPT, tokens])[:-1].astype(np.int64)
    with torch.no_grad():
        return torch.log_softmax(model(torch.as_tensor(whole[None])).logits[0, len(PROMPT) - 1 :].float() / temperature, -1)


def test_sampled_tokens_have_tempered_log_probabilities_and_prompts_have_not(loop, tied):
    model = plain.load_model(tied)
    request = SampleRequest(PROMPT, 1, SamplingParams(max_tokens=8, temperature=0.3, seed=2, stop=[]), True, 0, 4)
    result = loop.submit(request, 0).result(timeout=60)
    drawn = result.sequences[0]
    table = distributions(model, drawn.tokens, 0.3)
    np.testing.assert_allclose(drawn.logprobs, table[np.arange(8), drawn.tokens.astype(np.int64)], atol=1e-4)
    values, ids = table.topk(4)
    assert drawn.topk.ids.tolist() == ids.tolist()
    np.testing.assert_allclose(drawn.topk.logprobs, values.numpy(), atol=1e-4)
    np.testing.assert_allclose(result.prompt_logprobs[1:], reference(model), atol=1e-4)


def test_top_k_of_one_is_greedy_and_certain(loop):
    best = sample(loop, temperature=0.0, stop=[])[0].tokens.tolist()
    for drawn in sample(loop, 3, top_k=1, temperature=2.0, stop=[]):
        assert drawn.tokens.tolist() == best
        np.testing.assert_allclose(drawn.logprobs, 0, atol=1e-6)


def test_top_p_draws_from_the_nucleus_by_its_own_distribution(loop, tied):
    model, top_p = plain.load_model(tied), 0.4
    for drawn in sample(loop, 6, top_p=top_p, temperature=0.1, stop=[], seed=3):
        table = distributions(model, drawn.tokens, 0.1).exp()
        for row, token, logprob in zip(table, drawn.tokens, drawn.logprobs):
            ranked = row.sort(descending=True)
            nucleus = ranked.indices[: int((ranked.values.cumsum(0) < top_p).sum()) + 1].tolist()
            assert token in nucleus
            assert abs(float(torch.log(row[token] / row[nucleus].sum())) - logprob) < 1e-3


def test_without_max_tokens_an_answer_runs_to_the_end_of_the_context(loop):
    prompt = np.tile(PROMPT, 17)[:500]
    drawn = loop.submit(SampleRequest(prompt, 1, SamplingParams(stop=[])), 0).result(timeout=60).sequences[0]
    assert len(drawn.tokens) == 12 and drawn.stop_reason == "length"


def test_a_repeated_prompt_is_taken_from_the_cache_and_a_seed_does_not_mind(loop):
    """At first the prompt goes through in three chunks, then in one."""
    prompt = np.random.default_rng(8).integers(100, 40000, 300).astype(np.int32)
    params = SamplingParams(max_tokens=8, seed=5, stop=[])
    first, again = (loop.submit(SampleRequest(prompt, 1, params), 0).result(timeout=60) for _ in range(2))
    assert (first.cache_hit_tokens, again.cache_hit_tokens) == (0, 256)
    assert first.sequences[0].tokens.tolist() == again.sequences[0].tokens.tolist()


def test_seeded_prompts_that_do_not_fit_into_one_step_disturb_nobody(loop):
    prompts = [np.random.default_rng(i).integers(100, 40000, 90).astype(np.int32) for i in range(20, 26)]
    params = SamplingParams(max_tokens=6, seed=1, stop=[])

    def submit(prompt):
        return loop.submit(SampleRequest(prompt, 1, params), 0)

    def tokens(future):
        return future.result(timeout=60).sequences[0].tokens.tolist()

    alone = [tokens(submit(prompt)) for prompt in prompts]
    assert [tokens(future) for future in [submit(prompt) for prompt in prompts]] == alone
