"""Weights that differ visibly from a base model's, in the folders that training would have written.

Owns the making of them. Does not load them anywhere.
"""

from __future__ import annotations

from pathlib import Path

import plain
import torch
from safetensors.torch import load_file, save_file


def adapter(folder: Path, base: Path, seed: int, rank: int = 8) -> Path:
    """A PEFT folder with random A and B for every linear layer but a tied one."""
    from verl_tinker.core.types import LoraSpec
    from verl_tinker.engine import adapters

    model = plain.load_model(base)
    layers = adapters.install_layers(model, adapters.linear_names(model, model.config.tie_word_embeddings))
    made = adapters.Adapter.create(layers, LoraSpec(rank=rank, seed=seed), 32.0, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for _, b in made.tensors.values():
        torch.nn.init.normal_(b, std=0.05, generator=generator)
    folder.mkdir()
    made.save(folder, "base")
    return folder


def full(folder: Path, source: Path, change: float) -> Path:
    """A copy of a model whose every weight is moved by `change`, as a step at that learning rate would."""
    from transformers import AutoConfig

    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    moved = {k: v.float() + change * torch.randn(v.shape, generator=generator).sign() for k, v in tensors.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.from_pretrained(source).save_pretrained(folder)
    return folder
