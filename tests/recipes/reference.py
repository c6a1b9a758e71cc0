"""What plain transformers in float32 says about the tokens that a recipe sent and got.

Owns the models that it loads. Does not talk to the server: weights come from the checkpoint folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import plain
import torch
from wiretap import Call

NATS = 1e-4


def check_soft_targets(call: Call) -> float:
    """The cross-entropy of a call's [N, 20] targets by its own answer; the weights of each trained position are one sum."""
    for datum, logprobs in zip(call.data, call.logprobs, strict=True):
        assert datum["weights"].shape == datum["target_tokens"].shape == logprobs.shape == (len(datum["tokens"]), 20)
        sums = datum["weights"].sum(1)
        np.testing.assert_allclose(sums[sums > 0], 1, atol=1e-5)
    trained = sum(int((datum["weights"].sum(1) > 0).sum()) for datum in call.data)
    # An answer may be as short as one token.
    assert trained >= len(call.data)
    return -sum(float((d["weights"] * lp).sum()) for d, lp in zip(call.data, call.logprobs, strict=True))


class Reference:
    """The base model in `base`, and samplers below the server's `checkpoints`, by their paths."""

    def __init__(self, base: Path, checkpoints: Path):
        self._base, self._checkpoints = base, checkpoints
        self._model = lru_cache(maxsize=2)(self._load)

    def folder(self, path: str) -> Path:
        run, _, rest = path.removeprefix("tinker://").partition("/")
        return self._checkpoints / run.replace(":", "_") / rest

    def distribution(self, sampler: str | None, tokens: np.ndarray) -> np.ndarray:
        """float32[N, V]: log-probabilities of what follows each of tokens [N]; `sampler` None is the base model."""
        with torch.no_grad():
            logits = self._model(sampler)(torch.as_tensor(np.asarray(tokens, np.int64))[None]).logits[0]
            return torch.log_softmax(logits.float(), -1).numpy()

    def trained(self, sampler: str | None, datum: dict[str, np.ndarray]) -> np.ndarray:
        """float32[N] or [N, K]: log-probabilities of a datum's targets."""
        targets = datum["target_tokens"].reshape(len(datum["tokens"]), -1)
        found = np.take_along_axis(self.distribution(sampler, datum["tokens"]), targets, 1)
        return found.reshape(datum["target_tokens"].shape)

    def sampled(self, sampler: str | None, call: Call) -> np.ndarray:
        """float32[T]: log-probabilities of the tokens that a call drew, its first sequence."""
        drawn = np.asarray(call.result.sequences[0].tokens)
        whole = np.concatenate([call.prompt, drawn])
        return np.take_along_axis(self.distribution(sampler, whole[:-1]), whole[1:, None], 1)[-len(drawn):, 0]

    def prompt(self, sampler: str | None, call: Call) -> np.ndarray:
        """float32[N - 1]: log-probabilities of a call's prompt from its second token on."""
        return np.take_along_axis(self.distribution(sampler, call.prompt[:-1]), call.prompt[1:, None], 1)[:, 0]

    def assert_drew(self, sampler: str | None, calls: Iterable[Call]) -> None:
        for call in calls:
            answered = np.asarray(call.result.sequences[0].logprobs)
            np.testing.assert_allclose(answered, self.sampled(sampler, call), atol=NATS, rtol=0)

    def assert_scored(self, sampler: str | None, calls: Iterable[Call]) -> None:
        for call in calls:
            answered = np.asarray(call.result.prompt_logprobs[1:], np.float32)
            np.testing.assert_allclose(answered, self.prompt(sampler, call), atol=NATS, rtol=0)

    def assert_ranked(self, sampler: str | None, calls: Iterable[Call]) -> None:
        """The k most likely tokens at each position of the prompt, with their log-probabilities."""
        for call in calls:
            k, answered = call.request["topk_prompt_logprobs"], call.result.topk_prompt_logprobs
            assert answered[0] is None and len(answered) == len(call.prompt)
            known = self.distribution(sampler, call.prompt[:-1])
            best = -np.sort(-known, axis=1)[:, :k]
            for row, entries, highest in zip(known, answered[1:], best, strict=True):
                ids, logprobs = zip(*entries, strict=True)
                assert len(set(ids)) == k
                np.testing.assert_allclose(logprobs, row[list(ids)], atol=NATS, rtol=0)
                np.testing.assert_allclose(sorted(logprobs, reverse=True), highest, atol=NATS, rtol=0)

    def _load(self, sampler: str | None) -> torch.nn.Module:
        return plain.PlainRun(self._base, self.folder(sampler)).model if sampler else plain.load_model(self._base)
