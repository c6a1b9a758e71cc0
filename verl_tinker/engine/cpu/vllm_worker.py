"""The vLLM worker process of verl's replica on a machine without a GPU.

Owns the moment at which the hooks of `vllm_cpu` are set: before the model is built. Adds no method.
"""

from __future__ import annotations

from verl_tinker.engine.cpu import vllm_cpu
from verl_tinker.engine.vllm_worker import TinkerWorkerExtension


class CpuWorkerExtension(TinkerWorkerExtension):
    def __new__(cls, **kwargs):
        vllm_cpu.install()
        return super().__new__(cls, **kwargs)
