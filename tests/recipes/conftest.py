"""A real server as a user starts it, and unmodified cookbook recipes against it.

A module of tests may name the model of its server in MODEL, its preset in PRESET, and further settings in SETTINGS; that
server has ended before the next module's starts.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import pytest
from real_server import CPU_PRESET, start_server, stop_server

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client_examples"), str(Path(__file__).parent)]
import run as launcher  # noqa: E402
from recipe import Recipes  # noqa: E402
from reference import Reference  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.recipes)


# Not for the session: its end would fall upon the last test of another folder, and upon that test's time limit.
@pytest.fixture(scope="module")
def recipes(request, tmp_path_factory):
    from verl_tinker.models import resolve_model

    assert launcher.CLIENT_PYTHON.exists(), "the client environment is missing; run client_examples/setup.sh"
    model, folder = getattr(request.module, "MODEL", "bundled:smollm2"), tmp_path_factory.mktemp("recipes")
    aliases = ", ".join(f"{name}: {model}" for name in launcher.NAMES_IN_CODE)
    settings = [f"server.model_path={model}", f"server.model_aliases={{{aliases}}}", *getattr(request.module, "SETTINGS", ())]
    process, url = start_server(folder, *settings, preset=getattr(request.module, "PRESET", CPU_PRESET))
    try:
        weights = resolve_model(model)
        launcher.prepare_folder(folder / "work", weights)
        yield Recipes(url, folder, Reference(weights, folder / "checkpoints"))
    finally:
        code = stop_server(process)
        # The next server needs the memory of the models that this one was compared with; glibc gives it back only when told.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    assert code == 0, (folder / "server.log").read_text()[-3000:]


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
