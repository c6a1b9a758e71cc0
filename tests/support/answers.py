"""A request whose answer shows which weights gave it, and the check of that answer against plain transformers.

Owns the request and the tolerance. Does not start an engine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import plain
import pytest
import torch
from weights import adapter, full

from verl_tinker.core.errors import Evicted
from verl_tinker.core.types import SampleRequest, SamplingParams
from verl_tinker.engine.fingerprints import adapter_tensors, fingerprint

PROMPT = np.arange(100, 130, dtype=np.int32)


def greedy(**params) -> SampleRequest:
    return SampleRequest(PROMPT, 1, SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "stop": [], **params}), True)


def check(result, version: int, model: torch.nn.Module) -> None:
    """The answer is the version's: prompt, greedy choice and its log-probabilities, against plain transformers."""
    assert result.version == version
    np.testing.assert_allclose(
        result.prompt_logprobs[1:], plain.logprobs(model, PROMPT[:-1], PROMPT[1:]).detach().numpy(), atol=1e-4)
    drawn = result.sequences[0].tokens
    tokens = np.concatenate([PROMPT, drawn])[:-1].astype(np.int64)
    logprobs = torch.log_softmax(model(torch.as_tensor(tokens)[None]).logits[0].float(), -1)[len(PROMPT) - 1 :].detach()
    of_drawn = logprobs.gather(1, torch.as_tensor(drawn.astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(result.sequences[0].logprobs, of_drawn.numpy(), atol=1e-4)
    assert torch.all(logprobs.max(1).values - of_drawn < 1e-4), "not the likeliest token"


def check_interleaved(live, tmp_path: Path) -> None:
    """Two adapters, two full-weight versions and the base, asked for side by side; unloaded ones are refused by name."""
    base, sampler = live.settings.model_folder, live.engine.sampler
    models = {0: plain.load_model(base)}
    for version in (9011, 9012):
        folder = adapter(tmp_path / f"a{version}", base, version)
        prints = live.do(sampler.replicas.ask_all("load_version", version, str(folder), 8))[0]
        if live.settings.verl_config.rollout.tensor_model_parallel_size == 1:  # Otherwise they are those of one share.
            assert prints == {k: fingerprint(t) for k, t in adapter_tensors(folder, torch.float32).items()}
        models[version] = plain.PlainRun(base, folder).model
    for version in (9014, 9015):
        folder = full(tmp_path / f"f{version}", base, 0.01 * (version - 9013))
        live.do(sampler.replicas.ask_all("load_version", version, str(folder), 0))
        models[version] = plain.load_model(folder)

    async def ask(order):
        return await asyncio.gather(*(live.engine.sample(live.name, version, greedy()) for version in order))

    order = [0, 9011, 9014, 9012, 0, 9015, 9014, 9011, 9012, 9015, 0]
    for version, result in zip(order, live.do(ask(order))):
        check(result, version, models[version])
    for version in (9011, 9012, 9014, 9015):
        live.do(sampler.unload_version(version))
        with pytest.raises(Evicted, match=str(version)):
            live.do(live.engine.sample(live.name, version, greedy()))
