"""`doctor`: each thing that can be wrong is made wrong, and found with its remedy; also without the engines."""

import json
import os
import resource
import socket
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_tinker import doctor
from verl_tinker.doctor import Finding, Place

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]


def said(finding: Finding, level: str, *words: str) -> None:
    assert finding.level == level, finding
    assert all(word in f"{finding.text} {finding.remedy}" for word in words), finding


def test_a_taken_port_is_found():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        said(doctor.port("127.0.0.1", number), "bad", str(number), "server.port=N")
    said(doctor.port("127.0.0.1", number), "ok", "free")


def test_a_disk_without_room_or_rights_is_found(tmp_path, monkeypatch):
    said(doctor.disk("checkpoints", tmp_path / "not" / "yet"), "ok", str(tmp_path / "not" / "yet"))
    (tmp_path / "file").touch()
    said(doctor.disk("checkpoints", tmp_path / "file" / "under"), "bad", "cannot be written", "server.checkpoint_dir")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30, total=2**40))
    said(doctor.disk("checkpoints", tmp_path), "warn", "1.0 GiB free", "make room")
    said(doctor.shared_memory(), "ok", "1.0 GiB")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 20, total=64 << 20))
    said(doctor.shared_memory(), "bad", "--shm-size")


def test_little_memory_is_found_also_in_a_container(monkeypatch):
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))
    numbers = {"/sys/fs/cgroup/memory.max": 4 * 2**30, "/sys/fs/cgroup/memory.current": 2**30}
    monkeypatch.setattr(doctor, "_number", numbers.get)
    said(doctor.memory(), "warn", "3.0 GiB free in this container")
    monkeypatch.setattr(doctor, "_number", lambda path: None)
    said(doctor.memory(), "ok", "64.0 GiB free")


def test_a_missing_library_is_found(monkeypatch):
    said(doctor.libraries(), "ok", "libnuma")

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(doctor.ctypes, "CDLL", missing)
    said(doctor.libraries(), "bad", "libnuma.so.1 is missing", "apt-get install libnuma1")
    monkeypatch.setattr(doctor, "_version", lambda name: "2.11.0")
    said(doctor.libraries(), "ok")


@pytest.mark.parametrize("environ, level", [
    ({}, "ok"), ({"HTTP_PROXY": "http://p"}, "warn"),
    ({"http_proxy": "http://p", "no_proxy": "localhost, 127.0.0.1"}, "ok")])
def test_a_proxy_in_the_way_is_found(environ, level):
    said(doctor.proxy(environ), level)


def test_few_open_files_are_found(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 65536))
    said(doctor.open_files(), "warn", "256", "ulimit -n 65536")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    said(doctor.open_files(), "ok", "without limit")


def test_an_old_processor_and_one_core_are_found(monkeypatch):
    monkeypatch.setattr(doctor, "_lines", lambda path: ["flags : fpu sse2"])
    said(doctor.processor(), "bad", "AVX2")
    monkeypatch.setattr(doctor, "_lines", lambda path: ["flags : avx2 avx512f"])
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0})
    said(doctor.processor(), "warn", "one core", "AVX-512")


def test_other_versions_than_the_pinned_ones_are_found(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "2.0+cpu" if name == "torch" else "1.0")
    monkeypatch.setattr(doctor, "_pins", lambda device: {"torch": "2.0+cpu", "ray": "2.56.1"} if device == "cpu" else {})
    (found,) = doctor.packages()
    said(found, "warn", "ray 1.0 instead of 2.56.1", "install_verl.sh")
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    said(next(doctor.packages()), "bad", "verl", "vllm", "install_verl.sh")


def smi(monkeypatch, tmp_path, text):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_gpu_is_found_with_its_driver_and_what_does_not_fit(monkeypatch, tmp_path):
    assert [f.level for f in doctor.gpus()] == ["ok"]
    smi(monkeypatch, tmp_path, "NVIDIA H200, 570.1, 10, 143771")
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0+cpu")
    first, second = doctor.gpus()
    said(first, "ok", "NVIDIA H200, driver 570.1")
    said(second, "warn", "cannot use it", "--device cuda")
    smi(monkeypatch, tmp_path, "NVIDIA H200, 570.1, 90000, 143771")
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0+cu129")
    first, second = doctor.gpus()
    said(first, "warn", "90000 of 143771", "CUDA_VISIBLE_DEVICES")
    # torch is asked itself, and this machine has no GPU.
    said(second, "bad", "does not find a usable GPU", "driver")


def test_the_preset_gives_port_and_folder_and_may_be_wrong_itself(command_for, tmp_path):
    command = command_for()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = json.loads(command("doctor", "--json", "--config", "configs/quick_start/cpu.yaml", "--set",
                                   f"server.port={port}", "--set", f"server.checkpoint_dir={tmp_path}", status=1).stdout)
    by_name = {finding["what"]: finding for finding in found}
    assert by_name["port"]["level"] == "bad" and str(tmp_path) in by_name["checkpoints"]["text"]
    assert by_name["preset"]["level"] == "ok"
    text = command("doctor", "--set", "server.prot=1", status=1).stdout
    assert "server.prot" in text and "keep a server from working" in text


def test_everything_is_looked_at_once():
    names = [finding.what for finding in doctor.examine(Place())]
    assert names == list(dict.fromkeys(names)) and len(names) >= 12


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment with the wheel, built from the source archive, and what it asks for itself; and no engine."""
    folder = tmp_path_factory.mktemp("bare")
    built = folder / "built"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "build", "--out-dir", str(built), str(ROOT)], check=True, capture_output=True,
                   timeout=300)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(python), str(wheel)], check=True, timeout=500)
    return python.parent


def test_without_the_engines_it_says_to_install_them(bare, tmp_path):
    assert not list(bare.parent.glob("lib/*/site-packages/torch")), "the wheel's own dependencies hold an engine"
    done = subprocess.run([bare / "verl-tinker", "doctor"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1 and "not installed: verl, vllm, torch" in done.stdout and "install_verl.sh" in done.stdout
    for command in ("start", "check", "plan"):
        done = subprocess.run([bare / "verl-tinker", command], capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 1 and "install_verl.sh" in done.stderr and "Traceback" not in done.stderr


def test_without_the_engines_it_talks_to_a_server(bare, server, raw):
    environ = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-test"}
    done = subprocess.run([bare / "verl-tinker", "status"], capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0 and raw.model in done.stdout, done.stderr
