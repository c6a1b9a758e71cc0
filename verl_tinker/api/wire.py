"""The JSON side of the wire: tolerant request models, and what they mean in the core's types.

Owns field names and their defaults. Does not check ranges: the core does, so that a future can report them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from verl_tinker.api.body import MAX_DATUMS
from verl_tinker.api.tensors import csr, dense, densify, join_tokens
from verl_tinker.core.errors import UserError
from verl_tinker.core.types import AdamParams, Datum, LoraSpec, Matrix, SampleRequest, SamplingParams

Sequence64 = Annotated[int, Field(ge=0, lt=2**63)]


def _as_strings(value: Any) -> Any:
    if not isinstance(value, dict):
        return {} if value is None else value
    return {str(key): v if isinstance(v, str) else json.dumps(v) for key, v in value.items()}


Metadata = Annotated[dict[str, str], BeforeValidator(_as_strings)]


class Wire(BaseModel):
    """A newer client's extra fields are ignored, never refused."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Nothing(Wire):
    """A body of which nothing is read."""


class SessionBody(Wire):
    session_id: str


class FinishReason(Wire):
    type: str = "success"


class FinishSession(Wire):
    reason: FinishReason = FinishReason()
    detail: str | None = None


class LoraConfig(Wire):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def spec(self) -> LoraSpec:
        return LoraSpec(self.rank, self.seed, self.train_attn, self.train_mlp, self.train_unembed)


class OptimizerConfig(Wire):
    type: str = "adamw"


class CreateModel(Wire):
    session_id: str
    model_seq_id: Sequence64
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata = {}


class ModelBody(Wire):
    model_id: str


class Command(Wire):
    model_id: str
    seq_id: Sequence64 | None = None


class Adam(Wire):
    learning_rate: float = AdamParams.learning_rate
    beta1: float = AdamParams.beta1
    beta2: float = AdamParams.beta2
    eps: float = AdamParams.eps
    weight_decay: float = AdamParams.weight_decay
    grad_clip_norm: float = AdamParams.grad_clip_norm


class OptimStep(Command):
    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None

    def adam(self) -> AdamParams:
        if self.optimizer_params is not None:
            raise UserError(
                f"optimizer_params.type {self.optimizer_params.get('type')!r} is not supported; send adam_params"
            )
        return AdamParams(**(self.adam_params or Adam()).model_dump())


class SaveWeights(Command):
    path: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Metadata = {}


class SaveWeightsForSampler(Command):
    path: str | None = None
    sampling_session_seq_id: Sequence64 | None = None
    ttl_seconds: int | None = None
    user_metadata: Metadata = {}
    kind: str = "snapshot"


class LoadWeights(Wire):
    """Creates a run when it names a session, loads into a live one when it names a model."""

    path: str
    optimizer: bool = True
    model_id: str | None = None
    seq_id: Sequence64 | None = None
    session_id: str | None = None
    model_seq_id: Sequence64 | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata = {}
    weights_access_token: str | None = None


class WeightsInfo(Wire):
    tinker_path: str


class Ttl(Wire):
    ttl_seconds: int | None = None


class CreateSamplingSession(Wire):
    session_id: str
    sampling_session_seq_id: Sequence64
    base_model: str | None = None
    model_path: str | None = None


class SamplingSessionBody(Wire):
    sampling_session_id: str


class RetrieveFuture(Wire):
    request_id: str


class SamplerClient(Wire):
    """One client of a sampler: its requests are numbered from cloned_sampler_id * 10^9."""

    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveFutures(Wire):
    target: SamplerClient
    prev_cursor: int = Field(0, ge=0)
    timeout: float | None = Field(None, ge=0)
    retrieved_request_ids: list[str] = []


class Chunk(Wire):
    type: str = "encoded_text"
    tokens: list[int] | None = None

    def token_ids(self) -> np.ndarray | None:
        if self.type != "encoded_text":
            return None
        return _array(self.tokens or [], np.int32, "encoded_text.tokens")


class ModelInput(Wire):
    chunks: list[Chunk] = []

    def token_ids(self, where: str) -> np.ndarray:
        return join_tokens(((chunk.type, chunk.token_ids()) for chunk in self.chunks), where)


class Tensor(Wire):
    data: list[Any]
    dtype: str = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def array(self, where: str) -> np.ndarray:
        """With the missing cells of a sparse one as zeros."""
        values, shape = self._values(where), self.shape or []
        if self.sparse_crow_indices is None:
            return dense(values, shape, where)
        return densify(values, *self._indices(where), shape, where)

    def matrix(self, where: str) -> Matrix:
        """In the layout in which it came."""
        values, shape = self._values(where), self.shape or []
        if self.sparse_crow_indices is None:
            return Matrix(values, dense(values, shape, where).shape)
        return csr(values, *self._indices(where), shape, where)

    def _values(self, where: str) -> np.ndarray:
        if self.dtype not in ("float32", "int64"):
            raise UserError(f"{where} has dtype {self.dtype!r}; send float32 or int64")
        return _array(self.data, self.dtype, where)

    def _indices(self, where: str) -> tuple[np.ndarray, np.ndarray]:
        return tuple(_array(part or [], np.int64, where) for part in (self.sparse_crow_indices, self.sparse_col_indices))


class JsonDatum(Wire):
    model_input: ModelInput
    loss_fn_inputs: dict[str, Tensor] = {}

    def datum(self, where: str) -> Datum:
        inputs = {name: t.array(f"{where}.loss_fn_inputs[{name!r}]") for name, t in self.loss_fn_inputs.items()}
        return Datum(self.model_input.token_ids(f"{where}.model_input"), inputs)


class ForwardBackwardInput(Wire):
    data: list[JsonDatum] = Field(max_length=MAX_DATUMS)
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None

    def batch(self) -> list[Datum]:
        return [datum.datum(f"data[{i}]") for i, datum in enumerate(self.data)]


class JsonForwardBackward(Command):
    forward_backward_input: ForwardBackwardInput


class JsonForward(Command):
    forward_input: ForwardBackwardInput


class Params(Wire):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int | str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def params(self) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(self.max_tokens, self.seed, stop, self.temperature, self.top_k, self.top_p)


class Sample(Wire):
    sampling_session_id: str
    seq_id: Sequence64 | None = None
    num_samples: int = 1
    prompt: ModelInput
    sampling_params: Params = Params()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool = False

    def request(self) -> SampleRequest:
        """UserError for what cannot be read: the future reports it."""
        targets = self.target_prompt_logprobs
        return SampleRequest(
            prompt=self.prompt.token_ids("prompt"),
            num_samples=self.num_samples,
            params=self.sampling_params.params(),
            prompt_logprobs=bool(self.prompt_logprobs),
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
            record=self.record_stability_info,
            target_prompt=None if targets is None else targets.matrix("target_prompt_logprobs"),
            prompt_alt_k=self.prompt_alt_tokens_k,
        )


def _array(values: list, dtype: Any, where: str) -> np.ndarray:
    try:
        return np.asarray(values, dtype).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where} does not fit {np.dtype(dtype).name}: {error}") from None
