"""Crashes and refusals of the disk: the old or the new is there, never half, and the error names the remedy."""

import errno
import os
import resource
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from verl_tinker.core import disk
from verl_tinker.core.checkpoints import Checkpoint, CheckpointPath, RunRecord
from verl_tinker.core.errors import EngineError, StorageError, UserError
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import ModelSpec

pytestmark = pytest.mark.timeout(60)

SPEC = ModelSpec("some/base", None)
RUN = "0a1b:train:0"
PATH = CheckpointPath(RUN, "weights", "a")


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "root")


def save(store, content, name="a", **more):
    folder = store.scratch()
    (folder / "one").write_text(content)
    (folder / "two").write_text(content)
    path = CheckpointPath(RUN, "weights", name)
    return store.publish(folder, Checkpoint(f"uid-{content}", path, SPEC, time.time(), **more))


def dies_at(step: int, monkeypatch, action) -> bool:
    """Run `action` in a process that is gone at its `step`-th call that changes or syncs the disk; tells if it died."""
    child = os.fork()
    if child == 0:
        calls = iter(range(step))

        def dying(call):
            def counted(*args, **kwargs):
                if next(calls, None) is None:
                    os._exit(9)
                return call(*args, **kwargs)

            return counted

        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, dying(getattr(os, name)))
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_crash_at_any_step_of_a_save_leaves_the_old_or_the_new(store, monkeypatch):
    seen = set()
    for step in range(200):
        save(store, "old")
        died = dies_at(step, monkeypatch, lambda: save(store, "new"))
        again = CheckpointStore(store.root)
        folder = again.folder(PATH)
        found = {(folder / name).read_text() for name in ("one", "two")}
        assert len(found) == 1 and again.get(PATH).uid == f"uid-{found.copy().pop()}"
        assert os.listdir(folder.parent) == ["a"]
        seen |= found
        if not died:
            break
    assert not died and step > 8 and seen == {"old", "new"}


def test_a_crash_at_any_step_of_a_removal_leaves_the_checkpoint_or_nothing(store, monkeypatch):
    left = set()
    for step in range(50):
        save(store, "old")
        died = dies_at(step, monkeypatch, lambda: store.delete(PATH))
        again = CheckpointStore(store.root)
        whole = sorted(p.name for p in again.folder(PATH).rglob("*")) == ["meta.json", "one", "two"]
        assert whole or os.listdir(again.folder(PATH).parent) == []
        left.add(whole)
        if not died:
            break
    assert not died and left == {True, False}


@contextmanager
def largest_file(size: int):
    """No file may become larger, as on a disk that is full at that point; the operating system itself refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LARGE = {"note": "x" * (4 << 20)}


def files(store) -> list[str]:
    return sorted(str(p.relative_to(store.root)) for p in store.root.rglob("*") if p.is_file())


def test_a_write_that_the_disk_refuses_leaves_the_old_and_one_clear_error(store, caplog):
    save(store, "old")
    store.record_run(RunRecord(RUN, SPEC, 1.0, {}))
    before = files(store)
    with largest_file(1 << 20):
        for write in (
            lambda: save(store, "new", user_metadata=LARGE),
            lambda: store.record_run(RunRecord(RUN, SPEC, 2.0, LARGE)),
            lambda: store.record_run(RunRecord("other:train:0", SPEC, 2.0, LARGE)),
        ):
            with pytest.raises(StorageError, match="File too large in server.checkpoint_dir; .*ulimit -f"):
                write()
        assert f"File too large in {store.root}" in caplog.text
    store.close()
    assert files(store) == before and store.get(PATH).uid == "uid-old"
    assert not (store.root / "other_train_0").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        EngineError("the trainer failed in save_weights: SafetensorError: I/O error: No space left on d. (os error 28)"),
        EngineError("the trainer failed in save_weights: OSError: [Errno 28] No space left on device: 'x'"),
    ],
)
def test_a_full_disk_is_told_however_the_word_of_it_comes(tmp_path, error):
    with pytest.raises(StorageError, match="No space left on device in .*; delete checkpoints"):
        with disk.explained(tmp_path, "tinker://a:train:0/weights/x"):
            raise error


def test_an_error_that_is_not_the_disks_passes(tmp_path):
    for error in (EngineError("worker 1 died"), FileNotFoundError(errno.ENOENT, "gone"), UserError("rank")):
        with pytest.raises(type(error)) as passed, disk.explained(tmp_path, "x"):
            raise error
        assert passed.value is error


@pytest.mark.parametrize("kind, copies", [("weights", 3), ("sampler_weights", 1), ("external_weights", 1)])
def test_a_first_save_needs_room_for_its_parameters(store, monkeypatch, kind, copies):
    store.record_run(RunRecord(RUN, SPEC, 1.0, {}, parameter_bytes=1000))
    path, needed = CheckpointPath(RUN, kind, "a"), copies * 1000 + (16 << 20)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: needed)
    store.admit(path, overwrite=False)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: needed - 1)
    with pytest.raises(UserError, match=f"server.checkpoint_dir has {needed - 1} bytes free.*needs {needed}; delete"):
        store.admit(path, overwrite=False)


def test_a_later_save_needs_as_much_as_the_last(store, monkeypatch):
    save(store, "x" * 5000)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 9_999 + (16 << 20))
    with pytest.raises(UserError, match="server.checkpoint_dir"):
        store.admit(CheckpointPath(RUN, "weights", "b"), overwrite=False)
    store.admit(CheckpointPath(RUN, "sampler_weights", "b"), overwrite=False)


def test_a_copy_shares_the_disk_and_needs_its_own_room_where_it_cannot(store, monkeypatch):
    source = save(store, "x" * 5000)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 5_000 + (16 << 20) - 1)
    store.link_files(source, store.scratch())

    def refused(*names):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    scratch = store.scratch()
    with pytest.raises(UserError, match=f"has {4_999 + (16 << 20)} bytes free and a copy of {PATH} needs {5_000 + (16 << 20)};"):
        store.link_files(source, scratch)
    assert list(scratch.iterdir()) == []
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 5_000 + (16 << 20))
    store.link_files(source, scratch)
    assert sorted(p.name for p in scratch.iterdir()) == ["one", "two"]


def test_free_bytes_are_what_the_operating_system_says(tmp_path):
    stat = os.statvfs(tmp_path)
    assert disk.free_bytes(Path(tmp_path)) == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.2)
