"""Every SDK version from 0.19 on sees the same numbers, whatever the flags that switch its paths.

The oldest and the newest version run with the flags as they are; the rest is marked `matrix` (`make test-matrix`).
"""

import pytest
from sdk_environments import VERSIONS

from verl_tinker.api.flags import CLIENT_CONFIG, DYNAMIC_CONFIG

# The paths of clients that the server can switch; each is run as advertised and the other way round.
SWITCHES = (
    "proto_compress_fwdbwd",
    "sample_join_sampling_session",
    "parallel_fwdbwd_chunks",
    "use_pyqwest_transport",
    "proto_write_fwdbwd",
    "fwd_via_fwdbwd",
    "create_model_via_load_weights",
    "sample_use_retrieve_futures",
    "sample_cancel_enabled",
)
ADVERTISED = {**CLIENT_CONFIG, **DYNAMIC_CONFIG}
FLAGS = [{}, *({name: not ADVERTISED[name]} for name in SWITCHES)]

# The fake engine: logprob(target) = weight - 1 - target / 1000; a step adds rate * (sum of weights + last sum).
TRAIN = {
    "forward": [[[-1.01] * 3], 1.515],
    "chunks": [1025, [-1.01], [-1.02, -1.02], 50.36],
    "grad_norm": 50.0,
    "stepped": 0.05,
    "custom": -3.84,
    "custom_grad_norm": 4.0,
    "custom_stepped": 0.096,
}
RESUME = {
    "state": "tinker://RUN/weights/state",
    "went_on": 0.1,
    "loaded": 0.096,
    "loaded_with_optimizer": 0.1,
    "with_optimizer": 0.1,
    "without_optimizer": 0.104,
    "info": ["fake/tied", True, 8],
}
SAMPLE = {
    "sampler": "tinker://RUN/sampler_weights/final",
    "drawn": [[[200] * 3, [-0.4] * 3, "length"]] * 2,
    "named": [200, 200],
    "base": [100, 100],
    "base_model": "fake/tied",
    "clone": [200, 200],
    "prompt": [None, -0.906, -0.907],
    "prompt_of_base": [None, -1.006, -1.007],
    "topk": [None, [[1, -1.0], [2, -2.0]], [[1, -1.0], [2, -2.0]]],
    "many": [[200, 200]],
    "after_giving_up": [200, 200],
}
SHARE = {
    "public": [False, True, False],
    "session": [3, 1, 3],
    "samplers": [["fake/tied", "None"], ["fake/tied", "None"], ["fake/tied", "tinker://RUN/sampler_weights/final"]],
    "in_sessions": 1,
}
# What some versions only offer: the first and the last that do.
OFFERED = {
    "archive": ((0, 19), (0, 35), ["checkpoint_complete", "state.json"]),
    "external": (
        (0, 28),
        (0, 38),
        ["tinker://RUN/external_weights/out", {"extra/note.txt": "beside the weights", "weights.json": "0.116"}],
    ),
    "copy": ((0, 26), (0, 38), [True, 0.096]),
}
SAVED = [["sampler_weights/final", "sampler", False], ["weights/state", "training", True]]
REST = {
    "models": ["fake/tied", "fake/untied"],
    "run": [True, "fake/tied", True, 8, {"made": "here"}],
    "run_by_path": True,
    "in_runs": 1,
    "weights": ["fake/tied", True, 8],
    "of_run": SAVED,
    "of_user": SAVED,
    "after_ttl": [["sampler_weights/final", "sampler", True], ["weights/state", "training", False]],
    "after_delete": [["weights/state", "training", False]],
}


def cases():
    for version in VERSIONS:
        for flags in FLAGS:
            short = version in (VERSIONS[0], VERSIONS[-1]) and not flags
            name = "-".join([version, *(f"{key}={value}" for key, value in flags.items())])
            yield pytest.param(version, flags, id=name, marks=() if short else pytest.mark.matrix)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("version", "flags"), cases())
def test_version(driven, version, flags):
    seen = driven[version, str(flags)].result(1200)
    number = tuple(map(int, version.split(".")))[:2]
    offered = {name: value for name, (first, last, value) in OFFERED.items() if first <= number <= last}
    assert seen == {
        "train": TRAIN, "resume": RESUME, "sample": SAMPLE, "share": {**SHARE, **offered}, "rest": REST
    }
