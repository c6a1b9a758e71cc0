"""Targets and alternative tokens of prompts in vLLM, against plain transformers in float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plain
import pytest
import torch
from weights import adapter

from verl_tinker.core.types import Matrix, SampleRequest, SamplingParams

pytestmark = pytest.mark.timeout(300)

VOCAB = 49152
SHORT = np.arange(100, 130, dtype=np.int32)
# More than two chunks of the fixture's engine, the last of them a part.
LONG = np.random.default_rng(3).integers(100, 40000, 300).astype(np.int32)
ONE = SamplingParams(max_tokens=1)


def ask(loop, prompt=SHORT, version=0, params=ONE, **what):
    return loop.submit(SampleRequest(prompt, what.pop("n", 1), params, **what), version)


def answer(*args, **kwargs):
    return ask(*args, **kwargs).result(timeout=120)


def log_softmax(model: torch.nn.Module, prompt: np.ndarray) -> torch.Tensor:
    """float32[P - 1, V]: row i is over what stands at prompt position i + 1."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.as_tensor(prompt[None].astype(np.int64))).logits[0, :-1].float(), -1)


def dense(prompt: np.ndarray, k: int = 3) -> Matrix:
    ids = np.random.default_rng(len(prompt)).integers(0, VOCAB, (len(prompt) - 1, k))
    ids[1], ids[5, 1], ids[7] = -1, -1, ids[7, 0]
    return Matrix(ids.ravel(), ids.shape)


def sparse(prompt: np.ndarray) -> Matrix:
    """Ids at the first row, at both sides of a chunk's end where there is one, and many at the last row."""
    rows = sorted({0, min(127, len(prompt) - 3), min(128, len(prompt) - 3)})
    counts = np.zeros(len(prompt) - 1, np.int64)
    counts[rows], counts[-1] = 2, 90
    ids = np.random.default_rng(1).integers(0, VOCAB, counts.sum())
    crow = np.concatenate([[0], np.cumsum(counts)])
    return Matrix(ids, (len(prompt) - 1, 1000), crow, np.concatenate([np.arange(n) for n in counts]))


def scored(table: torch.Tensor, targets: Matrix) -> np.ndarray:
    values = table[torch.as_tensor(targets.rows()), torch.as_tensor(np.maximum(targets.values, 0))].numpy()
    return np.where(targets.values < 0, 0, values)


@pytest.fixture(scope="module")
def versions(loop, tied, tmp_path_factory):
    """Plain models by version: the base and an adapter, loaded into the engine too."""
    folder = adapter(tmp_path_factory.mktemp("scores") / "a", tied, 7)
    loop.call(loop.load, 61, str(folder), 8).result(timeout=60)
    yield {0: plain.load_model(tied), 61: plain.PlainRun(tied, folder).model}
    loop.call(loop.unload, 61).result(timeout=60)


def test_targets_are_those_of_the_plain_model_in_one_batch_of_all_kinds(loop, versions):
    asked = [(version, prompt, make(prompt)) for version in versions for prompt in (SHORT, LONG) for make in (dense, sparse)]
    futures = [ask(loop, prompt, version, target_prompt=targets) for version, prompt, targets in asked]
    for (version, prompt, targets), future in zip(asked, futures):
        found = future.result(timeout=120).target_prompt
        assert (found.shape, found.values.dtype) == (targets.shape, np.float32)
        assert found.crow_indices is targets.crow_indices or found.crow_indices.tolist() == targets.crow_indices.tolist()
        np.testing.assert_allclose(found.values, scored(log_softmax(versions[version], prompt), targets), atol=1e-4)
    tables = [log_softmax(versions[version], LONG) for version in versions]
    gap = np.abs(scored(tables[0], dense(LONG)) - scored(tables[1], dense(LONG))).max()
    assert gap > 1e-2, "the versions must differ for this test to mean anything"


def test_alternatives_have_the_log_probabilities_of_the_plain_model(loop, versions):
    params = SamplingParams(max_tokens=2, temperature=0.6, seed=4)
    asked = [(version, prompt) for version in versions for prompt in (SHORT, LONG)]
    futures = [ask(loop, prompt, version, params, prompt_alt_k=5) for version, prompt in asked]
    for (version, prompt), future in zip(asked, futures):
        found = future.result(timeout=120).prompt_alt
        assert found.ids.shape == found.logprobs.shape == (len(prompt) - 1, 5)
        wanted = log_softmax(versions[version], prompt).gather(1, torch.as_tensor(found.ids.astype(np.int64)))
        np.testing.assert_allclose(found.logprobs, wanted.numpy(), atol=1e-4)
        assert len(set(found.ids.ravel().tolist())) > len(prompt), "draws differ"


