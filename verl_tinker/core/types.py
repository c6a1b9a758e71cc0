"""The values that pass between HTTP, scheduler and engine: plain dataclasses over numpy arrays.

Owns their shapes and units. Does not validate user input: `verl_tinker.core.validate` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Span:
    """Where a run of target tokens came from: `length` tokens from `offset` on, of what a sequence sampled or of its
    prompt."""

    sequence_id: str
    offset: int
    length: int
    is_sampled: bool


@dataclass(frozen=True)
class Datum:
    """One training sequence.

    tokens: int32[N], the model input. inputs: the loss inputs by name, dense, float32 or int64, of shape
    [N] or [N, K]; position i of the input predicts `target_tokens[i]`. spans: the origin of all N targets in order, or
    nothing.
    """

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class LoraSpec:
    """The adapter that a client asks for. `seed` None means that the server picks one."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A training run's model: a public base model name and its adapter; `lora` None is full fine-tuning."""

    base_model: str
    lora: LoraSpec | None


# vLLM wants the largest k when it starts, and keeps that many candidates for every scored position. Targets and draws
# share them with the top k.
MAX_TOPK = 128


@dataclass(frozen=True)
class BaseModelInfo:
    """A base model that the engine serves under a public name. `max_context` is in tokens.

    `max_topk`: how many likeliest tokens may be asked for, and `max_topk_key` what to raise in the preset for more.
    """

    name: str
    max_context: int
    vocab_size: int
    tied_embeddings: bool
    trainable: bool
    sampleable: bool
    max_topk: int = MAX_TOPK
    max_topk_key: str = ""


@dataclass(frozen=True)
class AdamParams:
    """The optimizer settings of one step; the clients own the schedule. `grad_clip_norm` 0 is no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class ForwardBackwardResult:
    """logprobs: one float32 array a datum, shaped like its target_tokens, in nats. metrics: `name:reduction`.

    losses: float32[number of datums], the summed loss of each; their sum is `loss:sum`.
    """

    logprobs: list[np.ndarray]
    losses: np.ndarray
    metrics: dict[str, float]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `stop` None is the model's own end token; an empty list is no stop at all.

    `max_tokens` None is up to the end of the context. `top_k` -1 and `top_p` 1 are off. Temperature 0 is greedy.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True)
class Matrix:
    """values [N], the cells of a `shape` row by row: all of them, or in CSR layout those that the indices list.

    crow_indices int64[rows + 1] and col_indices int64[N], or None for all cells.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    crow_indices: np.ndarray | None = None
    col_indices: np.ndarray | None = None

    def rows(self) -> np.ndarray:
        """int64[N], the row of each value."""
        if self.crow_indices is None:
            return np.repeat(np.arange(self.shape[0]), self.shape[1])
        return np.repeat(np.arange(self.shape[0]), np.diff(self.crow_indices))


# In a cell of `target_prompt`: nothing is asked for.
NO_TARGET = -1


@dataclass(frozen=True)
class SampleRequest:
    """One prompt (int32[P]) sampled `num_samples` times.

    `prompt_logprobs_last_n`: only these last positions are wanted; the service blanks the rest, an engine may
    ignore it. `record`: the service keeps what was sampled, for the loss that trains on it by sequence id.
    `target_prompt`: int64 of shape [P - 1, K], ids whose log-probability is wanted; row i is scored at position i + 1.
    `prompt_alt_k`: so many tokens are drawn at every position after the first, at the temperature of `params`.
    `affinity`: requests with the same word go to the same replica where possible, for their prompts begin alike.
    """

    prompt: np.ndarray
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    record: bool = False
    target_prompt: Matrix | None = None
    prompt_alt_k: int = 0
    affinity: str = ""


EMPTY_CELL = -99999.0


@dataclass(frozen=True)
class TopK:
    """The k likeliest tokens of n positions, best first: ids int32[n, k], logprobs float32[n, k] in nats.

    An empty cell is id 0 with log-probability EMPTY_CELL.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class SampledSequence:
    """tokens: int32[T], the stop token or string included. logprobs: float32[T], of the distribution sampled from."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None


@dataclass(frozen=True)
class Drawn:
    """What was drawn of sequence `index` since the last time: tokens int32[n], logprobs float32[n], topk of n rows."""

    index: int
    tokens: np.ndarray
    logprobs: np.ndarray
    topk: TopK | None = None

    def after(self, count: int) -> Drawn:
        """Without the first `count`."""
        topk = self.topk and TopK(self.topk.ids[count:], self.topk.logprobs[count:])
        return Drawn(self.index, self.tokens[count:], self.logprobs[count:], topk)


@dataclass(frozen=True)
class Draws:
    """k tokens drawn with replacement for each of n positions: ids int32[n, k], logprobs float32[n, k] in nats.

    The log-probabilities are the model's own, of temperature 1, whatever the temperature of the draw.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class SampleResult:
    """prompt_logprobs: float32[P] at temperature 1, NaN at position 0. version: the weights that answered.

    target_prompt: float32 in the request's layout, at temperature 1, 0 where nothing was asked for. prompt_alt: the
    draws for position i + 1 in row i.
    """

    sequences: list[SampledSequence]
    version: int
    prompt_logprobs: np.ndarray | None = None
    topk_prompt: TopK | None = None
    cache_hit_tokens: int = 0
    target_prompt: Matrix | None = None
    prompt_alt: Draws | None = None


@dataclass(frozen=True)
class ModelInfo:
    """What the engine made of a ModelSpec. `notes` tell each requested setting that it could not honour.

    `parameter_bytes`: the size of what the run trains, without optimizer state.
    """

    spec: ModelSpec
    notes: list[str] = field(default_factory=list)
    parameter_bytes: int = 0
