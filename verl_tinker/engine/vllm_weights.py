"""Puts weights into a running vLLM engine and reads back what is really there.

Owns adapter and base-weight loading in the processes that hold the model, and their fingerprints. Does not decide
which version a request is answered by: `admission` does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from verl.utils.vllm import resolve_weight_name
from vllm.lora.request import LoRARequest

from verl_tinker.engine.admission import adapter_label
from verl_tinker.engine.fingerprints import Fingerprints, adapter_tensors, fingerprint


def load_adapter(worker, version: int, folder: str) -> tuple[Fingerprints, Fingerprints]:
    """Put a PEFT folder into vLLM; digests of this rank's share of the folder, and of what vLLM computes with.

    Runs as an RPC on a vLLM worker: between two RPCs a step might give the adapter's slot to another one.
    """
    worker.add_lora(LoRARequest(adapter_label(version), version, folder))
    sent = adapter_tensors(Path(folder), worker.model_runner.model_config.dtype)
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(version)
    wanted: Fingerprints = {}
    loaded: Fingerprints = {}
    for name, module in manager.modules.items():
        parent, leaf = name.rpartition(".")[::2]
        parts = [f"{parent}.{p}" if parent else p for p in manager.packed_modules_mapping.get(leaf, [leaf])]
        for side, buffers in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked)):
            shares = _rank_share(module, side, [sent.pop(f"{part}.{side}", None) for part in parts])
            for part, share, buffer in zip(parts, shares, (buffers,) if torch.is_tensor(buffers) else buffers):
                if share is not None:
                    wanted[f"{part}.{side}"] = fingerprint(share)
                    loaded[f"{part}.{side}"] = fingerprint(buffer[slot, 0, : share.shape[0], : share.shape[1]])
                elif buffer[slot, 0].any():
                    loaded[f"{part}.{side}"] = "unexpected"
    # What no layer took is in `wanted` alone, and so counts as different.
    return wanted | {name: fingerprint(tensor) for name, tensor in sent.items()}, loaded


def _rank_share(module, side: str, whole: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What this tensor-parallel rank holds of the parts of a (packed) layer, cut by vLLM's own rule."""
    if getattr(module, "tp_size", 1) == 1 or all(part is None for part in whole):
        return whole
    cut = module.slice_lora_a if side == "A" else module.slice_lora_b
    share = cut(whole) if len(whole) > 1 else cut(whole[0])
    if share is None:  # Layers that are not cut inherit an empty method.
        return whole
    return share if len(whole) > 1 else [share]


def load_base_weights(model: torch.nn.Module, folder: str) -> Fingerprints:
    """Replace the model's weights by a Hugging Face folder's; returns fingerprints of what was received."""
    prints: Fingerprints = {}

    def tensors():
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    tensor = opened.get_tensor(name)
                    prints[name] = fingerprint(tensor)
                    yield name, tensor

    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    # Where adapters are on, older vLLM wants `.base_layer` in the names of wrapped layers, newer vLLM does not.
    model.load_weights((resolve_weight_name(model, name, names), tensor) for name, tensor in tensors())
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
    return prints


def stale_packed_layers(model: torch.nn.Module) -> list[str]:
    """Linear layers whose packed copy does not give the plain weight back, column by column, bit for bit.

    A one-hot input selects a column of the weight exactly, so a stale copy shows however small the step was.
    """
    stale = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or weight is None or weight.ndim != 2 or not weight.numel():
            continue
        columns = torch.linspace(0, weight.shape[1] - 1, 4).long().unique()
        one_hot = torch.zeros(len(columns), weight.shape[1], dtype=weight.dtype)
        one_hot[torch.arange(len(columns)), columns] = 1
        if not torch.equal(module.cpu_linear(one_hot, weight, None), weight[:, columns].T):
            stale.append(name)
    return stale


def clear_kv_cache(worker) -> None:
    """Zero the key-value cache, whose free blocks attention still reads, masked: zero times NaN is NaN."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
