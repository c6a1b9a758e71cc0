"""Digests of weights: what was sent, what arrived, and the verdict.

Owns the form of a fingerprint and the file of them beside full weights. Does not know vLLM: `vllm_weights` does.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
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
