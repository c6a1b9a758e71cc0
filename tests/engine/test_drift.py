"""Every signature of vLLM and verl that the engine relies on, so that an upgrade names what moved.

The installed vLLM is the one for CPU. Another is pinned for CUDA, whose signatures vllm_cuda.json holds.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
from relied_on import VERL_CALLS, VLLM_ATTRIBUTES, VLLM_CALLS, VLLM_CPU_CALLS, VLLM_FIELDS

pytestmark = pytest.mark.timeout(120)
CALLS = VLLM_CALLS | VLLM_CPU_CALLS | VERL_CALLS
CUDA = json.loads((Path(__file__).parent / "vllm_cuda.json").read_text())
ROOT = Path(__file__).resolve().parents[2]


def resolve(place: str):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("place", CALLS)
def test_a_call_takes_what_is_passed(place):
    parameters = inspect.signature(resolve(place)).parameters
    missing = [name for name in CALLS[place] if name not in parameters]
    assert not missing, f"{place}{inspect.signature(resolve(place))} has no {missing}"


@pytest.mark.parametrize("place", VLLM_FIELDS)
def test_a_class_has_the_fields_that_are_used(place):
    cls = resolve(place)
    if dataclasses.is_dataclass(cls):
        known = {f.name for f in dataclasses.fields(cls)}
    else:
        known = set(cls._fields if issubclass(cls, tuple) else cls.__struct_fields__)
    assert set(VLLM_FIELDS[place]) <= known, sorted(set(VLLM_FIELDS[place]) - known)


@pytest.mark.parametrize("place", VLLM_ATTRIBUTES)
def test_an_object_holds_what_is_read_from_it(place):
    source = "".join(inspect.getsource(cls) for cls in resolve(place).__mro__ if cls.__module__.startswith("vllm"))
    for name in VLLM_ATTRIBUTES[place]:
        assert re.search(rf"\bself\.{name}\b", source), f"{place} has no {name} any more"


@pytest.mark.parametrize("place", VLLM_CALLS)
def test_the_vllm_for_cuda_takes_what_is_passed(place):
    parameters = CUDA["calls"].get(place)
    assert parameters is not None, f"{CUDA['archive']} has no {place}, or vllm_cuda.json is older than the list"
    missing = [name for name in VLLM_CALLS[place] if name not in parameters]
    assert not missing, f"{place}({', '.join(parameters)}) has no {missing}"


@pytest.mark.parametrize("kind, wanted", [("fields", VLLM_FIELDS), ("attributes", VLLM_ATTRIBUTES)])
def test_the_vllm_for_cuda_has_the_names_that_are_used(kind, wanted):
    for place, names in wanted.items():
        known = CUDA[kind].get(place)
        assert known is not None, f"{CUDA['archive']} has no {place}, or vllm_cuda.json is older than the list"
        assert set(names) <= set(known), f"{place} has no {sorted(set(names) - set(known))}"


def test_the_signatures_for_cuda_are_those_of_the_pin():
    pin = re.search(r"^vllm==(\S+)$", (ROOT / "requirements/cuda.txt").read_text(), re.M)[1]
    assert CUDA["archive"].startswith(f"vllm-{pin}"), f"make vllm_cuda.json anew for {pin}: see tools/vllm_signatures.py"


def test_the_worker_methods_that_are_called_by_name_are_there_and_clash_with_none_of_vllms():
    from vllm.v1.worker.cpu_worker import CPUWorker

    from verl_tinker.engine.vllm_worker import TinkerWorkerExtension

    source = (ROOT / "verl_tinker/engine/vllm_server.py").read_text()
    called = {node.args[0].value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Attribute) and node.func.attr == "collective_rpc"}
    assert called
    for name in called:
        assert callable(getattr(TinkerWorkerExtension, name)) and not hasattr(CPUWorker, name)
