"""Weights that leave the server: exports by signed links, archives, encryption, copies, publication."""

import asyncio
import errno
import io
import os
import tarfile
import time
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import httpx
import pyrage
import pytest
import tinker
from fake_engine import BASE
from raw import Raw
from tinker import types

from verl_tinker.core import downloads
from verl_tinker.core.checkpoints import parse_path
from verl_tinker.core.errors import EngineError, StorageError

pytestmark = pytest.mark.timeout(180)

NOTE = b"beside the weights"


@pytest.fixture
def rest(server):
    return tinker.RestClient(base_url=server.url)


@pytest.fixture
def exported(training):
    return training.save_weights_external("out").result(20).path


def altered(url: str, **changes: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query=urlencode({**dict(parse_qsl(parts.query)), **changes})))


def test_an_export_is_listed_and_fetched_file_by_file_without_a_key(rest, training, exported):
    assert exported == f"tinker://{training.model_id}/external_weights/out"
    listed = rest.list_checkpoints(training.model_id).result(20).checkpoints
    assert [(c.checkpoint_type, c.checkpoint_id, c.size_bytes) for c in listed] == [
        ("external", "external_weights/out", 3 + len(NOTE))
    ]
    answer = rest.get_external_weights_urls(exported).result(20)
    assert answer.expires.timestamp() == pytest.approx(time.time() + downloads.LINK_SECONDS, abs=60)
    assert {name: httpx.get(url).content for name, url in answer.urls.items()} == {
        "weights.json": b"0.0",
        "extra/note.txt": NOTE,
    }


