"""`run`: the run's folder, the client as a process with its output in client.log, and the exit status as a file.

Owns runs/MODE-TIME. Does not play or train: the client does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from harbor_env.backend import check_free, last_line
from harbor_env.client import checked
from harbor_env.files import write_json


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """`arguments` are the command line's, which the client gets as they are."""
    settings, _ = checked(options)
    if not options.base_url:
        place = settings.runtime.backend
        check_free(place.port, "the server", "backend.port in config/runtime.yaml", place.host)
    started = datetime.now(timezone.utc)
    stamp = started.strftime("%Y%m%d-%H%M%S-%f")
    folder = settings.folder.root / "runs" / f"{options.mode}-{stamp}"
    folder.mkdir(parents=True)
    output = folder / "client.log"
    print(f"Run directory: {folder}", flush=True)
    command = [sys.executable, "-m", "harbor_env.client", *arguments, "--results", str(folder / "results" / stamp),
               "--job", f"{options.mode}-{stamp}"]
    with open(output, "w") as file:
        code = _wait(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                                      env={**os.environ, "PYTHONUNBUFFERED": "1", "ROCK_LOGGING_LEVEL": "ERROR",
                                           "ROCK_TIME_ZONE": "Etc/UTC"}))
    skipped = _outcome(folder).get("skipped", [])
    write_json(folder / "exit-status.json", {
        "exit_code": code, "mode": options.mode, "task_id": settings.harbor.task.id, "started_at": started.isoformat(),
        "finished_at": datetime.now(timezone.utc).isoformat(), "client_log": str(output), "skipped_steps": skipped})
    for reason in skipped:
        print(f"skipped: {reason}")
    print(f"Exit code: {code}" + ("" if code == 0 else f" ({last_line(output)})"))
    print(f"Client log: {output}", flush=True)
    return code


def _wait(process: subprocess.Popen) -> int:
    """Signals go on to the client, which then ends in order; a second one does not hurry it."""
    forward = lambda number, _: process.poll() is None and process.send_signal(number)  # noqa: E731
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(folder: Path) -> dict:
    file = folder / "outcome.json"
    return json.loads(file.read_text()) if file.is_file() else {}
