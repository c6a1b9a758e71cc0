"""How much memory a model takes on each GPU, for training and for sampling.

Owns the formulas. Estimates only: nothing here was measured on a GPU. All sizes are bytes, GiB are 2**30 of them.

Sources. AdamW with float32 masters over shards: Rajbhandari et al. 2020 (ZeRO), section 3. Megatron's distributed optimizer:
the table of bytes for each parameter in Megatron-Core's guide (bf16 parameters, fp32 gradients: 6 + 12 / d).
Activations: Korthikanti et al. 2022, section 4, without the attention matrix, which no kernel here keeps, and with a
gated MLP. Key-value cache: two vectors for each token, layer and key-value head, Kwon et al. 2023, section 3. What
gradients, adapters, logits and scores take follows this server's engine, named at each formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_tinker.plan.size import ModelSize

GIB = 2**30
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2}
# For each process on a GPU: CUDA context, communication buffers, CUDA graphs, fragments. An assumption.
RESERVE = 2 * GIB
# For each process without a GPU: Python and its libraries (docs/concepts.md, the server's own process).
CPU_RESERVE = GIB // 2


@dataclass(frozen=True)
class Training:
    """`shards` GPUs share the weights; with Megatron `model_shards` cut the layers, `expert_shards` the experts, and
    `tensor_parallel` of the former each position's activations and logits.

    `tokens`: positions that one GPU computes in a micro batch. `master`, `compute`: bytes of a weight at rest and in the
    forward pass. `gathered_whole`: the weights are not given back after the forward pass.
    """

    shards: int
    tokens: int
    master: int
    compute: int
    checkpointing: bool
    gathered_whole: bool = False
    megatron: bool = False
    model_shards: int = 1
    expert_shards: int = 1
    tensor_parallel: int = 1


def training(size: ModelSize, how: Training, lora_rank: int | None, runs: int) -> dict[str, float]:
    """On each GPU while a batch is trained on; `lora_rank` None is full fine-tuning, which is one run.

    Adapters lie whole on every GPU (engine/adapters.py), and only the selected run's are offloaded.
    """
    parts = _megatron(size, how) if how.megatron else _sharded(size, how)
    if lora_rank is not None:
        parts |= {"gradients": 0.0, "optimizer": 0.0}
        # The active run has the batch's gradient too, and once more all of it to average over the GPUs.
        parts["adapters"] = runs * run_bytes(size, how, lora_rank) + 2 * size.adapter_parameters(lora_rank) * how.master
    parts["activations"] = activations(size, how) / how.tensor_parallel
    parts["logits"] = how.tokens * size.vocabulary * logits_bytes(how.compute) / how.tensor_parallel
    return parts


def run_bytes(size: ModelSize, how: Training, lora_rank: int) -> float:
    """An adapter run that rests in memory, on each GPU: weights, a gradient, two moments."""
    return 4.0 * size.adapter_parameters(lora_rank) * how.master


def offloaded(size: ModelSize, how: Training, lora_rank: int | None) -> float:
    """What of a GPU lies in host memory while the sampler has its turn: weights, and the moments of full fine-tuning."""
    parts = _megatron(size, how) if how.megatron else _sharded(size, how)
    return parts["weights"] + (parts["optimizer"] if lora_rank is None else 0.0)


def _sharded(size: ModelSize, how: Training) -> dict[str, float]:
    """FSDP2 and VeOmni: everything is cut over the shards, and gathered piece by piece for the forward pass.

    A gradient counts twice: a batch's own is added to the earlier ones once it is whole (engine/run_state.py).
    """
    share = size.parameters * how.master / how.shards
    gathered = size.parameters if how.gathered_whole else size.gathered
    return {"weights": share, "gathered": float(gathered * how.compute), "gradients": 2 * share, "optimizer": 2 * share}


def _megatron(size: ModelSize, how: Training) -> dict[str, float]:
    """2 bytes a weight and 4 its gradient where the model's parallelism has it; 12 for masters and moments over all GPUs."""
    local = (size.parameters - size.experts) / how.model_shards + size.experts / how.expert_shards
    return {"weights": 2 * local, "gathered": 0.0, "gradients": 4 * local, "optimizer": 12 * size.parameters / how.shards}


def activations(size: ModelSize, how: Training) -> float:
    """With checkpointing each layer keeps its input, and one layer at a time is computed again.

    A layer keeps, for each position: 6 vectors of the hidden width (norms, residuals), queries, keys and values before and
    after rotation or attention, and 4 of the MLP's width (gate, up, activation, product).
    """
    width = 6 * size.hidden + 2 * size.attention_width + 4 * size.active_width
    one_layer = float(how.tokens * width * how.compute)
    if not how.checkpointing:
        return size.layers * one_layer
    return size.layers * how.tokens * size.hidden * how.compute + one_layer


def logits_bytes(compute: int) -> int:
    """For each position and word. In float32 the logits become their log softmax and then its gradient in place; in 16
    bits a float32 copy does, beside the logits at first and beside their gradient at last (engine/fsdp.py)."""
    return 4 if compute == 4 else compute + 4


@dataclass(frozen=True)
class Serving:
    """A replica of vLLM. `share`: of each GPU's memory. `batched`: positions that it computes in one step, `context`: the
    longest sequence. `slots` adapters of rank `lora_rank` have their room."""

    tensor_parallel: int
    expert_parallel: int
    dtype: int
    share: float
    batched: int
    context: int
    slots: int = 0
    lora_rank: int = 0


def serving(size: ModelSize, how: Serving, gpu: float) -> dict[str, float]:
    """On each GPU of `gpu` bytes; the key-value cache gets what the share leaves.

    Adapters count as if B were not cut. `scores`, outside of the share: for a prompt's log-probabilities vLLM holds the
    logits of one step's positions, their float32 log softmax, and a byte for the rank.
    """
    weights, adapters = serving_weights(size, how), float(how.slots * size.adapter_parameters(how.lora_rank) * how.dtype)
    scores = float(min(how.batched, how.context) * size.vocabulary * (how.dtype + 4 + 1))
    return {"weights": weights, "adapters": adapters, "reserve": float(RESERVE),
            "cache": how.share * gpu - weights - adapters - RESERVE, "scores": scores}


def serving_on_cpu(size: ModelSize, how: Serving, cache_bytes: float) -> dict[str, float]:
    """One process. Each weight lies twice: as it is, and packed for the processor's kernels (engine/cpu/vllm_cpu.py)."""
    return {"weights": 2.0 * size.parameters * how.dtype, "reserve": float(CPU_RESERVE), "cache": float(cache_bytes),
            "adapters": float(how.slots * size.adapter_parameters(how.lora_rank) * how.dtype),
            "scores": float(min(how.batched, how.context) * size.vocabulary * (how.dtype + 4 + 1))}


def serving_weights(size: ModelSize, how: Serving) -> float:
    """Whole experts on each GPU, or a slice of every expert: the same share of them either way."""
    rest, experts = size.served_bytes(how.dtype)
    return rest / how.tensor_parallel + experts / max(how.tensor_parallel, how.expert_parallel)


def cache_bytes_per_token(size: ModelSize, how: Serving) -> int:
    """On each GPU; a key-value head is never cut, and lies on several GPUs where there are more of those."""
    heads = max(1, -(-size.kv_heads // how.tensor_parallel))
    return size.cached_layers * heads * size.kv_values * how.dtype
