"""Sessions as clients describe, list, search and move them; what they say outlives the server."""

import pytest
import tinker
from fake_engine import BASE
from tinker.types import (
    AccessibleSearchOwner,
    ActiveSessionStatusQuery,
    ClientFinishedSessionStatusQuery,
    SessionSearchRequest,
    UserSearchOwner,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def rest(server):
    return tinker.RestClient(base_url=server.url)


@pytest.fixture
def sessions(server):
    """Three sessions, the oldest first."""
    facts = [
        {"display_name": "Nightly SFT of Llama", "user_metadata": {"team": "a", "n": 1}, "project_id": "p"},
        {"display_name": "nightly rl", "user_metadata": {"team": "b"}, "tags": ["x", "y"]},
        {"user_metadata": {"team": "a"}, "project_id": "p"},
    ]
    with server.http() as http:
        return [http.post("/create_session", json={"tags": [], **f}).json()["session_id"] for f in facts]


def found(rest, **query) -> list[str]:
    return [s.session_id for s in rest.search_sessions(SessionSearchRequest(**query)).result(20).sessions]


def test_a_session_shows_what_its_client_said_and_made(server, connect, rest, monkeypatch):
    monkeypatch.setenv("TINKER_TAGS", "nightly,sft")
    client = tinker.ServiceClient(base_url=server.url, user_metadata={"team": "a"}, project_id="p", display_name="mine")
    training = client.create_lora_training_client(base_model=BASE).result(20)
    training.save_state("a").result(20)
    sampler = training.save_weights_and_get_sampling_client().result(20)
    (session_id,) = rest.list_sessions().result(20).sessions
    session = rest.get_session(session_id).result(20)
    assert session.training_run_ids == [training.model_id] and session.sampler_ids == [f"{session_id}:sample:0"]
    assert (session.user_metadata, session.display_name) == ({"team": "a"}, "mine")
    with server.http() as http:
        raw = http.get(f"/sessions/{session_id}").json()
    assert (sorted(raw["tags"]), raw["project_id"], raw["status"]) == (["nightly", "sft"], "p", {"type": "active"})
    client.close("errored", detail="out of data").result(20)
    with server.http() as http:
        http.post(f"/sessions/{session_id}/finish", json={"reason": {"type": "success"}, "detail": "too late"})
    (summary,) = rest.search_sessions(SessionSearchRequest()).result(20).sessions
    assert (summary.status.type, summary.status.reason.type) == ("client_finished", "errored")
    assert summary.status.detail == "out of data"
    with server.http() as http:
        assert http.get(f"/sessions/{session_id}").json()["status"]["detail"] == "out of data"
    assert (summary.checkpoints_count, summary.project_id, summary.owner) == (1, "p", "local")
    assert summary.checkpoint_storage_bytes == len("[0.0, 0.0]")
    del sampler


def test_sessions_are_listed_newest_first_under_both_methods(server, rest, sessions):
    assert rest.list_sessions().result(20).sessions == sessions[::-1]
    assert rest.list_sessions(limit=1, offset=1).result(20).sessions == [sessions[1]]
    with server.http() as http:
        assert http.post("/sessions").json() == {"sessions": sessions[::-1]}
        assert http.get("/sessions?limit=0").status_code == 422
    with pytest.raises(tinker.NotFoundError):
        rest.get_session("nobody").result(20)


def test_a_search_by_each_condition(server, rest, sessions):
    first, second, third = sessions
    with server.http() as http:
        http.post(f"/sessions/{second}/finish", json={"reason": {"type": "success"}})
    active, done = ActiveSessionStatusQuery(), ClientFinishedSessionStatusQuery()
    errored = ClientFinishedSessionStatusQuery(reasons=["errored"])
    for query, expected in (
        ({}, [third, second, first]),
        ({"display_name": "llama NIGHT"}, [first]),
        ({"display_name": "night"}, [second, first]),
        ({"session_id": third}, [third]),
        ({"session_id": third, "display_name": "rl"}, [third, second]),
        ({"user_metadata": {"team": "a"}}, [third, first]),
        ({"user_metadata": {"team": "a", "n": "1"}}, [first]),
        ({"project_ids": ["p"]}, [third, first]),
        ({"statuses": [active]}, [third, first]),
        ({"statuses": [done]}, [second]),
        ({"statuses": [errored]}, []),
        ({"statuses": [active, done]}, [third, second, first]),
        ({"owner": AccessibleSearchOwner(), "limit": 2}, [third, second]),
        ({"owner": UserSearchOwner(owner_urns=["local"])}, [third, second, first]),
        ({"owner": UserSearchOwner(owner_urns=["somebody"])}, []),
    ):
        assert found(rest, **query) == expected, query


def test_a_search_page_by_page(rest, sessions):
    request, seen = SessionSearchRequest(limit=1), []
    for _ in sessions:
        page = rest.search_sessions(request).result(20)
        seen += [session.session_id for session in page.sessions]
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert seen == sessions[::-1] and page.next_cursor is None


def test_a_session_and_its_runs_move_to_another_project(start_server):
    server = start_server()
    rest = tinker.RestClient(base_url=server.url)
    client = tinker.ServiceClient(base_url=server.url, project_id="old")
    training = client.create_lora_training_client(base_model=BASE).result(20)
    session_id = training.model_id.partition(":")[0]
    rest.assign_session_project(session_id, "new").result(20)
    client.close("success", detail="as planned").result(20)
    server.stop()
    again = start_server()
    rest = tinker.RestClient(base_url=again.url)
    assert rest.search_sessions(SessionSearchRequest()).result(20).sessions[0].status.detail == "as planned"
    assert found(rest, project_ids=["new"]) == [session_id] and found(rest, project_ids=["old"]) == []
    with again.http() as http:
        runs = [http.get(f"/training_runs?project_id={p}").json()["training_runs"] for p in ("new", "old")]
    assert [run["training_run_id"] for run in runs[0]] == [training.model_id] and runs[1] == []
