"""Puts weights into a running vLLM engine and reads back what is really there.

Owns adapter and base-weight loading in the sampler's process, and their fingerprints. Does not decide
which version a request is answered by: `sampler_loop` does.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from verl_tinker.core.errors import SyncError

Fingerprints = dict[str, str]
FILE = "fingerprints.json"


def fingerprint(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bytes, shape included."""
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(str(tuple(tensor.shape)).encode(), digest_size=16)
    digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def adapter_tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a sampler must hold for a PEFT folder, by `module.A` and `module.B`: A, and B times the scale."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, part = name.removeprefix("base_model.model.").rsplit(".lora_", 1)
        tensor = tensor.to(dtype)
        tensors[f"{module}.{part[0]}"] = tensor if part[0] == "A" or scale == 1 else tensor * scale
    return tensors


def loaded_adapter_fingerprints(worker, version: int, shapes: dict[str, tuple[int, int]]) -> Fingerprints:
    """Digests of what vLLM computes with, read out of its slot buffers. Runs as an RPC on a vLLM worker.

    `shapes` are those of the tensors that were sent; modules outside them are reported if they are not zero.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(version)
    prints = {}
    for name, module in manager.modules.items():
        parent, leaf = name.rpartition(".")[::2]
        stacked = [(s,) if torch.is_tensor(s) else s for s in (module.lora_a_stacked, module.lora_b_stacked)]
        for part, a, b in zip(manager.packed_modules_mapping.get(leaf, [leaf]), *stacked):
            full = f"{parent}.{part}" if parent else part
            for key, buffer in ((f"{full}.A", a[slot, 0]), (f"{full}.B", b[slot, 0])):
                if key in shapes:
                    rows, columns = shapes[key]
                    prints[key] = fingerprint(buffer[:rows, :columns])
                elif buffer.any():
                    prints[key] = "unexpected"
    return prints


def check_adapter(wanted: Fingerprints, loaded: Fingerprints, version: int) -> None:
    """Raise SyncError naming the first tensor that differs."""
    odd = sorted(k for k in wanted.keys() | loaded.keys() if wanted.get(k) != loaded.get(k))
    if odd:
        raise SyncError(f"the sampler's adapter for version {version} is not the one that was sent: {odd[0]} differs "
                        f"({len(odd)} of {len(wanted)} tensors); the version is not served")


def write_fingerprints(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Beside full weights: digests of what the trainer holds, against which the sampler checks what it reads."""
    (folder / FILE).write_text(json.dumps({name: fingerprint(tensor) for name, tensor in tensors.items()}))


def check_received(folder: Path, received: Fingerprints) -> None:
    """Raise SyncError naming the first tensor that is not the trainer's. A base model's folder has no digests."""
    if (folder / FILE).exists():
        sent = json.loads((folder / FILE).read_text())
        odd = sorted(k for k in sent.keys() | received.keys() if sent.get(k) != received.get(k))
        if odd:
            raise SyncError(f"the sampler read other weights than the trainer wrote: {odd[0]} differs "
                            f"({len(odd)} of {len(sent)} tensors); the version is not served")


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

    model.load_weights(tensors())
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
