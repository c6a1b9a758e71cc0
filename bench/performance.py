"""Speed as ratios: the server through the SDK against the same work without it, in one run, one after the other.

Owns docs/performance.md. Does not judge: the targets stand in the page. Run it on an otherwise idle machine.

    python bench/performance.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
os.environ.setdefault("TINKER_API_KEY", "tml-bench")

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK = 32
NEW_TOKENS, CONCURRENCY = 64, (1, 16, 64)
CALLS = 100
SEQUENCES, LENGTH = 16, 256


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(100, 40000, 32).tolist() for _ in range(count)]


def train_tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(100, 40000, (SEQUENCES, LENGTH + 1))


def percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {"p50": float(p50), "p99": float(p99)}


def timed(function, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return seconds


def datums(tokens: np.ndarray):
    from tinker import types

    return [types.Datum(model_input=types.ModelInput.from_ints(row[:-1].tolist()), loss_fn_inputs={
        "target_tokens": row[1:].astype(np.int64), "weights": np.ones(len(row) - 1, np.float32)}) for row in tokens]


def client(url: str):
    import tinker

    service = tinker.ServiceClient(base_url=url)
    return service, service.create_lora_training_client(base_model=MODEL, rank=RANK, seed=1).result()


def through_sdk_overhead(url: str) -> dict:
    """Tiny calls one after the other, milliseconds."""
    from tinker import types

    service, training = client(url)
    data = datums(train_tokens()[:2, :9])

    def forward_backward():
        training.forward_backward(data, "cross_entropy").result()

    def optim_step():
        training.optim_step(types.AdamParams(learning_rate=1e-5)).result()

    timed(forward_backward, 5), timed(optim_step, 1)
    result = {"forward_backward": [], "optim_step": []}
    for _ in range(CALLS):
        result["forward_backward"] += timed(forward_backward, 1)
        result["optim_step"] += timed(optim_step, 1)
    service.close("success")
    return {name: percentiles(seconds) for name, seconds in result.items()}


def on_worker_group() -> dict:
    """The same calls on the worker group itself."""
    import numerics
    from live_engine import Live

    from verl_tinker.core.types import AdamParams, Datum

    with tempfile.TemporaryDirectory() as scratch:
        live = Live([], Path(scratch), rollout=False).start()
        try:
            live.do(live.engine.create_model("r", numerics.spec(live.engine, True, RANK)))
            data = [Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": np.ones(8, np.float32)})
                    for row in train_tokens()[:2, :9]]

            def forward_backward():
                live.do(live.engine.forward_backward("r", data, "cross_entropy", {}, True))

            def optim_step():
                live.do(live.engine.optim_step("r", AdamParams(learning_rate=1e-5)))

            timed(forward_backward, 5), timed(optim_step, 1)
            result = {"forward_backward": [], "optim_step": []}
            for _ in range(CALLS):
                result["forward_backward"] += timed(forward_backward, 1)
                result["optim_step"] += timed(optim_step, 1)
            return {name: percentiles(seconds) for name, seconds in result.items()}
        finally:
            live.close()


def through_sdk(url: str) -> dict:
    """Training and sampling speed of the small model, and the delay from a save to the first token."""
    from tinker import types

    service, training = client(url)
    data = datums(train_tokens())
    training.forward_backward(data[:2], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    seconds = timed(lambda: training.forward_backward(data, "cross_entropy").result(), 2)
    result = {"training": SEQUENCES * LENGTH / min(seconds)}
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    saves = []
    one = types.SamplingParams(max_tokens=1)
    for _ in range(3):
        began = time.perf_counter()
        sampler = training.save_weights_and_get_sampling_client().result()
        sampler.sample(types.ModelInput.from_ints(prompts(1)[0]), 1, one).result()
        saves.append(time.perf_counter() - began)
    result["save to first token, seconds"] = float(np.median(saves))
    base = service.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=NEW_TOKENS, stop=[], seed=1)
    for label, sampling in (("base", base), ("adapter", sampler)):
        for n in CONCURRENCY:
            result[f"sampling, {label}, {n}"] = _rate(sampling, params, n)
    service.close("success")
    return result


def _rate(sampling, params, n: int) -> float:
    from tinker import types

    began = time.perf_counter()
    futures = [sampling.sample(types.ModelInput.from_ints(p), 1, params) for p in prompts(n)]
    tokens = sum(len(f.result().sequences[0].tokens) for f in futures)
    return tokens / (time.perf_counter() - began)


def direct_vllm() -> dict:
    """vLLM's own engine in this process with the server's engine arguments, threads, hooks and adapter."""
    with tempfile.TemporaryDirectory() as scratch:
        from verl_tinker.engine.cpu.environment import rollout_environment

        os.environ.update(rollout_environment(2, 1, scratch))
        from live_engine import Live

        live = Live(["server.model_path=bundled:smollm2"], Path(scratch))
        from verl_tinker.engine.cpu import vllm_cpu
        from verl_tinker.engine.sampler import Sampler

        vllm_cpu.install()
        from vllm import EngineArgs, SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_engine_args(EngineArgs(**Sampler(live.settings, {}, with_lora=True)._engine_args()))
        adapter = _adapter(live.settings.model_folder, Path(scratch) / "adapter")
        result = {}
        for label, lora in (("base", None), ("adapter", LoRARequest("v1", 1, str(adapter)))):
            for n in (1, *CONCURRENCY):
                began = time.perf_counter()
                for i, prompt in enumerate(prompts(n)):
                    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, seed=1, detokenize=False)
                    engine.add_request(f"{label}{n}-{i}-{began}", {"prompt_token_ids": prompt}, params, lora_request=lora)
                tokens = 0
                while engine.has_unfinished_requests():
                    tokens += sum(len(o.outputs[0].token_ids) for o in engine.step() if o.finished)
                result[f"sampling, {label}, {n}"] = tokens / (time.perf_counter() - began)
        return result


def _adapter(model_folder: Path, folder: Path) -> Path:
    import plain
    import torch

    from verl_tinker.core.types import LoraSpec
    from verl_tinker.engine import adapters

    model = plain.load_model(model_folder)
    layers = adapters.install_layers(model, adapters.linear_names(model, tied_embeddings=True))
    made = adapters.Adapter.create(layers, LoraSpec(rank=RANK, seed=1), 32.0, torch.float32, "cpu")
    for _, b in made.tensors.values():
        torch.nn.init.normal_(b, std=1e-3)
    folder.mkdir()
    made.save(folder, MODEL)
    return folder


def plain_training() -> dict:
    """transformers + peft, the batch in micro batches of as many tokens as the server takes, float32."""
    import torch
    from peft import LoraConfig, get_peft_model

    import plain
    from verl_tinker.models import resolve_model

    torch.set_num_threads(2)
    model = plain.load_model(resolve_model("bundled:smollm2"))
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))
    rows = torch.as_tensor(train_tokens())

    def forward_backward(rows, size=8):
        for part in rows.split(size):
            logits = model(part[:, :-1]).logits
            (-torch.log_softmax(logits, -1).gather(2, part[:, 1:, None]).sum()).backward()

    forward_backward(rows[:2])
    return {"training": SEQUENCES * LENGTH / min(timed(lambda: forward_backward(rows), 2))}


ROLES = {"worker-group": on_worker_group, "direct-vllm": direct_vllm, "plain-training": plain_training}


def role(name: str) -> dict:
    """A measurement in a process of its own, so that nothing of the others is in memory."""
    from verl_tinker.engine.cpu.environment import thread_environment

    print(f"measuring {name}", flush=True)
    done = subprocess.run([sys.executable, __file__, "--role", name], cwd=ROOT, check=True, stdout=subprocess.PIPE,
                          env={**os.environ, **thread_environment(2)}, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def with_server(function, *overrides: str) -> dict:
    from real_server import start_server, stop_server

    with tempfile.TemporaryDirectory() as folder:
        print(f"measuring {function.__name__}", flush=True)
        process, url = start_server(Path(folder), *overrides)
        try:
            return function(url)
        finally:
            stop_server(process)


def page(overhead: dict, group: dict, sdk: dict, vllm: dict, training: dict) -> str:
    import platform

    lines = [
        "# Speed, as ratios", "",
        f"Made by `python bench/performance.py` on {os.cpu_count()} cores ({_processor()}), Python {platform.python_version()},",
        f"float32, {time.strftime('%Y-%m-%d')}. Every ratio compares two figures of the same run. SmolLM2-135M, LoRA rank {RANK},",
        "but for the first table, which uses the tiny model so that the server's own cost shows.", "",
        "## A tiny call through SDK and HTTP, and on the worker group itself (milliseconds)", "",
        "| call | SDK p50 | SDK p99 | group p50 | group p99 | added at p50 |", "|---|---|---|---|---|---|"]
    for name in overhead:
        a, b = overhead[name], group[name]
        lines.append(f"| {name} | {a['p50']:.1f} | {a['p99']:.1f} | {b['p50']:.1f} | {b['p99']:.1f} | {a['p50'] - b['p50']:.1f} |")
    lines += ["", f"## Sampling, tokens a second, {NEW_TOKENS} new tokens a request", "",
              "The other side is vLLM's engine driven directly, with the same engine arguments, threads and LoRA products.", "",
              "| weights, requests at once | through the SDK | vLLM directly | ratio |", "|---|---|---|---|"]
    for key in (k for k in sdk if k.startswith("sampling")):
        lines.append(f"| {key.removeprefix('sampling, ')} | {sdk[key]:.0f} | {vllm[key]:.0f} | {sdk[key] / vllm[key]:.2f} |")
    lines += ["", f"## Training, tokens a second, forward_backward of {SEQUENCES} x {LENGTH}", "",
              "| through the SDK | transformers + peft | ratio |", "|---|---|---|",
              f"| {sdk['training']:.0f} | {training['training']:.0f} | {sdk['training'] / training['training']:.2f} |", "",
              "## From save_weights_for_sampler to the first token", "",
              f"{sdk['save to first token, seconds']:.2f} s (median of 3): export, load, the comparison of trainer and sampler, one token.", ""]
    return "\n".join(lines)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", choices=ROLES)
    options = parser.parse_args()
    if options.role:
        print(json.dumps(ROLES[options.role]()))
        sys.stdout.flush()
        os._exit(0)
    overhead = with_server(through_sdk_overhead, "server.model_path=bundled:tiny")
    group = role("worker-group")
    sdk = with_server(through_sdk)
    vllm = role("direct-vllm")
    training = role("plain-training")
    text = page(overhead, group, sdk, vllm, training)
    (ROOT / "docs" / "performance.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
