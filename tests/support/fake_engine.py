"""A deterministic engine without weights: one number a model stands for all of them.

Owns the arithmetic that the tests compute by hand. Does not check its input: the core must.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from verl_tinker.core.errors import EngineError
from verl_tinker.core.types import (
    EMPTY_CELL,
    NO_TARGET,
    BaseModelInfo,
    Draws,
    ForwardBackwardResult,
    Matrix,
    ModelInfo,
    SampledSequence,
    SampleRequest,
    SampleResult,
    TopK,
)

BASE = "fake/tied"
UNTIED = "fake/untied"
VOCAB, CONTEXT = 1000, 64
END, OWN = 999, 500
PARAMETER_BYTES = 4
START_PHASE = "loading fake weights"


@dataclass
class _Model:
    spec: object
    weight: float = 0.0
    gradient: float = 0.0
    moment: float = 0.0


class FakeEngine:
    """logprob(target) = weight - 1 - target / 1000, so d(sum of weights * logprobs)/d(weight) is sum(weights).

    A step adds learning_rate * (sum + moment), and the moment then is that sum; with beta1 0 it is left out. A sampled
    token is 100 plus the version's weight in thousandths; its log-probability is the weight minus 0.5. A prompt with
    tokens from 500 up has an answer of its own (`drawn_tokens`), scored as prompts are. Targets are scored as prompts are,
    and so are the draws for a prompt token, which are the numbers that follow it. The text of a token is its number
    after a blank.
    """

    def __init__(self, delay: float = 0.0):
        """`delay`: seconds that each call takes, which widens every window in which a test may interfere."""
        self.delay = delay
        self.calls: list[tuple] = []
        self.fail: dict[str, Exception] = {}
        self.hold: set[str] = set()
        self.running: set[str] = set()
        self.overlapped = False
        self.models: dict[str, _Model] = {}
        self.versions: dict[int, float] = {0: 0.0}
        self.samples_at_once = self.most_samples_at_once = 0

    async def start(self, report):
        report(START_PHASE)
        await self._hook("start")

    async def close(self):
        """What was trained and loaded is gone, as with the processes of a real engine."""
        self.calls.append(("close",))
        self.models.clear()
        self.versions = {0: 0.0}

    def worker_logs(self):
        return "the tests' engine has no workers"

    def base_models(self):
        return [
            BaseModelInfo(BASE, CONTEXT, VOCAB, tied_embeddings=True, trainable=True, sampleable=True),
            BaseModelInfo(UNTIED, CONTEXT, VOCAB, tied_embeddings=False, trainable=True, sampleable=True),
        ]

    async def create_model(self, model_id, spec):
        await self._train("create_model", model_id, spec)
        notes = []
        if spec.base_model == BASE and spec.lora and spec.lora.train_unembed:
            spec = replace(spec, lora=replace(spec.lora, train_unembed=False))
            notes.append("train_unembed is not applied: tied embeddings")
        self.models[model_id] = _Model(spec)
        return ModelInfo(spec, notes, parameter_bytes=PARAMETER_BYTES)

    async def drop_model(self, model_id):
        await self._train("drop_model", model_id)
        del self.models[model_id]

    async def forward_backward(self, model_id, data, loss_fn, config, backward):
        await self._train("forward_backward", model_id, len(data), loss_fn, config, backward)
        model = self.models[model_id]
        logprobs = [(model.weight - 1 - d.inputs["target_tokens"] / 1000).astype(np.float32) for d in data]
        coefficients = [d.inputs["weights" if loss_fn == "cross_entropy" else "advantages"] for d in data]
        if backward:
            model.gradient += float(sum(c.sum() for c in coefficients))
        losses = np.array([_loss(loss_fn, config, d, lp) for d, lp in zip(data, logprobs, strict=True)], np.float32)
        metrics = {"loss:sum": float(losses.sum()), "clock_cycle:unique": float(len(self.calls))}
        return ForwardBackwardResult(logprobs, losses, metrics)

    async def optim_step(self, model_id, adam):
        await self._train("optim_step", model_id, adam)
        model = self.models[model_id]
        model.weight += adam.learning_rate * (model.gradient + (model.moment if adam.beta1 else 0.0))
        norm, model.moment, model.gradient = abs(model.gradient), model.gradient, 0.0
        return {"grad_norm": norm if norm < 1e6 else float("nan")}

    async def save_state(self, model_id, folder):
        await self._train("save_state", model_id)
        model = self.models[model_id]
        (folder / "state.json").write_text(json.dumps([model.weight, model.moment]))

    async def load_state(self, model_id, folder, optimizer):
        await self._train("load_state", model_id, optimizer)
        model = self.models[model_id]
        model.weight, moment = json.loads((folder / "state.json").read_text())
        model.moment, model.gradient = (moment if optimizer else 0.0), 0.0

    async def park(self, model_id, folder):
        await self._train("park", model_id)
        model = self.models.pop(model_id)
        (folder / "parked.json").write_text(json.dumps([model.weight, model.gradient, model.moment]))

    async def unpark(self, model_id, spec, folder):
        await self._train("unpark", model_id)
        self.models[model_id] = _Model(spec, *json.loads((folder / "parked.json").read_text()))

    async def export_weights(self, model_id, folder):
        await self._train("export_weights", model_id)
        (folder / "weights.json").write_text(json.dumps(self.models[model_id].weight))
        (folder / "extra").mkdir()
        (folder / "extra" / "note.txt").write_text("beside the weights")

    async def export_sampler(self, model_id, folder):
        await self._train("export_sampler", model_id)
        (folder / "sampler.json").write_text(json.dumps(self.models[model_id].weight))

    async def load_version(self, version, base_model, folder):
        await self._hook("load_version")
        self.calls.append(("load_version", version))
        assert version not in self.versions
        self.versions[version] = json.loads((Path(folder) / "sampler.json").read_text())

    async def retire_version(self, version):
        self.calls.append(("retire_version", version))
        del self.versions[version]

    async def sample(self, base_model, version, request, seen=None):
        self.samples_at_once += 1
        self.most_samples_at_once = max(self.most_samples_at_once, self.samples_at_once)
        try:
            await self._hook("sample")
            return self._sampled(version, request)
        finally:
            self.samples_at_once -= 1

    async def check(self):
        if "check" in self.fail:
            raise EngineError("fake worker 0 does not answer")

    def _sampled(self, version, request):
        weight, n = self.versions[version], len(request.prompt)
        tokens = drawn_tokens(weight, request.prompt, request.params.max_tokens)
        tokens, reason = _until_stop(tokens, request.params.stop)
        own = (request.prompt >= OWN).any()
        logprobs = (weight - 1 - tokens / 1000 if own else np.full(len(tokens), weight - 0.5)).astype(np.float32)
        sequence = SampledSequence(tokens, logprobs, reason)
        if request.topk_sample_logprobs:
            topk = _topk(len(tokens), request.topk_sample_logprobs)
            topk.ids[:, 0], topk.logprobs[:, 0] = tokens, logprobs
            sequence = replace(sequence, topk=topk)
        scores = (weight - 1 - request.prompt / 1000).astype(np.float32)
        scores[0] = np.nan
        topk = None
        if request.topk_prompt_logprobs:
            topk = _topk(n, request.topk_prompt_logprobs)
            topk.ids[0], topk.logprobs[0] = 0, EMPTY_CELL
        return SampleResult(
            [sequence] * request.num_samples, version, scores if request.prompt_logprobs else None, topk,
            target_prompt=_targets(weight, request.target_prompt), prompt_alt=_draws(weight, request))

    async def _train(self, name, *facts):
        self.overlapped = self.overlapped or bool(self.running)
        self.running.add(name)
        try:
            await self._hook(name)
        finally:
            self.running.discard(name)
        self.calls.append((name, *facts))

    async def _hook(self, name):
        """Wait while a test holds this call, then fail if the test says so (once)."""
        await asyncio.sleep(self.delay)
        while name in self.hold:
            await asyncio.sleep(0.005)
        if name in self.fail:
            raise self.fail.pop(name)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


def drawn_tokens(weight: float, prompt, length: int) -> np.ndarray:
    """The i-th token is i times the sum of the prompt's tokens from 500 up further than what the weight gives."""
    prompt = np.asarray(prompt, np.int64)
    own = prompt[prompt >= OWN].sum()
    return ((100 + round(weight * 1000) + own * np.arange(1, length + 1)) % VOCAB).astype(np.int32)


