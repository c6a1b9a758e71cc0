"""A real engine on the tiny model, shared by the tests of this folder."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from live_engine import STOCK, Live

from verl_tinker.engine.cpu.environment import driver_environment

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))


class Engines:
    """At most one engine at a time: a process can be in one Ray cluster only."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.current: tuple[tuple, Live] | None = None

    def get(self, *overrides: str, rollout: bool = True, **changes) -> Live:
        wanted = (overrides, rollout, changes)
        if self.current is None or self.current[0] != wanted:
            self.close()
            self.memory = set(os.listdir("/dev/shm"))
            self.others = set(psutil.Process().children(recursive=True))
            engine = Live(list(overrides), self.scratch.mktemp("live"), rollout, **changes)
            self.current = (wanted, engine)
            engine.start()
        return self.current[1]

    def close(self) -> None:
        if self.current is not None:
            self.current[1].close()
            self.current = None


# What the folder's last test leaves to be ended: recipes need the memory.
_closers: list[Callable[[], None]] = []


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    shared = Engines(tmp_path_factory)
    _closers.append(shared.close)
    yield shared
    shared.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path.parent != item.path.parent:
        while _closers:
            _closers.pop()()
        gc.collect()


@pytest.fixture
def live(engines):
    return engines.get()


@pytest.fixture
def stock(engines):
    """verl's own replica, placed and put to sleep as on GPUs, on logical ones."""
    return engines.get(*STOCK, replica="stock", takes_turns=True)


@pytest.fixture
def pair(engines):
    """Two trainer ranks, no sampler."""
    return engines.get("trainer.n_gpus_per_node=2", "cpu.threads=1", rollout=False)


@pytest.fixture
def sharing(engines):
    """Two trainer ranks that share each sequence, no sampler."""
    return engines.get("trainer.n_gpus_per_node=2", "cpu.threads=1", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
                       rollout=False)


@pytest.fixture
def run_name(request, live):
    """The name of a run that is dropped after the test."""
    name = request.node.name
    yield name
    live.do(live.engine.drop_model(name))


@pytest.fixture(scope="session")
def tied() -> Path:
    from verl_tinker.models import resolve_model

    return resolve_model("bundled:tiny-tied")


@pytest.fixture(scope="session")
def loop(tied, tmp_path_factory):
    """vLLM in this process; prompts of more than 128 tokens go through in chunks."""
    from verl_tinker.engine.cpu.environment import rollout_environment

    os.environ.update(rollout_environment(2, 1, str(tmp_path_factory.mktemp("vllm"))))
    from verl_tinker.engine.cpu import vllm_cpu
    from verl_tinker.engine.rollout import LORA_TARGETS
    from verl_tinker.engine.sampler_loop import SamplerLoop

    vllm_cpu.install()
    loop = SamplerLoop({
        "model": str(tied), "dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 16,
        "max_num_batched_tokens": 128, "max_logprobs": 128, "logprobs_mode": "processed_logprobs", "seed": 0,
        "enable_lora": True, "max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": 16,
        "lora_target_modules": LORA_TARGETS}, str(tied))

    def close():
        loop.close()
        loop.engine = None

    _closers.append(close)
    return loop


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.engine)


# Before any test imports ray, which reads them once: its cluster would listen on every interface.
os.environ.update({"TOKENIZERS_PARALLELISM": "false", **driver_environment()})
# And one token for it and for the clusters that it joins.
os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
