"""What the server is measured against, each in a process of its own that answers one measurement a line.

Owns the work done without the server. Does not compare or print pages: `performance` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import workload
from workload import NEW_TOKENS, RANK, ROOT


def worker_group() -> dict[str, Callable[[], float]]:
    """The tiny model's calls on the worker group itself, seconds."""
    import numpy as np

    import numerics
    from live_engine import Live
    from verl_tinker.core.types import AdamParams, Datum

    live = Live([], Path(tempfile.mkdtemp()), rollout=False).start()
    live.do(live.engine.create_model("r", numerics.spec(live.engine, True, RANK)))
    data = [Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)})
            for row in workload.tiny_rows()]
    step = AdamParams(learning_rate=1e-5)
    return {
        "forward_backward": lambda: live.do(live.engine.forward_backward("r", data, "cross_entropy", {}, True)),
        "optim_step": lambda: live.do(live.engine.optim_step("r", step)),
        "close": live.close,
    }


def _vllm_arguments(scratch: Path) -> dict:
    """The server's own, for its small model; the environment and vLLM's hooks are set up too."""
    from verl_tinker.engine.cpu.environment import rollout_environment

    os.environ.update(rollout_environment(2, 1, str(scratch)))
    from live_engine import Live
    from verl_tinker.engine.cpu import vllm_cpu
    from verl_tinker.engine import rollout

    live = Live(["server.model_path=bundled:smollm2"], scratch)
    vllm_cpu.install()
    s = live.settings
    return rollout.in_process_args(s.model_folder, s.max_context, s.rollout_args, rollout.version_args(s, with_lora=True))


def direct_vllm() -> dict[str, Callable[[], float]]:
    """vLLM's own engine with the server's engine arguments, threads, hooks and an adapter; tokens made."""
    scratch = Path(tempfile.mkdtemp())
    arguments = _vllm_arguments(scratch)
    from vllm import EngineArgs, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    adapter = LoRARequest("v1", 1, str(_adapter(Path(arguments["model"]), scratch / "adapter")))
    settings = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, seed=1, detokenize=False)

    def sample(count: int, lora) -> int:
        for i, prompt in enumerate(workload.prompts(count)):
            engine.add_request(f"{i}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, settings, lora_request=lora)
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(len(o.outputs[0].token_ids) for o in engine.step() if o.finished)
        return tokens

    return {f"{label}, {n}": lambda n=n, lora=lora: sample(n, lora)
            for label, lora in (("base", None), ("adapter", adapter)) for n in workload.CONCURRENCY}


def prompt_groups() -> dict[str, Callable[[], float]]:
    """The sampler as in the server, on prompts that it has not seen; prompt tokens that came from its cache."""
    import numpy as np

    arguments = _vllm_arguments(Path(tempfile.mkdtemp()))
    from verl_tinker.core.types import SampleRequest, SamplingParams
    from verl_tinker.engine.sampler_loop import SamplerLoop

    loop, rng = SamplerLoop(arguments, arguments["model"]), np.random.default_rng(2)

    def sample(length: int, requests: int, samples: int) -> int:
        prompt = rng.integers(100, 40000, length).astype(np.int32)
        request = SampleRequest(prompt, samples, SamplingParams(max_tokens=1, stop=[]))
        futures = [loop.submit(request, 0) for _ in range(requests)]
        return sum(future.result().cache_hit_tokens for future in futures)

    return {f"{length}, {requests} x {samples}": lambda a=(length, requests, samples): sample(*a)
            for length in workload.PROMPT_LENGTHS for requests, samples in ((1, 1), (1, workload.GROUP), (workload.GROUP, 1))
            } | {"close": loop.close}


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
    made.save(folder, workload.MODEL)
    return folder


def plain_training() -> dict[str, Callable[[], float]]:
    """transformers + peft in float32, in micro batches of as many tokens as the server takes; tokens trained."""
    import plain
    import torch
    from peft import LoraConfig, get_peft_model

    from verl_tinker.models import resolve_model

    torch.set_num_threads(2)
    model = plain.load_model(resolve_model("bundled:smollm2"))
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))

    def forward_backward(rows, size=8) -> int:
        for part in rows.split(size):
            logits = model(part[:, :-1], use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").backward()
        return rows.numel() - len(rows)

    rows = torch.as_tensor(workload.train_rows())
    return {"training": lambda: forward_backward(rows)}


class Peer:
    """A process that does one of the functions above; `measure` runs a named call of it alone."""

    def __init__(self, role: str):
        from verl_tinker.engine.cpu.environment import compute_environment

        self.process = subprocess.Popen(
            [sys.executable, __file__, role], cwd=ROOT, env={**os.environ, **compute_environment(2)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, name: str) -> tuple[float, float]:
        """Seconds that the call took, and what it returned (a count of tokens, or 0)."""
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("measured "):
                return tuple(json.loads(line.removeprefix("measured ")))
        raise RuntimeError(f"the peer ended while it measured {name}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    calls = {"worker-group": worker_group, "direct-vllm": direct_vllm, "plain-training": plain_training,
             "prompt-groups": prompt_groups}[sys.argv[1]]()
    for line in sys.stdin:
        began = time.perf_counter()
        result = calls[line.strip()]()
        seconds = time.perf_counter() - began
        print("measured", json.dumps([seconds, result if isinstance(result, int) else 0]), flush=True)
    calls.get("close", lambda: None)()
    os._exit(0)


if __name__ == "__main__":
    main()
