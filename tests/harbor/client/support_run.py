"""A $TASK folder whose sandboxes are rocklets on this machine and whose server has the tests' engine.

Owns the folder and the programs in it. Everything between them is real: SDKs, rocklets, model service, commands.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml
from harbor_runs import Run
from support_rock import PROGRAMS, free_port

from harbor_env.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
SERVER = """#!/bin/sh
port=$(printf '%s\\n' "$@" | sed -n 's/^server.port=//p')
folder=$(printf '%s\\n' "$@" | sed -n 's/^server.checkpoint_dir=//p')
exec {python} {root}/tests/support/fake_server.py --folder "$folder" --port "$port" --context 4096 --vocab 49152 {more}
"""


class Folder:
    def __init__(self, root: Path, admin_url: str, instruction: str = "solved",
                 *, server_more: str = "", model: str = "fake/tied", **changes):
        self.root, self.service_port = root, free_port()
        task = root / "source"
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
        (task / "tests" / "test.sh").write_text("#!/bin/sh\n")
        (task / "task.toml").write_text("")
        (task / "instruction.md").write_text(f"{root / 'count'} {instruction}\n")
        self.command("prepare-sandbox", "--task-id", "t1", "--task-source", str(task), "--skip-image")
        self.command("configure", "--task-id", "t1", "--model", model, "--renderer", "qwen3_instruct", "--tokenizer",
                     os.environ["HARBOR_TEST_MODEL"], "--rock-base-url", admin_url,
                     "--preset", str(ROOT / "configs/quick_start/cpu.yaml"),
                     "--input-tokens", "2000", "--output-tokens", "8", "--context-tokens", "2048", "--turns", "4",
                     "--agent", "bash-agent")
        programs = root / "programs"
        programs.mkdir()
        stand_in = f"exec {sys.executable} {ROOT}/tests/harbor/stand_in_harbor.py"
        self.program(programs / "harbor", f"#!/bin/sh\n{stand_in} \"$@\"\n")
        self.program(programs / "server", SERVER.format(
            python=os.environ["HARBOR_TEST_SERVER_PYTHON"], root=ROOT, more=server_more))
        self.change("harbor", job={"jobs_dir": str(root / "jobs-inside"), "work_dir": str(root / "work"),
                                   "start_engine": False, "harbor": str(programs / "harbor"),
                                   "timeout_sec": changes.pop("timeout_sec", 200)},
                    model_service={"port": self.service_port, "bind_host": "127.0.0.1", "rock": str(PROGRAMS / "rock"),
                                   "python": sys.executable})
        self.change("runtime", backend={"python": str(programs / "server"), "port": free_port(), "start_seconds": 200})
        for name, sections in changes.items():
            self.change(name, **sections)

    @property
    def server_port(self) -> int:
        return yaml.safe_load((self.root / "config" / "runtime.yaml").read_text())["backend"]["port"]

    def model_log(self) -> str:
        """What passed through the model service of the only episode so far."""
        return "".join(file.read_text() for file in self.root.glob("work/*/model-service/LLMService.log"))

    @staticmethod
    def program(file: Path, text: str) -> None:
        file.write_text(text)
        file.chmod(0o755)

    def change(self, name: str, **sections) -> None:
        file = self.root / "config" / f"{name}.yaml"
        tree = yaml.safe_load(file.read_text())
        for section, values in sections.items():
            tree[section] = {**tree.get(section, {}), **values}
        file.write_text(yaml.safe_dump(tree))

    def command(self, *arguments: str, status: int = 0) -> None:
        os.environ["TASK"] = str(self.root)
        assert main(list(arguments)) == status

    def start(self, *arguments: str) -> subprocess.Popen:
        variables = {**os.environ, "TASK": str(self.root), "PY": sys.executable}
        return subprocess.Popen([ROOT / "harbor_env" / "run.sh", *arguments], env=variables,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/", start_new_session=True)

    def run(self, *arguments: str, timeout: float = 400) -> Run:
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=120)
        return Run(process.returncode, output)


def wait_for(condition, seconds: float = 200) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true in time"
        time.sleep(0.1)
