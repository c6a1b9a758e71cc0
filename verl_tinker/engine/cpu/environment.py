"""The environment variables of processes on a machine without a GPU.

Owns which variables and why. Does not start any process.
"""

from __future__ import annotations

import os


def driver_environment() -> dict[str, str]:
    """Variables for the server's own process; they must be set before ray and verl are imported."""
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_tinker.engine.cpu.platform",
        # Ray's own switch for clusters that listen on loopback alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray lowers its workers' priority to 15, where they starve beside any busy process.
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "150",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def worker_environment(threads: int, rendezvous_file: str) -> dict[str, str]:
    """Variables for a trainer worker. `rendezvous_file` must be new for every start of a worker group."""
    return {
        **driver_environment(),
        **compute_environment(threads),
        # A file store and loopback Gloo: torch's TCP store would listen on all interfaces.
        "DIST_INIT_METHOD": f"file://{rendezvous_file}",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def rollout_environment(threads: int, kv_cache_gb: int, scratch: str) -> dict[str, str]:
    """Variables for the process that holds vLLM's engine; vLLM leaves files in `scratch`, which the server removes."""
    return {
        "TMPDIR": scratch,
        **driver_environment(),
        **compute_environment(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }


def compute_environment(threads: int) -> dict[str, str]:
    """Variables that decide how fast torch computes."""
    never = str(1 << 32)
    return {
        "OMP_NUM_THREADS": str(threads),
        # vLLM and verl have torch compile two small functions: half a minute of C++ at each start, for no gain here, and an
        # error where there is no compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # OpenMP threads that sleep while they wait; spinning costs several times the work on shared cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        # glibc would hand every large tensor back to the system, and its pages would be cleared anew each time.
        # One arena, because other threads' arenas hand large blocks back whatever the thresholds say.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": never,
        "MALLOC_TRIM_THRESHOLD_": never,
    }
