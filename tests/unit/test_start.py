"""What the start command refuses before anything slow begins: one line that names the key."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(120)


def refusal(*overrides: str) -> str:
    command = [sys.executable, "-m", "verl_tinker.start", "--config", "configs/quick_start/cpu.yaml"]
    done = subprocess.run([*command, *(f"--set={o}" for o in overrides)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refusal(f"server.port={port}", f"server.checkpoint_dir={tmp_path}")
    assert f"server.port: cannot listen on 127.0.0.1 port {port}" in message


def test_a_checkpoint_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert "server.checkpoint_dir" in refusal(f"server.checkpoint_dir={tmp_path / 'file'}")
