"""Made-up requests after the server's own description: no 5xx, no hang, words with every refusal."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

pytestmark = pytest.mark.timeout(1800)
SECONDS = 20


def check(case, answer):
    assert answer.status_code < 500, answer.text
    # 408 says in the SDK's own form that a result is not there yet; HEAD has no body.
    if answer.status_code >= 400 and answer.status_code != 408 and case.method != "HEAD":
        said = answer.json()
        # OpenAI's routes refuse in OpenAI's shape.
        words = said["error"]["message"] if set(said) == {"error"} else said["detail"]
        assert isinstance(words, str) and words


def few(examples: int) -> settings:
    """The same requests each time; a failure is printed as it is, since shrinking it takes longer than the rest."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, phases=(Phase.generate,),
                    suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("examples", [3, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("names", ["made up", "live"])
def test_any_request(names, mode, examples, live):
    """With ids of a live session, run, sampler and checkpoint, requests lead further in."""
    schema = schemathesis.openapi.from_url(f"{live.server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 40
    sent = 0

    def send(case):
        nonlocal sent
        for part in (case.path_parameters, case.body) if names == "live" else ():
            if isinstance(part, dict):
                part |= {name: value for name, value in live.names.items() if name in part}
        check(case, case.call(timeout=SECONDS, headers={"X-API-Key": "tml-test"}))
        sent += 1

    for operation in operations:
        if names == "live" and operation.path.endswith("finish"):
            continue
        # Nothing about a call whose only parameters are parts of its path can be wrong, and it takes long to find that out.
        if mode is GenerationMode.NEGATIVE and not operation.body.items and not operation.query.items:
            continue
        few(examples)(given(case=operation.as_strategy(generation_mode=mode))(send))()
    assert sent > examples * len(operations) / 3


def test_every_post_of_a_client_has_its_body_described(live):
    described = live.http.get("../../openapi.json").json()
    posts = {path: op["post"] for path, op in described["paths"].items() if "post" in op}
    bodiless = {path.removeprefix("/api/v1/") for path, op in posts.items() if "requestBody" not in op}
    assert bodiless == {"shutdown", "client/config", "client/dynamic_config", "telemetry", "sessions",
                        "training_runs/{run_id}/checkpoints/{kind}/{name}/publish"}
    content = posts["/api/v1/forward_backward"]["requestBody"]["content"]
    assert set(content) == {"application/json", "application/x-protobuf"}


def test_the_server_still_works(live):
    """Runs last: what all those requests left behind does not stand in the way of a client."""
    from raw import Raw

    fresh = Raw(live.http)
    assert fresh.create(90)["model_id"] == f"{fresh.session}:train:90"
    assert fresh.binary(fresh.sample(fresh.base_sampler())).sequences[0].tokens == [100]
    assert live.server.service.health.status == "ok"