def test_a_range_of_a_file(rest, exported):
    url = rest.get_external_weights_urls(exported).result(20).urls["extra/note.txt"]
    part = httpx.get(url, headers={"Range": "bytes=7-9"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"the", f"bytes 7-9/{len(NOTE)}")
    assert httpx.get(url, headers={"Range": "bytes=-7"}).content == b"weights"
    head = httpx.head(url)
    assert (head.headers["content-length"], head.headers["accept-ranges"]) == (str(len(NOTE)), "bytes")


def test_a_bad_range_is_refused_in_words(rest, exported):
    url = rest.get_external_weights_urls(exported).result(20).urls["extra/note.txt"]
    for asked in ("bytes=99-", "lines=1-2", "bytes", "bytes=9-7", "bytes=x-y"):
        answer = httpx.get(url, headers={"Range": asked})
        status, reason = (416, "begins after the end") if asked == "bytes=99-" else (400, "cannot be read")
        assert answer.status_code == status
        assert f"Range: {asked!r} {reason}; ask for bytes=FIRST-LAST within the 18 bytes" in answer.json()["detail"]
        assert answer.headers.get("content-range") == ("bytes */18" if status == 416 else None)


def test_a_link_opens_its_file_until_it_expires_and_nothing_else(rest, exported, monkeypatch):
    urls = rest.get_external_weights_urls(exported).result(20).urls
    url = urls["weights.json"]
    for broken in (
        altered(url, signature="0" * 64),
        altered(url, signature="é"),
        altered(url, expires=str(int(time.time()) + 10**6)),
        url.replace("weights.json", "meta.json"),
        url.replace("weights.json", "extra/note.txt"),
        url.replace("weights.json", "../../../run.json"),
        url.replace("external_weights", "weights"),
    ):
        answer = httpx.get(broken)
        assert answer.status_code == 404 and answer.json()["detail"], broken
    assert httpx.get(url.partition("?")[0]).status_code == 422
    monkeypatch.setattr(downloads, "LINK_SECONDS", -1)
    expired = rest.get_external_weights_urls(exported).result(20).urls["weights.json"]
    assert "has expired" in httpx.get(expired).json()["detail"]
    assert httpx.get(url).status_code == 200


def test_a_link_ends_with_its_checkpoint_and_outlives_the_server(start_server, connect):
    first = start_server()
    client = connect(first)
    training = client.create_lora_training_client(base_model=BASE).result(20)
    path = training.save_weights_external("out").result(20).path
    rest = tinker.RestClient(base_url=first.url)
    url = rest.get_external_weights_urls(path).result(20).urls["weights.json"]
    training.save_weights_external("other").result(20)
    secret = first.service.catalog._checkpoints.root / ".link-secret"
    assert oct(secret.stat().st_mode & 0o777) == "0o600"
    rest.delete_checkpoint_from_tinker_path(path).result(20)
    assert httpx.get(url).status_code == 404
    training.save_weights_external("out").result(20)
    assert "made for weights that are gone" in httpx.get(url).json()["detail"]
    again = rest.get_external_weights_urls(path).result(20).urls["weights.json"]
    client.close("success").result(10)
    first.stop()
    second = start_server()
    assert httpx.get(again.replace(first.url, second.url)).content == b"0.0"


def test_older_clients_are_not_shown_the_type_that_they_cannot_read(server, training, exported):
    training.save_state("a").result(20)

    def listed(route, version):
        with server.http() as http:
            answer = http.get(route, params={"limit": 1}, headers={"X-Stainless-Package-Version": version}).json()
        return [c["checkpoint_type"] for c in answer["checkpoints"]], (answer.get("cursor") or {}).get("total_count")

    of_run = f"/training_runs/{training.model_id}/checkpoints"
    assert listed("/checkpoints", "0.27.1") == (["training"], 1)
    assert listed(of_run, "0.19.0")[0] == ["training"]
    for version in ("0.28.0", "1.0.0", "", "unknown"):
        assert listed("/checkpoints", version)[1] == 2
        assert sorted(listed(of_run, version)[0]) == ["external", "training"]


def test_only_exports_have_links(server, training):
    training.save_state("a").result(20)
    with server.http() as http:
        answer = http.get(f"/training_runs/{training.model_id}/checkpoints/weights/a/external_weights_urls")
    assert answer.status_code == 400 and "save_weights_external" in answer.json()["detail"]


def test_an_encrypted_export_can_be_read_by_its_recipients_only(rest, training):
    mine, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    recipients = [str(mine.to_public())]
    path = training.save_weights_external("secret", age_encryption_recipients=recipients).result(20).path
    urls = rest.get_external_weights_urls(path).result(20).urls
    assert set(urls) == {"weights.json.age", "extra/note.txt.age"}
    content = httpx.get(urls["extra/note.txt.age"]).content
    assert pyrage.decrypt(content, [mine]) == NOTE
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(content, [other])
    with pytest.raises(tinker.RequestFailedError, match=r"age_encryption_recipients\[0\] is not a rec") as failure:
        training.save_weights_external("bad", age_encryption_recipients=["age1nobody"]).result(20)
    assert failure.value.category == "user"


def test_a_failed_export_leaves_nothing(server, rest, training):
    server.engine.fail["export_weights"] = EngineError("worker 0: Errno 28")
    with pytest.raises(tinker.RequestFailedError, match="No space left on device.*delete checkpoints") as failure:
        training.save_weights_external("out").result(20)
    assert failure.value.category == "server"
    assert rest.list_checkpoints(training.model_id).result(20).checkpoints == []
    unfinished = server.service.catalog._checkpoints.root / ".unfinished"
    assert [p for p in unfinished.rglob("*") if p.is_file()] == []


def test_older_clients_fetch_one_archive(server, training):
    state = training.save_state("a").result(20).path
    run, kind, name = state.removeprefix("tinker://").split("/")
    with server.http() as http:
        answer = http.get(f"/training_runs/{run}/checkpoints/{kind}/{name}/archive")
        assert answer.status_code == 302 and answer.headers["expires"].endswith("GMT")
        missing = http.get(f"/training_runs/{run}/checkpoints/{kind}/none/archive")
        assert missing.status_code == 404
    url = answer.headers["location"]
    got = httpx.get(url)
    assert int(got.headers["content-length"]) == len(got.content)
    with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
        assert tar.getnames() == ["state.json", "checkpoint_complete"]
        assert tar.extractfile("state.json").read() == b"[0.0, 0.0]"
    assert httpx.get(altered(url, expires="1")).status_code == 404


def test_publication_can_be_repeated(rest, training):
    path = training.save_state("a").result(20).path
    publish, unpublish = rest.publish_checkpoint_from_tinker_path, rest.unpublish_checkpoint_from_tinker_path
    for change, public in ((publish, True), (unpublish, False)):
        for _ in range(2):
            change(path).result(20)
            assert [c.public for c in rest.list_checkpoints(training.model_id).result(20).checkpoints] == [public]
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        publish(f"{path}x").result(20)


def test_a_copy_lives_on_its_own(server, client, connect, rest, training):
    state = training.save_state("a", user_metadata={"step": "1"}).result(20).path
    copy = rest.copy_weights(state, "project-x", ttl_seconds=3600).result(20)
    assert copy.startswith("tinker://copy-") and copy.endswith(":train:0/weights/a")
    run = rest.get_training_run_by_tinker_path(copy).result(20)
    assert (run.base_model, run.lora_rank) == (BASE, 8)
    assert run.last_checkpoint.user_metadata == {"step": "1"} and run.last_checkpoint.expires_at is not None
    store = server.service.catalog._checkpoints
    one, other = (store.folder(parse_path(path)) / "state.json" for path in (state, copy))
    assert os.path.samefile(one, other)
    rest.delete_checkpoint_from_tinker_path(state).result(20)
    client.close("success").result(20)
    resumed = connect(server).create_training_client_from_state_with_optimizer(copy).result(20)
    assert resumed.get_info().lora_rank == 8
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.copy_weights(state, "project-x").result(20)


def test_a_copy_of_sampler_weights_is_sampled(server, client, rest, training):
    path = rest.copy_weights(training.save_weights_for_sampler("a").result(20).path, "p").result(20)
    sampler = client.create_sampling_client(model_path=path).result(20)
    answer = sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=1)).result(20)
    assert len(answer.sequences) == 1 and list(server.engine.versions) == [0, 1, 2]


