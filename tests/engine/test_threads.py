"""Several clusters, one after the other, in one process: Ray ends it when two tasks get one id."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(200)
# Every thread starts a cluster once, while the others hold their places; then all of them call one actor.
PROGRAM = """
import asyncio, sys, threading
import ray
from pathlib import Path
from verl_tinker.engine.cluster import Cluster
from verl_tinker.engine.threads import _COUNT, Threads

class Echo:
    def say(self, number):
        return number

async def main(scratch):
    threads, places = Threads(), threading.Barrier(_COUNT)
    for turn in range(3):
        cluster = Cluster(None, scratch, logical_cpus=1)
        threads.renew()

        def start(number):
            places.wait()
            if number == turn:
                cluster.start()
            places.wait()

        def call(actor):
            places.wait()
            return [ray.get(actor.say.remote(n), timeout=60) for n in range(20 + 5 * turn)]

        await asyncio.gather(*(threads.run(start, number) for number in range(_COUNT)))
        actor = ray.remote(Echo).remote()
        answers = await asyncio.gather(*(threads.run(call, actor) for _ in range(_COUNT)))
        assert answers == [list(range(20 + 5 * turn))] * _COUNT
        cluster.stop()
        print("turn", turn, flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_threads_that_end_with_their_cluster_give_no_id_twice(tmp_path):
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=150,
                            cwd=Path(__file__).resolve().parents[2])
    assert result.returncode == 0 and result.stdout.split("\n")[-2] == "turn 2", result.stderr[-3000:]
