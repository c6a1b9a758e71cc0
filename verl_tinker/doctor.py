"""Looks at this machine for what would keep a server from working, and tells the remedy of each.

Owns the checks. Changes nothing, and works where the engines are not installed; presets are checked by `verl_tinker.config`.

    python -m verl_tinker.doctor --config configs/quick_start/cpu.yaml
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

GIB = 2**30
ENGINES = ("verl", "vllm", "torch", "transformers", "ray")
INSTALL = "run ./install_verl.sh of the repository, and use its .venv"
# Of the smallest server: SmolLM2 without a GPU takes 6.2 GiB, and more with full batches.
_MEMORY, _SHM, _DISK = 8 * GIB, 1 * GIB, 5 * GIB
_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """`bad` keeps a server from working, `warn` may; `remedy` says what to do."""

    what: str
    level: Literal["ok", "warn", "bad"]
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Place:
    """Where the server is to listen and to save."""

    host: str = "127.0.0.1"
    port: int = 8000
    checkpoint_dir: Path = Path("~/.local/share/verl-tinker/checkpoints").expanduser()


def examine(place: Place, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Every finding, good ones too."""
    yield python()
    yield from packages()
    yield libraries()
    yield from gpus()
    yield processor()
    yield memory()
    yield shared_memory()
    yield disk("checkpoints", place.checkpoint_dir)
    yield disk("temporary files", Path(environ.get("TMPDIR") or "/tmp"))
    yield port(place.host, place.port)
    yield open_files()
    yield proxy(environ)
    yield other_ray()


def python() -> Finding:
    version = platform.python_version()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return Finding("system", "bad", f"{platform.system()} on {platform.machine()}",
                       "use Linux on x86-64; nothing else was tried")
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        return Finding("python", "bad", f"Python {version}", "use Python 3.11 or 3.12")
    return Finding("python", "ok", f"Python {version} at {sys.prefix}")


def packages() -> Iterator[Finding]:
    """The engines' packages: there, and as this release pins them."""
    found = {name: _version(name) for name in ENGINES}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        yield Finding("packages", "bad", f"not installed: {', '.join(missing)}", INSTALL)
    device = "cpu" if "+cpu" in (found["torch"] or "+cpu") else "cuda"
    pins = _pins(device)
    others = [f"{name} {version} instead of {pins[name]}" for name, version in found.items()
              if version and name in pins and pins[name] != version]
    if others:
        yield Finding("packages", "warn", f"other versions than were tested: {', '.join(others)}", INSTALL)
    if not missing and not others:
        yield Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))


def libraries() -> Finding:
    """What vLLM's CPU build is linked against and no wheel holds; without it, vLLM begins and then lacks its operations."""
    if "+cpu" not in (_version("torch") or ""):
        return Finding("libraries", "ok", "nothing but what the packages hold")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return Finding("libraries", "bad", "libnuma.so.1 is missing, which vLLM's CPU build needs",
                       "install it: apt-get install libnuma1, or numactl-libs")
    return Finding("libraries", "ok", "libnuma.so.1 is there")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pins(device: str) -> dict[str, str]:
    """The tested versions; only a checkout has the file."""
    file = Path(__file__).resolve().parent.parent / "requirements" / f"{device}.txt"
    if not file.is_file():
        return {}
    lines = (line.split(";")[0].strip().partition("==") for line in file.read_text().splitlines())
    return {name: version for name, _, version in lines if version}


def gpus() -> Iterator[Finding]:
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    listed = _nvidia_smi("name,driver_version,memory.used,memory.total")
    if not listed:
        if has_device:
            yield Finding("gpu", "bad", "there is an NVIDIA device and nvidia-smi does not work",
                          "install the driver, or give the container its libraries (--gpus all)")
        else:
            yield Finding("gpu", "ok", "none; the server uses the processor")
        return
    torch_version = _version("torch")
    for number, line in enumerate(listed):
        name, driver, used, total = (part.strip() for part in line.split(","))
        busy = int(used) > int(total) / 10
        yield Finding(f"gpu {number}", "warn" if busy else "ok", f"{name}, driver {driver}, {used} of {total} MiB used",
                      "end what uses it, or choose others by CUDA_VISIBLE_DEVICES" if busy else "")
    if torch_version and "+cpu" in torch_version:
        yield Finding("gpu", "warn", f"torch {torch_version} cannot use it", "run ./install_verl.sh --device cuda")
    elif torch_version and not _torch_sees_cuda():
        yield Finding("gpu", "bad", f"torch {torch_version} does not find a usable GPU",
                      "install a driver that is new enough for it; nvidia-smi shows its CUDA version")


