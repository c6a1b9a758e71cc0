"""verl's own profiler on the training requests that a preset numbers."""

from __future__ import annotations

import gzip
import json

import numerics
import pytest

pytestmark = pytest.mark.timeout(200)


def test_the_numbered_training_requests_leave_a_trace_each(engines, tmp_path):
    live = engines.get(
        "global_profiler.tool=torch", "global_profiler.steps=[2, 4]", f"global_profiler.save_path={tmp_path}",
        "actor_rollout_ref.actor.profiler.enable=true", "actor_rollout_ref.actor.profiler.all_ranks=true", rollout=False)
    live.do(live.engine.create_model("p", numerics.spec(live.engine, True, 8)))
    data = numerics.batch(live.settings.models[0].vocab_size, seed=3)
    for backward in (True, True, False, False, True):
        live.do(live.engine.forward_backward("p", data, "cross_entropy", {}, backward))
    (trace,) = tmp_path.glob("*.json.gz")
    assert "step2" in trace.name and "rank0" in trace.name
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= names
