"""What many runs and many versions cost: a change of run, a run at rest, parking, versions. A section of the page.

Owns the section. Does not judge. Run it on an otherwise idle machine.

    python bench/runs_and_versions.py
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from workload import RANK, tiny_rows, write_section

from live_engine import Live

from verl_tinker.core.types import AdamParams, Datum, LoraSpec, ModelSpec, SampleRequest, SamplingParams

HEADING = "## What runs and versions cost"
TURNS, RUNS = 10, 8
MB = 1e6


class Bench:
    """The engine of the CPU preset with SmolLM2, and what the process tree of this program holds."""

    def __init__(self, scratch: Path):
        self.scratch = scratch
        self.live = Live(["server.model_path=bundled:smollm2"], scratch / "work").start()
        self.engine, self.folders = self.live.engine, 0

    def folder(self) -> Path:
        self.folders += 1
        folder = self.scratch / f"f{self.folders}"
        folder.mkdir()
        return folder

    def seconds(self, coroutine) -> float:
        begin = time.perf_counter()
        self.live.do(coroutine)
        return time.perf_counter() - begin

    def create(self, name: str, rank: int = RANK) -> ModelSpec:
        spec = ModelSpec(self.live.name, LoraSpec(rank=rank, seed=1) if rank else None)
        self.live.do(self.engine.create_model(name, spec))
        return spec

    def train(self, name: str) -> float:
        return self.seconds(self.engine.forward_backward(name, self.data(), "cross_entropy", {}, True))

    def step(self, name: str) -> None:
        self.train(name)
        self.live.do(self.engine.optim_step(name, AdamParams(learning_rate=1e-4)))

    def data(self) -> list[Datum]:
        return [Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)})
                for row in tiny_rows()]

    def sample(self, version: int, count: int = 1) -> float:
        """Seconds for `count` samples of 16 tokens, at once."""
        request = SampleRequest(np.arange(100, 132, dtype=np.int32), 1, SamplingParams(max_tokens=16, stop=[]))

        async def ask() -> None:
            await asyncio.gather(*(self.engine.sample(self.live.name, version, request) for _ in range(count)))

        return self.seconds(ask())

    def version(self, name: str, number: int) -> float:
        """Seconds to export a run's weights and make them a version, checks included."""
        folder = self.folder()
        return self.seconds(self.engine.export_sampler(name, folder)) + self.seconds(
            self.engine.load_version(number, self.live.name, folder))


def memory() -> float:
    """Bytes that this program and its workers hold together (proportional set size)."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            pass
    return total


def adapters(bench: Bench) -> list[tuple[str, str]]:
    specs = {f"r{n}": bench.create(f"r{n}") for n in range(2)}
    for name in specs:
        bench.step(name)
    same, other = [], []
    for _ in range(TURNS):
        same.append(bench.train("r0"))
        other += [bench.train("r1"), bench.train("r0")]
    before = memory()
    for n in range(2, 2 + RUNS):
        bench.create(f"r{n}")
        bench.step(f"r{n}")
    per_run = (memory() - before) / RUNS
    parked, back = [], []
    for _ in range(3):
        folder = bench.folder()
        parked.append(bench.seconds(bench.engine.park("r0", folder)))
        back.append(bench.seconds(bench.engine.unpark("r0", specs["r0"], folder)))
    size = sum(file.stat().st_size for file in folder.iterdir())
    before = memory()
    made = [bench.version("r0", n) for n in range(1, 7)]
    per_version = (memory() - before) / len(made)
    rows = [
        (f"forward_backward of {tiny_rows().size - len(tiny_rows())} tokens, the same run each time; another run each time",
         f"{median(same) * 1e3:.0f} ms; {median(other) * 1e3:.0f} ms; ratio {median(other) / median(same):.2f}"),
        (f"memory of a run at rest, rank {RANK} on all layers, with optimizer", f"{per_run / MB:.0f} MB"),
        ("parking it; its return", f"{median(parked):.2f} s; {median(back):.2f} s ({size / MB:.0f} MB on disk)"),
        ("a version of it: export, load, checks; memory it takes",
         f"{median(made):.2f} s; {max(per_version, 0) / MB:.0f} MB"),
    ]
    alone, adapter = (median(bench.sample(version, 16) for _ in range(3)) for version in (0, 1))
    rows.append(("16 samples at once from the adapter against the base", f"ratio {adapter / alone:.2f}"))
    for name in [*specs, *(f"r{n}" for n in range(2, 2 + RUNS))]:
        bench.live.do(bench.engine.drop_model(name))
    return rows


def full(bench: Bench) -> list[tuple[str, str]]:
    bench.create("full", rank=0)
    bench.step("full")
    made = bench.version("full", 101)
    bench.sample(101), bench.sample(0)
    warm = [bench.sample(0) for _ in range(3)]
    changes = [bench.sample(version) - median(warm) for version in (101, 0) * 3]
    return [
        ("full fine-tuning, a version: export, load, checks", f"{made:.2f} s"),
        ("full weights: a change from one version to another", f"{median(changes):.2f} s"),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work").mkdir()
        bench = Bench(Path(folder))
        try:
            rows = adapters(bench) + full(bench)
        finally:
            bench.live.close()
    text = "\n".join([
        HEADING, "",
        f"Made by `python bench/runs_and_versions.py` on {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}: the engine of the CPU preset,",
        "without HTTP, SmolLM2-135M in float32. Times are medians, memory is proportional set size of all processes.", "",
        "| what | cost |", "|---|---|", *(f"| {what} | {cost} |" for what, cost in rows), ""])
    print(text)
    write_section(text)


if __name__ == "__main__":
    main()