def _nvidia_smi(fields: str) -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], capture_output=True,
                              text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _torch_sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def processor() -> Finding:
    cores = len(os.sched_getaffinity(0))
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "").split()
    if "avx2" not in flags:
        return Finding("processor", "bad", f"{cores} cores without AVX2",
                       "vLLM's CPU build needs it; use a newer machine, or a GPU")
    best = "AVX-512" if "avx512f" in flags else "AVX2"
    if cores < 2:
        return Finding("processor", "warn", f"one core, {best}", "give it two: trainer and sampler share them")
    return Finding("processor", "ok", f"{cores} cores, {best}")


def memory() -> Finding:
    """What is free for this process: of the machine, or of its container."""
    free, where = psutil.virtual_memory().available, "free"
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None and limit - used < free:
        free, where = limit - used, "free in this container"
    if free < _MEMORY:
        return Finding("memory", "warn", f"{_gib(free)} {where}", f"a small model without a GPU needs {_gib(_MEMORY)}; "
                       "verl-tinker plan tells what a preset needs")
    return Finding("memory", "ok", f"{_gib(free)} {where}")


def shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", "bad", "it is not there", "mount a tmpfs there: Ray and the workers pass data through it")
    if free < _SHM:
        return Finding("/dev/shm", "bad", f"{_gib(free)} free", "give it more, as in docker run --shm-size=4g; Ray and the "
                       "workers pass data through it, and snapshots lie there (server.snapshot_memory_gb)")
    return Finding("/dev/shm", "ok", f"{_gib(free)} free")


def disk(what: str, folder: Path) -> Finding:
    """The disk of a folder, which need not be there yet."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding(what, "bad", f"{nearest} cannot be written to",
                       "choose another folder by --set server.checkpoint_dir=FOLDER, or TMPDIR for temporary files")
    usage = shutil.disk_usage(nearest)
    if usage.free < _DISK or usage.free < usage.total * 0.05:
        return Finding(what, "warn", f"{_gib(usage.free)} free of {_gib(usage.total)} for {folder}",
                       "make room, or choose another disk; Ray stops to write when less than 5% are free")
    return Finding(what, "ok", f"{_gib(usage.free)} free for {folder}")


def port(host: str, number: int) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            return Finding("port", "bad", f"{host}:{number} is not to be had ({error.strerror})",
                           "stop what listens there (verl-tinker status tells whether it is this server), or choose another "
                           "by --set server.port=N")
    return Finding("port", "ok", f"{host}:{number} is free")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        most = min(hard, 65536) if hard > 0 else 65536
        return Finding("open files", "warn", f"{soft} may be open",
                       f"ulimit -n {most}: every client that waits for a result holds one")
    return Finding("open files", "ok", "without limit" if soft == resource.RLIM_INFINITY else f"{soft} may be open")


def proxy(environ: Mapping[str, str]) -> Finding:
    names = [name for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy") if environ.get(name)]
    spared = (environ.get("NO_PROXY") or environ.get("no_proxy") or "").replace(" ", "").split(",")
    if names and not {"*", "127.0.0.1"} & set(spared):
        return Finding("proxy", "warn", f"{names[0]} is set, and NO_PROXY does not name 127.0.0.1",
                       "export NO_PROXY=127.0.0.1,localhost, or clients on this machine ask the proxy for the server")
    return Finding("proxy", "ok", "not in the way of clients on this machine")


def other_ray() -> Finding:
    running = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet"]
    if running:
        return Finding("ray", "warn", f"Ray runs already (process {', '.join(map(str, running))})",
                       "a server starts one of its own beside it, which shares cores and memory; end it if nobody needs it, "
                       "or use it by RAY_ADDRESS")
    return Finding("ray", "ok", "none runs yet")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _number(path: str) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _place(config: str | None, overrides: list[str]) -> tuple[Place, list[Finding]]:
    """What the preset says, where presets can be read."""
    if any(_version(name) is None for name in ENGINES):
        return Place(), []
    from verl_tinker.config import load_config
    from verl_tinker.schema import ConfigError

    try:
        found = load_config(config, overrides)
    except ConfigError as error:
        return Place(), [Finding("preset", "bad", str(error), "verl-tinker check shows the whole preset once it is mended")]
    place = Place(found.server.host, found.server.port, found.checkpoint_dir)
    return place, [Finding("preset", "ok", f"{found.source} for {found.device}")]


def _line(finding: Finding) -> str:
    mark = {"ok": "ok  ", "warn": "WARN", "bad": "BAD "}[finding.level]
    return f"{mark}  {finding.what}: {finding.text}" + (f"\n      {finding.remedy}" if finding.remedy else "")


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(prog="verl-tinker doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--config", metavar="FILE", help="a preset; by default the one that suits this machine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="lay one value over the preset; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the findings for programs")
    options = parser.parse_args(arguments)
    place, findings = _place(options.config, options.overrides)
    findings += examine(place)
    bad = sum(finding.level == "bad" for finding in findings)
    if options.json:
        show(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            show(_line(finding))
        show(f"{bad} of {len(findings)} keep a server from working" if bad else "Nothing keeps a server from working.")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