def test_a_copy_that_is_asked_for_twice_is_one_copy(server, raw):
    saved = raw.post("save_weights", model_id=raw.model, seq_id=1, path="a")
    path = raw.result(saved["request_id"])["path"]
    body = {"source_path": path, "destination_project_id": "p"}
    first, again, other = (
        raw.http.post("/copy_weights", json=body, headers={"X-Idempotency-Key": key}).json() for key in ("k", "k", "l")
    )
    assert first == again != other
    by_session = [raw.post("copy_weights", source_path=path, session_id=raw.session, model_seq_id=7) for _ in range(2)]
    assert by_session == [{"tinker_path": f"tinker://{raw.session}:train:7/weights/a"}] * 2
    assert raw.http.post("/copy_weights", json={"source_path": path, "session_id": raw.session}).status_code == 422
    projects = [raw.http.get(f"/training_runs?project_id={p}").json()["cursor"]["total_count"] for p in ("p", "q")]
    assert projects == [2, 0]


def test_the_newest_of_each_kind_are_kept(start_server, connect):
    server = start_server(keep_last_checkpoints=2)
    client = connect(server)
    rest = tinker.RestClient(base_url=server.url)
    training = client.create_lora_training_client(base_model=BASE).result(20)
    published = training.save_state("published").result(20).path
    rest.publish_checkpoint_from_tinker_path(published).result(20)
    training.save_state("hour", ttl_seconds=3600).result(20)
    sampled = training.save_weights_for_sampler("sampled").result(20).path
    sampler = client.create_sampling_client(model_path=sampled).result(20)
    for name in ("a", "b", "c"):
        training.save_state(name).result(20)
        training.save_weights_for_sampler(name).result(20)
        training.save_weights_external(name).result(20)
    left = {c.checkpoint_id for c in rest.list_checkpoints(training.model_id).result(20).checkpoints}
    assert left == {
        *(f"weights/{name}" for name in ("published", "hour", "b", "c")),
        *(f"sampler_weights/{name}" for name in ("sampled", "b", "c")),
        *(f"external_weights/{name}" for name in ("b", "c")),
    }
    prompt = types.ModelInput.from_ints([1, 2])
    assert sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(20).sequences[0].tokens == [100]


def test_a_full_disk_refuses_a_save_before_the_engine_works(server, rest, training, monkeypatch):
    from verl_tinker.core import disk

    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    before = server.engine.names()
    for save in (training.save_state, training.save_weights_for_sampler, training.save_weights_external):
        with pytest.raises(tinker.RequestFailedError, match="1000 bytes free.*delete checkpoints") as failure:
            save("a").result(20)
        assert failure.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="1000 bytes free"):
        training.save_weights_and_get_sampling_client().result(20)
    assert server.engine.names() == before


