"""Unnamed snapshots: in memory up to the budget, on disk after it, and nothing left of either."""

import shutil

import pytest

from verl_tinker.core.checkpoints import RunRecord
from verl_tinker.core.snapshots import Snapshots
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import ModelSpec

RUN, SIZE = "0123456789abcdef:train:0", 1000


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.record_run(RunRecord(RUN, ModelSpec("base", None), 0.0, {}, "", None, SIZE))
    return store


def filled(snapshots: Snapshots):
    folder = snapshots.folder(RUN)
    (folder / "model.safetensors").write_bytes(bytes(SIZE))
    return folder


def test_memory_first_then_the_disk_then_memory_that_was_freed(store, tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    snapshots = Snapshots(store, 2 * SIZE + 10, memory)
    first, second, third = (filled(snapshots) for _ in range(3))
    assert memory in first.parents and memory in second.parents and store.root in third.parents
    shutil.rmtree(first)
    assert memory in filled(snapshots).parents
    snapshots.close()
    assert not list(memory.iterdir()) and third.exists()


def test_without_a_budget_or_such_memory_all_lie_on_disk(store, tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    assert store.root in filled(Snapshots(store, 0, memory)).parents
    assert store.root in filled(Snapshots(store, 10**9, tmp_path / "none")).parents


def test_the_next_server_of_a_folder_removes_what_a_killed_one_left_and_nothing_else(store, tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    left = filled(Snapshots(store, 10**9, memory))
    others = filled(Snapshots(CheckpointStore(tmp_path / "other"), 10**9, memory))
    Snapshots(store, 10**9, memory)
    assert not left.exists() and others.exists()
