"""Many samples at once beside training: times, heartbeats and memory, written as a section of docs/performance.md.

Owns the section. Does not judge: tests/load does. The engine is the tests' one, so that the server's own cost shows.

    python bench/load.py [--samples 4000] [--processes 8]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from workload import LOAD_HEADING, write_section

from fake_server import FakeServer
from traffic import Load, Report


def measured(samples: int, processes: int) -> list[Report]:
    """Three rounds on one server that keeps 5,000 results: what the third adds to its memory would be added for ever."""
    with tempfile.TemporaryDirectory() as folder:
        server = FakeServer(Path(folder) / "server", "--delay", "0.005", "--kept-results", "5000").start()
        try:
            return [_round(server, Path(folder) / str(n), samples, processes) for n in range(3)]
        finally:
            server.stop()


def _round(server: FakeServer, folder: Path, samples: int, processes: int) -> Report:
    return Load(server, folder, 1200).run(samples, processes)


def section(rounds: list[Report], samples: int, processes: int) -> str:
    last = rounds[-1]
    lost = samples - len(set(last.ids))
    mixed, missed = len(last.wrong), len(last.heartbeats["failed"])
    lines = [
        LOAD_HEADING, "",
        f"Made by `python bench/load.py` on {os.cpu_count()} cores, which clients and server share,",
        f"{time.strftime('%Y-%m-%d')}: {samples} samples of 4 tokens, all at once, from {processes} processes with the",
        "SDK, beside one process that trains and one that beats. The engine is the tests' (5 ms a call), so these are",
        "the costs of SDK, HTTP, queue and futures.", "",
        "| | p50 | p99 |", "|---|---|---|",
        _row("from the call of `sample` to its answer, in the burst", last.seconds),
        _row("heartbeat, beside it", last.heartbeats["seconds"]), "",
        f"Lost {lost}, answered with another prompt's answer {mixed}, heartbeats that failed {missed} of "
        f"{len(last.heartbeats['seconds'])},",
        f"training steps beside it {last.training['steps']}. Resident memory of the server: "
        f"{_mib(rounds[0].before)} MiB at first,",
        f"{_mib(rounds[0].after)} MiB after the first such round, {_mib(rounds[1].after)} MiB after the second, "
        f"{_mib(last.after)} MiB after the third.", ""]
    return "\n".join(lines)


def _row(label: str, seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, [50, 99])
    return f"| {label} | {p50:.2f} s | {p99:.2f} s |"


def _mib(size: int) -> int:
    return size >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    text = section(measured(options.samples, options.processes), options.samples, options.processes)
    write_section(text)
    print(text)


if __name__ == "__main__":
    main()
