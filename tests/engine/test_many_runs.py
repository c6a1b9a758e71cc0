"""Several adapters on one base: whatever their order, each trains as if it were alone."""

from __future__ import annotations

import random

import numerics
import numpy as np
import pytest
from safetensors.torch import load_file

from verl_tinker.core.errors import EngineError
from verl_tinker.core.types import Datum, LoraSpec, ModelSpec

pytestmark = pytest.mark.timeout(300)

SPECS = {
    "a": LoraSpec(rank=8, seed=1),
    "b": LoraSpec(rank=32, seed=2, train_mlp=False),
    "c": LoraSpec(rank=1, seed=3, train_attn=False, train_unembed=False),
}


def program(name: str, vocabulary: int) -> list[tuple]:
    """One run's commands: accumulated gradients, a batch that fails, a forward without gradient, steps, a reload."""
    good = [numerics.batch(vocabulary, lengths=(9, 5, 12), seed=ord(name) * 10 + n) for n in range(3)]
    first = good[0][0]
    # One for each rank: the ranks of a group wait for each other when only some of them fail.
    broken = [good[0][1], *[Datum(first.tokens, {**first.inputs, "target_tokens": np.full(len(first.tokens), 10**9)})] * 3]
    return [("train", good[0]), ("train", good[1]), ("fail", broken), ("step",), ("save",), ("train", good[2]),
            ("forward", good[0]), ("step",), ("load",), ("fail", broken), ("train", good[1]), ("step",)]


def carry_out(live, name: str, command: tuple, folder) -> None:
    engine, (kind, *data) = live.engine, command
    if kind in ("train", "forward"):
        live.do(engine.forward_backward(name, data[0], "cross_entropy", {}, kind == "train"))
    elif kind == "fail":
        with pytest.raises(EngineError):
            live.do(engine.forward_backward(name, data[0], "cross_entropy", {}, True))
    elif kind == "step":
        live.do(engine.optim_step(name, numerics.ADAM))
    elif kind == "save":
        (folder / name).mkdir()
        live.do(engine.save_state(name, folder / name))
    else:
        live.do(engine.load_state(name, folder / name, True))


def adapters_after(live, order: list[str], folder, parks: random.Random | None = None) -> dict[str, dict]:
    """Carry out the runs' programs, each in its own order, the runs in the given order; their adapters.

    With `parks` every third command finds its run on disk.
    """
    folder.mkdir()
    vocabulary = live.settings.models[0].vocab_size
    left = {name: program(name, vocabulary) for name in sorted(set(order))}
    for name in left:
        live.do(live.engine.create_model(name, ModelSpec(live.name, SPECS[name])))
    for n, name in enumerate(order):
        if parks and parks.random() < 0.3:
            parked = folder / f"parked-{n}"
            parked.mkdir()
            live.do(live.engine.park(name, parked))
            live.do(live.engine.unpark(name, ModelSpec(live.name, SPECS[name]), parked))
        carry_out(live, name, left[name].pop(0), folder)
    results = {}
    for name in left:
        end = folder / f"{name}-end"
        end.mkdir()
        live.do(live.engine.save_state(name, end))
        results[name] = load_file(end / "adapter_model.safetensors")
        live.do(live.engine.drop_model(name))
    return results


def check_isolation(live, tmp_path, orders: int) -> None:
    length = len(program("a", 10))
    alone = {}
    for name in SPECS:
        alone |= adapters_after(live, [name] * length, tmp_path / f"alone-{name}")
    for n in range(orders):
        order = [name for name in SPECS for _ in range(length)]
        rng = random.Random(n)
        rng.shuffle(order)
        together = adapters_after(live, order, tmp_path / f"together-{n}", rng)
        for name, tensors in alone.items():
            assert together[name].keys() == tensors.keys()
            gap = max(float((together[name][key] - tensor).abs().max()) for key, tensor in tensors.items())
            assert gap < 1e-6, (name, order)
    assert not any("mlp" in key for key in alone["b"]) and any("lm_head" in key for key in alone["b"])
    assert all("mlp" in key for key in alone["c"])
    assert alone["a"]["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[0] == 8


def test_interleaved_runs_equal_separate_runs(live, tmp_path):
    check_isolation(live, tmp_path, 3)


def test_interleaved_runs_equal_separate_runs_on_two_ranks(pair, tmp_path):
    check_isolation(pair, tmp_path, 2)