def test_a_seed_reproduces_alternatives_in_any_batch_and_none_does_not(loop):
    def drawn(**params):
        return answer(loop, LONG, params=replace(ONE, **params), prompt_alt_k=3).prompt_alt.ids

    first = drawn(seed=2**62 + 5)
    crowd = [ask(loop, np.roll(LONG, i), prompt_logprobs=True) for i in range(3)]
    assert np.array_equal(first, drawn(seed=2**62 + 5))
    assert [c.result(timeout=120) for c in crowd]
    assert np.mean(first == drawn(seed=-6)) < 0.5
    assert np.mean(drawn() == drawn()) < 0.5


def test_alternatives_have_the_frequencies_of_the_tempered_distribution(loop, versions):
    """4,000 draws at one position, at a temperature at which the tiny model has favourites."""
    prompt, temperature = SHORT[:4], 0.2
    futures = [ask(loop, prompt, params=replace(ONE, temperature=temperature, seed=s), prompt_alt_k=100) for s in range(40)]
    drawn = np.concatenate([f.result(timeout=120).prompt_alt.ids[2] for f in futures])
    wanted = torch.softmax(log_softmax(versions[0], prompt)[2].double() / temperature, 0).numpy()
    counts = np.bincount(drawn, minlength=VOCAB)
    likely = np.flatnonzero(wanted * len(drawn) > 10)
    observed = np.append(counts[likely], len(drawn) - counts[likely].sum())
    expected = np.append(wanted[likely], 1 - wanted[likely].sum()) * len(drawn)
    assert len(likely) >= 3 and expected.max() > 50 and expected.min() > 10, "too flat or too sharp for this test to mean anything"
    # Chi-squared: its mean is len(likely), and this is far out whatever that is.
    assert ((observed - expected) ** 2 / expected).sum() < 2 * len(likely) + 30


def test_at_temperature_zero_every_alternative_is_the_likeliest(loop, versions):
    found = answer(loop, LONG, 61, replace(ONE, temperature=0.0), prompt_alt_k=2).prompt_alt
    table = log_softmax(versions[61], LONG)
    assert (found.ids[:, 0] == found.ids[:, 1]).all()
    np.testing.assert_allclose(found.logprobs, table.amax(1, keepdim=True).repeat(1, 2).numpy(), atol=1e-4)


def test_all_that_can_be_asked_of_a_prompt_at_once_is_what_each_alone_gives(loop):
    params = SamplingParams(max_tokens=3, temperature=0.7, seed=9)
    extras = {"target_prompt": sparse(LONG), "prompt_alt_k": 4}
    plainly = answer(loop, LONG, params=params, prompt_logprobs=True, topk_prompt_logprobs=5, n=2)
    assert plainly.target_prompt is None and plainly.prompt_alt is None
    alone = answer(loop, LONG, params=params, n=2, **extras)
    assert alone.prompt_logprobs is None and alone.topk_prompt is None
    both = answer(loop, LONG, params=params, prompt_logprobs=True, topk_prompt_logprobs=5, prompt_logprobs_last_n=3, n=2,
                  **extras)
    np.testing.assert_allclose(both.prompt_logprobs, plainly.prompt_logprobs, atol=1e-5)
    assert both.topk_prompt.ids.tolist() == plainly.topk_prompt.ids.tolist()
    np.testing.assert_allclose(both.target_prompt.values, alone.target_prompt.values, atol=1e-5)
    assert both.prompt_alt.ids.tolist() == alone.prompt_alt.ids.tolist()
    for sequences in zip(both.sequences, alone.sequences, plainly.sequences):
        assert len({tuple(s.tokens.tolist()) for s in sequences}) == 1


def test_a_prompt_of_one_token_has_no_positions_to_score(loop):
    found = answer(loop, SHORT[:1], prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_k=3)
    assert found.prompt_alt.ids.shape == found.prompt_alt.logprobs.shape == (0, 3)
    assert found.prompt_logprobs.shape == (1,) and found.topk_prompt.ids.shape == (1, 2)


def test_the_full_width_is_answered(loop, versions):
    ids = np.random.default_rng(0).integers(0, VOCAB, (len(SHORT) - 1, 60))
    found = answer(loop, topk_prompt_logprobs=8, prompt_alt_k=60, target_prompt=Matrix(ids.ravel(), ids.shape))
    wanted = log_softmax(versions[0], SHORT).gather(1, torch.as_tensor(ids)).numpy()
    np.testing.assert_allclose(found.target_prompt.values.reshape(ids.shape), wanted, atol=1e-4)
