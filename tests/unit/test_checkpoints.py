import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from verl_tinker.core.checkpoints import Checkpoint, CheckpointPath, RunRecord, check_ttl, parse_path
from verl_tinker.core.errors import NotFound, UserError
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import LoraSpec, ModelSpec

pytestmark = pytest.mark.timeout(120)

SPEC = ModelSpec("some/base", LoraSpec(rank=4, seed=3, train_mlp=False))
RUN = "0a1b:train:0"


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "root")


def save(store, name="a", content="x", kind="weights", **more):
    folder = store.scratch()
    (folder / "w").write_text(content)
    path = CheckpointPath(RUN, kind, name)
    return store.publish(folder, Checkpoint(f"uid-{name}", path, SPEC, time.time(), **more))


def test_what_is_saved_is_read_back(store):
    saved = save(store, user_metadata={"k": "v"}, seq=7)
    assert store.get(saved.path) == saved
    assert saved.size_bytes == 1 and saved.spec == SPEC
    meta = json.loads((store.folder(saved.path) / "meta.json").read_text())
    assert meta["tinker_path"] == f"tinker://{RUN}/weights/a" and meta["type"] == "training"
    assert ":" not in str(store.folder(saved.path).relative_to(store.root))


def test_full_fine_tuning_has_no_adapter(store):
    folder = store.scratch()
    path = CheckpointPath(RUN, "weights", "full")
    store.publish(folder, Checkpoint("u", path, ModelSpec("b", None), 1.0))
    assert store.get(path).spec.lora is None


def test_existing_names(store):
    path = save(store).path
    with pytest.raises(UserError, match="exists already"):
        store.admit(path, overwrite=False)
    store.admit(path, overwrite=True)
    save(store, content="new")
    assert (store.folder(path) / "w").read_text() == "new"
    assert [p.name for p in store.folder(path).parent.iterdir()] == ["a"]


def test_a_new_store_lists_what_the_old_one_saved(store):
    store.record_run(RunRecord(RUN, SPEC, 5.0, {"renderer": "x"}))
    save(store, "a"), save(store, "b", kind="sampler_weights")
    again = CheckpointStore(store.root)
    assert [c.path.name for c in again.list()] == ["b", "a"] == [c.path.name for c in again.list(RUN)]
    assert again.run(RUN) == RunRecord(RUN, SPEC, 5.0, {"renderer": "x"}) == again.runs()[0]
    assert again.run("other:train:0") is None and again.run("../x") is None


def test_expired_ones_are_not_found_and_the_sweep_frees_their_disk(store):
    path = save(store, ttl_seconds=1, expires_at=time.time() - 1).path
    kept = save(store, "kept", ttl_seconds=100, expires_at=time.time() + 100).path
    with pytest.raises(NotFound, match="expired"):
        store.get(path)
    assert [c.path for c in store.list()] == [kept] and store.folder(path).exists()
    assert [c.path for c in store.sweep_expired()] == [path]
    assert os.listdir(store.folder(path).parent) == ["kept"]
    store.admit(path, overwrite=False)


def test_ttl_can_be_set_and_lifted(store):
    path = save(store).path
    store.set_ttl(path, 100)
    assert store.get(path).expires_at == pytest.approx(time.time() + 100, abs=5)
    store.set_ttl(path, None)
    assert store.get(path).expires_at is None
    with pytest.raises(UserError, match="give 1 to"):
        check_ttl(0)


def test_delete(store):
    path = save(store).path
    store.delete(path)
    assert not store.folder(path).exists()
    with pytest.raises(NotFound):
        store.delete(path)


def test_a_damaged_checkpoint_is_not_listed_and_harms_no_other(store):
    save(store, "good")
    for name, text in (("empty", ""), ("wrong", "{}"), ("list", "[]")):
        save(store, name)
        (store.folder(CheckpointPath(RUN, "weights", name)) / "meta.json").write_text(text)
    assert [c.path.name for c in store.list()] == ["good"]


def test_a_folder_copied_under_another_name_is_not_that_checkpoint(store):
    path = save(store).path
    copy = replace(path, name="copy")
    shutil.copytree(store.folder(path), store.folder(copy))
    with pytest.raises(NotFound):
        store.get(copy)


def test_a_new_store_undoes_what_a_killed_server_left(store):
    path = save(store).path
    final = store.folder(path)
    final.rename(final.with_name(f".{final.name}.replaced"))
    dead = store.root / ".unfinished" / f"{os.uname().nodename}-999999999-abcd"
    dead.mkdir(parents=True)
    mine = store.scratch()
    again = CheckpointStore(store.root)
    assert again.get(path).path == path
    assert mine.exists() and not dead.exists()
    store.close()
    assert not mine.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "tinker://",
        "tinker://a:train:0/weights",
        "tinker://a:train:0/weights/x/y",
        "tinker://a:train:0/weights/..",
        "tinker://../weights/x",
        "tinker://a:train:x/weights/x",
        "tinker://a:train:0/other/x",
        "/etc/passwd",
    ],
)
def test_bad_paths(text):
    with pytest.raises(UserError):
        parse_path(text)


def test_good_path():
    assert parse_path("tinker://a-1:train:12/sampler_weights/000_x.y-z") == CheckpointPath(
        "a-1:train:12", "sampler_weights", "000_x.y-z"
    )


def test_changes_at_once_leave_one_of_them_and_a_readable_file(store):
    path = save(store).path

    def change(n):
        (store.set_public if n % 2 else store.set_ttl)(path, (bool(n % 3) if n % 2 else 3600 + n))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(200)))
    assert store.get(path).uid == "uid-a" and store.list(RUN) == [store.get(path)]
    assert sorted(p.name for p in store.folder(path).iterdir()) == ["meta.json", "w"]


def test_runs_are_recorded_at_once(store):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.record_run(RunRecord(RUN, SPEC, 5.0, {"n": str(n)})), range(100)))
    assert store.run(RUN).run_id == RUN and [p.name for p in store.root.glob("*/*")] == ["run.json"]


def test_a_copy_by_hand_is_no_checkpoint_and_never_harms_the_original(store):
    path = save(store, ttl_seconds=1, expires_at=time.time() - 5).path
    run = store.folder(path).parents[1]
    shutil.copytree(run, run.with_name("backup-of-my-run"))
    shutil.copytree(store.folder(path), store.folder(path).with_name("b"))
    text = (store.folder(path) / "meta.json").read_text()
    (store.folder(path) / "meta.json").write_text(json.dumps({**json.loads(text), "ttl_seconds": None, "expires_at": None}))
    assert store.sweep_expired() == []
    assert [c.path for c in store.list(RUN)] == [path] and store.get(path).uid == "uid-a"


@pytest.mark.parametrize("field, value", [
    ("created", "yesterday"), ("expires_at", "soon"), ("tinker_path", 5), ("size_bytes", "big"), ("user_metadata", [1]),
    ("uid", None), ("lora", {"rank": 4, "colour": "red"}), ("lora", 3)])
def test_what_a_hand_has_spoilt_is_left_out_and_keeps_its_name(store, field, value):
    good, bad = save(store, "good"), save(store, "bad")
    file = store.folder(bad.path) / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    assert store.list(RUN) == [good] and store.sweep_expired() == []
    with pytest.raises(UserError, match="meta.json cannot be read; mend it, choose another name"):
        store.admit(bad.path, overwrite=False)
    store.admit(bad.path, overwrite=True)
