"""Measures how far trainer, sampler and plain transformers + torch are apart, in float32.

Owns the measurements that docs/numerics.md shows and tests/engine asserts. Does not judge them.

    python bench/numerics.py        (writes docs/numerics.md)
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import plain  # noqa: E402

from verl_tinker.core.types import (  # noqa: E402
    AdamParams,
    Datum,
    LoraSpec,
    ModelSpec,
    SampleRequest,
    SamplingParams,
)

# AdamW divides a gradient by its own size: with an eps far below the rounding of a gradient near zero, its sign is
# left to chance, on both sides of the comparison.
ADAM = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.01, grad_clip_norm=1.0)
# With eps far above the gradient, one AdamW step moves each weight by -lr * g / (|g| + eps): the gradient itself.
GRADIENT = AdamParams(learning_rate=1e3, beta1=0.0, beta2=0.0, eps=1e3, weight_decay=0.0, grad_clip_norm=0.0)


def batch(vocabulary: int, lengths=(9, 30, 17, 1, 24), seed: int = 0) -> list[Datum]:
    """Random sequences with weights of any sign, some of them zero."""
    rng = np.random.default_rng(seed)
    data = []
    for n in lengths:
        tokens = rng.integers(0, vocabulary, n + 1)
        weights = (rng.standard_normal(n) * (rng.random(n) > 0.3)).astype(np.float32)
        data.append(Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:], "weights": weights}))
    return data


def spec(engine, lora: bool, rank: int = 8) -> ModelSpec:
    return ModelSpec(engine.base_models()[0].name, LoraSpec(rank=rank, seed=7) if lora else None)


async def logprob_gaps(engine, folder: Path) -> dict[str, float]:
    """max |difference| in nats on the base model: trainer, sampler and transformers against each other."""
    model = plain.load_model(folder)
    tokens = np.random.default_rng(1).integers(0, engine.base_models()[0].vocab_size, 200).astype(np.int32)
    reference = plain.logprobs(model, tokens[:-1], tokens[1:]).detach().numpy()
    trainer = await engine.trainer.logprobs(None, tokens)
    result = await engine.sample(engine.base_models()[0].name, 0, SampleRequest(
        tokens, 1, SamplingParams(max_tokens=1), prompt_logprobs=True))
    sampler = result.prompt_logprobs[1:]
    return {"trainer - transformers": float(np.abs(trainer - reference).max()),
            "sampler - transformers": float(np.abs(sampler - reference).max()),
            "trainer - sampler": float(np.abs(trainer - sampler).max())}


async def sampled_gap(engine, folder: Path, temperature: float) -> float:
    """Sampled log-probabilities against transformers' at the same temperature, max |difference|."""
    model = plain.load_model(folder)
    prompt = np.arange(20, 40, dtype=np.int32)
    params = SamplingParams(max_tokens=32, temperature=temperature, stop=[], seed=3)
    drawn = (await engine.sample(engine.base_models()[0].name, 0, SampleRequest(prompt, 1, params))).sequences[0]
    import torch

    ids = torch.as_tensor(np.concatenate([prompt, drawn.tokens]).astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    reference = torch.log_softmax(logits, -1).gather(1, ids[len(prompt):, None])[:, 0].numpy()
    return float(np.abs(drawn.logprobs - reference).max())


async def start_run(engine, lora: bool, scratch: Path, name: str) -> plain.PlainRun:
    """A run, and its plain twin with the same starting weights; a first large step makes B differ from zero."""
    await engine.create_model(name, spec(engine, lora))
    if lora:
        await engine.forward_backward(name, batch(engine.base_models()[0].vocab_size, seed=9), "cross_entropy", {}, True)
        await engine.optim_step(name, AdamParams(learning_rate=1e-2))
    folder = scratch / f"{name}-start"
    folder.mkdir()
    await engine.save_state(name, folder)
    return plain.PlainRun(engine.settings.model_folder, folder if lora else None)


async def weights_gap(engine, twin: plain.PlainRun, scratch: Path, name: str, label: str) -> float:
    folder = scratch / f"{name}-{label}"
    folder.mkdir()
    await engine.save_state(name, folder)
    file = "adapter_model.safetensors" if (folder / "adapter_model.safetensors").exists() else "model.safetensors"
    return plain.largest_difference(twin.parameters, folder / file)


async def training_gaps(engine, lora: bool, scratch: Path, name: str) -> dict[str, float]:
    """Loss, gradient and the weights after three AdamW steps, against the plain twin.

    The twin's optimizer starts where the run's does: the run is loaded anew, which clears its moments.
    """
    vocabulary = engine.base_models()[0].vocab_size
    twin = await start_run(engine, lora, scratch, name)
    await engine.load_state(name, scratch / f"{name}-start", optimizer=False)
    loss_gap = norm_gap = update_gap = 0.0
    for i in range(3):
        data = batch(vocabulary, seed=20 + i)
        result = await engine.forward_backward(name, data, "cross_entropy", {}, True)
        loss = twin.forward_backward(data)
        loss_gap = max(loss_gap, abs(result.metrics["loss:sum"] - loss) / max(1.0, abs(loss)))
        metrics = await engine.optim_step(name, ADAM)
        before = {name: p.detach().clone() for name, p in twin.parameters.items()}
        norm = twin.step(ADAM)
        norm_gap = max(norm_gap, abs(metrics["grad_norm"] - norm) / norm)
        moved = sum(float((p.detach() - before[name]).double().square().sum()) for name, p in twin.parameters.items()) ** 0.5
        update_gap = max(update_gap, abs(metrics["update_norm"] - moved) / moved)
    steps = await weights_gap(engine, twin, scratch, name, "three")
    await engine.drop_model(name)
    return {"loss, relative": loss_gap, "gradient norm, relative": norm_gap, "update norm, relative": update_gap,
            "weights after 3 AdamW steps": steps}


async def gradient_gap(engine, lora: bool, scratch: Path, name: str) -> float:
    """max |gradient difference| over max |gradient|."""
    twin = await start_run(engine, lora, scratch, name)
    await engine.load_state(name, scratch / f"{name}-start", optimizer=False)
    data = batch(engine.base_models()[0].vocab_size, seed=31)
    await engine.forward_backward(name, data, "cross_entropy", {}, True)
    twin.forward_backward(data)
    largest = max(float(p.grad.abs().max()) for p in twin.parameters.values())
    await engine.optim_step(name, GRADIENT)
    twin.step(GRADIENT)
    gap = await weights_gap(engine, twin, scratch, name, "gradient")
    await engine.drop_model(name)
    return gap / largest


async def split_gap(engine, lora: bool, scratch: Path) -> float:
    """The weights after one step: a batch in one call against the same batch in five."""
    saved = []
    data = batch(engine.base_models()[0].vocab_size, seed=41)
    for label, parts in (("whole", [data]), ("split", [[d] for d in data])):
        name = f"split-{label}-{lora}"
        await engine.create_model(name, spec(engine, lora))
        for part in parts:
            await engine.forward_backward(name, part, "cross_entropy", {}, True)
        await engine.optim_step(name, GRADIENT)
        folder = scratch / name
        folder.mkdir()
        await engine.save_state(name, folder)
        saved.append(folder / ("adapter_model.safetensors" if lora else "model.safetensors"))
        await engine.drop_model(name)
    from safetensors.torch import load_file

    return plain.largest_difference(load_file(saved[0]), saved[1])


async def resume_gap(engine, lora: bool, optimizer: bool, scratch: Path) -> float:
    """Two steps, save, two steps; against load in a fresh run and the last two steps."""
    vocabulary = engine.base_models()[0].vocab_size
    first, second = f"resume-a-{lora}-{optimizer}", f"resume-b-{lora}-{optimizer}"

    async def steps(name: str, seeds) -> None:
        for seed in seeds:
            await engine.forward_backward(name, batch(vocabulary, seed=seed), "cross_entropy", {}, True)
            await engine.optim_step(name, ADAM)

    async def save(name: str, label: str) -> Path:
        folder = scratch / f"{name}-{label}"
        folder.mkdir()
        await engine.save_state(name, folder)
        return folder

    await engine.create_model(first, spec(engine, lora))
    await steps(first, (50, 51))
    middle = await save(first, "middle")
    await steps(first, (52, 53))
    whole = await save(first, "end")
    await engine.drop_model(first)
    await engine.create_model(second, spec(engine, lora))
    await engine.load_state(second, middle, optimizer)
    await steps(second, (52, 53))
    resumed = await save(second, "end")
    await engine.drop_model(second)
    from safetensors.torch import load_file

    file = "adapter_model.safetensors" if lora else "model.safetensors"
    return plain.largest_difference(load_file(whole / file), resumed / file)


async def all_figures(engine, folder: Path, scratch: Path) -> list[tuple[str, float]]:
    """Every figure by name, in the order of the page."""
    rows = list((await logprob_gaps(engine, folder)).items())
    rows += [(f"sampled log-probabilities at temperature {t}", await sampled_gap(engine, folder, t)) for t in (1.0, 0.7)]
    for lora, kind in ((True, "LoRA"), (False, "full")):
        rows.append((f"{kind}: gradient, relative to its largest entry", await gradient_gap(engine, lora, scratch, f"g{lora}")))
        rows += [(f"{kind}: {k}", v) for k, v in (await training_gaps(engine, lora, scratch, f"t{lora}")).items()]
        rows.append((f"{kind}: batch in one call against five, gradient", await split_gap(engine, lora, scratch)))
        rows.append((f"{kind}: resumed with optimizer against uninterrupted", await resume_gap(engine, lora, True, scratch)))
        rows.append((f"{kind}: resumed without optimizer against uninterrupted (must differ)",
                     await resume_gap(engine, lora, False, scratch)))
    return rows


async def measure(model: str, workers: int) -> list[tuple[str, float]]:
    from verl_tinker.config import load_config
    from verl_tinker.engine.verl_engine import VerlEngine
    from verl_tinker.wiring import engine_settings

    with tempfile.TemporaryDirectory() as scratch:
        config = load_config("configs/quick_start/cpu.yaml", [
            f"server.model_path={model}", f"trainer.n_gpus_per_node={workers}"])
        settings = engine_settings(config, Path(scratch))
        engine = VerlEngine(settings)
        try:
            await engine.start(lambda phase: None)
            return await all_figures(engine, settings.model_folder, Path(scratch))
        finally:
            await engine.close()


def main() -> None:
    from verl_tinker.config import load_config
    from verl_tinker.start import _prepare_environment

    _prepare_environment(load_config("configs/quick_start/cpu.yaml"))
    columns = [("tiny, 1 worker", "bundled:tiny", 1), ("tiny, 2 workers", "bundled:tiny", 2),
               ("SmolLM2-135M, 1 worker", "bundled:smollm2", 1)]
    tables = [asyncio.run(measure(model, workers)) for _, model, workers in columns]
    lines = ["# Numbers, measured", "",
             "Made by `python bench/numerics.py` on the CPU preset (float32 everywhere). Differences are absolute, in nats",
             "or in units of a weight, unless a row says otherwise. The reference is plain transformers and torch, one",
             "sequence at a time. `tests/engine` asserts the same measurements.", "",
             "| figure | " + " | ".join(label for label, _, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for i, (name, _) in enumerate(tables[0]):
        lines.append(f"| {name} | " + " | ".join(f"{table[i][1]:.1e}" for table in tables) + " |")
    (ROOT / "docs" / "numerics.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
