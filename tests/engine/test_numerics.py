"""The engine's numbers on the tiny model against plain transformers and torch, float32."""

from __future__ import annotations

import asyncio

import numerics
import numpy as np
import pytest
from answers import check_interleaved

from verl_tinker.core.types import SampleRequest, SamplingParams

pytestmark = pytest.mark.timeout(300)


def test_log_probabilities_of_trainer_sampler_and_transformers_agree(live):
    gaps = live.do(numerics.logprob_gaps(live.engine, live.settings.model_folder))
    assert max(gaps.values()) < 1e-4, gaps


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probabilities_are_those_of_the_distribution_sampled_from(live, temperature):
    assert live.do(numerics.sampled_gap(live.engine, live.settings.model_folder, temperature)) < 1e-4


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_gradient_equals_plain_torch(live, tmp_path, lora):
    assert live.do(numerics.gradient_gap(live.engine, lora, tmp_path, f"gradient-{lora}")) < 1e-5


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_three_adamw_steps_equal_plain_torch(live, tmp_path, lora):
    gaps = live.do(numerics.training_gaps(live.engine, lora, tmp_path, f"steps-{lora}"))
    assert gaps["loss, relative"] < 1e-5 and gaps["gradient norm, relative"] < 1e-5, gaps
    assert gaps["weights after 3 AdamW steps"] < 2e-5 and gaps["update norm, relative"] < 1e-4, gaps


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_split_batch_gives_the_gradient_of_the_whole(live, tmp_path, lora):
    assert live.do(numerics.split_gap(live.engine, lora, tmp_path)) < 1e-4


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(live, tmp_path, lora):
    assert live.do(numerics.resume_gap(live.engine, lora, True, tmp_path)) == 0.0


def test_loading_without_the_optimizer_starts_its_moments_anew(live, tmp_path):
    assert live.do(numerics.resume_gap(live.engine, True, False, tmp_path)) > 1e-5


def test_versions_of_every_kind_in_one_batch_answer_with_their_own_weights(live, tmp_path):
    check_interleaved(live, tmp_path)


def test_samples_of_one_prompt_at_once_share_its_whole_blocks(live):
    prompt = np.random.default_rng(12).integers(100, 40000, 100).astype(np.int32)
    request = SampleRequest(prompt, 1, SamplingParams(max_tokens=1))

    async def ask():
        return await asyncio.gather(*(live.engine.sample(live.name, 0, request) for _ in range(4)))

    assert sorted(answer.cache_hit_tokens for answer in live.do(ask())) == [0, 96, 96, 96]
