"""verl's platform plugin for a machine without a GPU: torch's CPU device and Gloo.

Owns verl's view of the device. Must not import verl.workers: verl loads this at the end of its own import.
"""

from __future__ import annotations

import resource
import types
from contextlib import contextmanager

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _resident_bytes(*_args, **_kwargs) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_module() -> types.ModuleType:
    """torch.cpu with the calls that verl makes of torch.cuda; memory figures are those of the process."""
    module = types.ModuleType("verl_tinker_cpu_device")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _resident_bytes)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_per_process_memory_fraction"):
        setattr(module, name, lambda *args, **kwargs: None)
    module.mem_get_info = lambda *args, **kwargs: (0, 0)
    module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    module.manual_seed = torch.manual_seed
    module.manual_seed_all = torch.manual_seed
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """One device, the host's processor."""

    device_name = "cpu"
    vendor_name = "cpu"

    def __init__(self) -> None:
        self._module = _device_module()

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # verl calls tensor.to(current_device()); an index would mean a GPU.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index) -> None: ...

    def synchronize(self, device_index=None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index=None):
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        # Of those that Ray numbers; asked for only where the cluster was given logical ones.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self):
        return None