def _targets(weight: float, targets: Matrix | None) -> Matrix | None:
    if targets is None:
        return None
    scores = np.where(targets.values == NO_TARGET, 0, weight - 1 - targets.values / 1000).astype(np.float32)
    return replace(targets, values=scores)


def _draws(weight: float, request: SampleRequest) -> Draws | None:
    if not request.prompt_alt_k:
        return None
    ids = (request.prompt[1:, None] + 1 + np.arange(request.prompt_alt_k)) % VOCAB
    return Draws(ids.astype(np.int32), (weight - 1 - ids / 1000).astype(np.float32))


def _until_stop(tokens: np.ndarray, stop: list | None) -> tuple[np.ndarray, str]:
    """The tokens up to the one that ends them, which stays; None stops at the end token alone."""
    stop = [END] if stop is None else stop
    text = ""
    for i, token in enumerate(tokens.tolist(), start=1):
        text += f" {token}"
        if any(entry in text if isinstance(entry, str) else entry == token for entry in stop):
            return tokens[:i], "stop"
    return tokens, "length"


def _loss(loss_fn: str, config: dict, datum, logprobs: np.ndarray) -> float:
    if loss_fn == "cross_entropy":
        return -(datum.inputs["weights"] * logprobs).sum()
    advantages, sampled = datum.inputs["advantages"], datum.inputs["logprobs"]
    ratio = np.exp(logprobs - sampled)
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss_fn == "dro":
        return -(logprobs * advantages - 0.5 * config["beta"] * (logprobs - sampled) ** 2).sum()
    if loss_fn == "stable_reinforce":
        pull = 0.5 * config["kl_coeff"] * (logprobs - sampled) ** 2 * (advantages != 0)
        return (pull - np.minimum(ratio, 2.0) * logprobs * advantages).sum()
    if loss_fn == "gspo":
        mask = datum.inputs["sequence_ratio_mask"]
        ratio = np.exp((mask * (logprobs - sampled)).sum() / mask.sum())
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn == "cispo":
        return -(clipped * logprobs * advantages).sum()
    return -np.minimum(ratio * advantages, clipped * advantages).sum()


def _topk(n: int, k: int) -> TopK:
    ids = np.tile(np.arange(1, k + 1, dtype=np.int32), (n, 1))
    return TopK(ids, -ids.astype(np.float32))