def test_a_full_disk_refuses_a_copy_before_it_begins(server, rest, training, monkeypatch):
    from verl_tinker.core import disk

    path = training.save_state("a").result(20).path
    store = server.service.catalog._checkpoints
    before = sorted(store.root.rglob("*"))
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    with pytest.raises(tinker.BadRequestError, match=f"1000 bytes free and a copy of {path} needs .*delete checkpoints"):
        rest.copy_weights(path, "p").result(20)
    assert sorted(store.root.rglob("*")) == before


def test_a_run_whose_record_the_disk_refuses_is_not_created(server, client, monkeypatch):
    from verl_tinker.core import disk

    def full(target, content):
        target.with_name(".run.json.part").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "write_json", full)
        with pytest.raises(tinker.RequestFailedError, match="No space left on device in .*; delete checkpoints"):
            client.create_lora_training_client(base_model=BASE).result(20)
    assert server.engine.models == {} and server.service.runs.all() == []
    assert [p.name for p in server.service.catalog._checkpoints.root.iterdir() if not p.name.startswith(".")] == []
    client.create_lora_training_client(base_model=BASE).result(20)


def test_a_sampler_of_expired_weights_says_so(server, client, training):
    path = training.save_weights_for_sampler("a", ttl_seconds=1).result(20).path
    sampler = client.create_sampling_client(model_path=path).result(20)
    prompt, one = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
    assert len(sampler.sample(prompt, 1, one).result(20).sequences) == 1
    time.sleep(1.1)
    asyncio.run_coroutine_threadsafe(server.service.catalog.sweep_expired(), server.loop).result(5)
    assert list(server.engine.versions) == [0]
    with pytest.raises(tinker.RequestFailedError, match="has expired or was deleted"):
        sampler.sample(prompt, 1, one).result(20)


def test_what_is_not_offered_is_404_with_a_reason(server):
    with server.http() as http:
        raw = Raw(http)
        for method, path in (
            ("GET", "/audit"),
            ("GET", "/billing/usage/events"),
            ("GET", f"/sessions/{raw.session}/trace_export"),
            ("POST", "/auth/token"),
            ("POST", "/nowhere"),
        ):
            answer = http.request(method, path)
            assert answer.status_code == 404
            assert answer.json()["detail"] == f"{method} /api/v1{path} is not offered by this server"


def test_a_save_stands_when_an_older_one_cannot_be_removed(start_server, connect, monkeypatch, caplog):
    server = start_server(keep_last_checkpoints=1)
    training = connect(server).create_lora_training_client(base_model=BASE).result(20)
    training.save_state("a").result(20)

    def refuse(path):
        raise StorageError(f"the removal of {path} was not written")

    with monkeypatch.context() as patched:
        patched.setattr(server.service.catalog._checkpoints, "delete", refuse)
        training.save_state("b").result(20)
    assert "weights/a was not written" in caplog.text
    training.save_state("c").result(20)
    rest = tinker.RestClient(base_url=server.url)
    left = rest.list_checkpoints(training.model_id).result(20).checkpoints
    assert [c.checkpoint_id for c in left] == ["weights/c"]


def test_a_copy_into_a_run_with_weights_of_its_own_is_refused(start_server):
    server = start_server(max_runs=2)
    raw, other = Raw(server.http()), Raw(server.http())
    raw.create()
    source = raw.result(raw.post("save_weights", model_id=raw.model, seq_id=1, path="a")["request_id"])["path"]
    other.create()
    other.result(other.post("save_weights", model_id=other.model, seq_id=1, path="a")["request_id"])
    body = {"source_path": source, "session_id": other.session, "model_seq_id": 0}
    answer = raw.http.post("/copy_weights", json=body)
    assert answer.status_code == 400 and "is a training run already" in answer.json()["detail"]
    free = {**body, "model_seq_id": 7}
    paths = {raw.post("copy_weights", **free)["tinker_path"] for _ in range(2)}
    assert paths == {f"tinker://{other.session}:train:7/weights/a"}
