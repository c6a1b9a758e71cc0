"""Which waiting requests a sampler may start, and when the base weights change hands."""

from __future__ import annotations

import numpy as np
import pytest

from verl_tinker.core.errors import EngineError, Evicted
from verl_tinker.core.types import SampleRequest, SamplingParams
from verl_tinker.engine.admission import BASE, Admission, Version

REQUEST = SampleRequest(np.arange(3, dtype=np.int32), 1, SamplingParams(max_tokens=1))


@pytest.fixture
def admission() -> Admission:
    """Adapters 1 and 2, full weights 11 and 12."""
    made = Admission("base-folder")
    made.versions |= {v: Version(f"folder-{v}", 8) for v in (1, 2)}
    made.versions |= {v: Version(f"folder-{v}", 0) for v in (11, 12)}
    return made


def ask(admission: Admission, *versions: int) -> None:
    for version in versions:
        admission.enqueue(REQUEST, version, None)


def started(admission: Admission) -> list[int]:
    return [item.version for item in admission.start()]


def finish_all(admission: Admission) -> None:
    for item in list(admission.running):
        admission.finish(item)


def drain(admission: Admission) -> list[list[int]]:
    """The order in which everything that waits is answered; one list for each base that is loaded."""
    order = [started(admission)]
    finish_all(admission)
    while (wanted := admission.base_to_load()) is not None:
        admission.base_is_changing()
        admission.base_loaded(wanted[0])
        order.append(started(admission))
        finish_all(admission)
    assert not admission.waiting
    return order


def test_adapters_and_the_base_answer_side_by_side(admission):
    ask(admission, 1, BASE, 2, 1)
    assert started(admission) == [1, BASE, 2, 1]
    assert admission.base_to_load() is None


def test_full_weights_take_turns_grouped_and_oldest_first(admission):
    ask(admission, 11, 1, 12, 11, BASE, 12)
    assert drain(admission) == [[], [11, 11], [1, BASE], [12, 12]]


def test_the_base_stays_while_anything_runs_on_it(admission):
    ask(admission, BASE)
    assert started(admission) == [BASE]
    ask(admission, 11)
    assert admission.base_to_load() is None
    finish_all(admission)
    assert admission.base_to_load() == (11, "folder-11")


def test_later_requests_queue_behind_one_that_waits_for_other_weights(admission):
    ask(admission, BASE)
    started(admission)
    ask(admission, 11, BASE, 1)
    assert started(admission) == [], "the stream on the present base must not starve version 11"
    finish_all(admission)
    assert drain(admission) == [[], [11], [BASE, 1]]


def test_every_version_is_answered_while_new_requests_for_one_keep_coming(admission):
    ask(admission, 11, 12)
    answered = []
    for _ in range(6):
        ask(admission, 11)
        wanted = admission.base_to_load()
        if wanted is not None:
            admission.base_loaded(wanted[0])
        answered += started(admission)
        finish_all(admission)
    assert 12 in answered[:4], answered


def test_going_back_to_the_base_names_its_folder(admission):
    ask(admission, 11, BASE)
    admission.base_loaded(admission.base_to_load()[0])
    started(admission)
    finish_all(admission)
    assert admission.base_to_load() == (BASE, "base-folder")


def test_a_failed_load_ends_only_those_that_need_it_and_the_next_request_loads_anew(admission):
    ask(admission, 11, BASE, 11)
    admission.base_is_changing()
    assert [item.version for item in admission.base_failed(11)] == [11, 11]
    assert started(admission) == [], "nobody knows what is in the engine"
    assert admission.base_to_load() == (BASE, "base-folder")
    admission.base_loaded(BASE)
    assert started(admission) == [BASE]


def test_an_unloaded_version_is_refused_and_what_was_accepted_still_ends_on_it(admission):
    ask(admission, 1, 11)
    admission.unload(1), admission.unload(11)
    for version in (1, 11):
        with pytest.raises(Evicted, match=str(version)):
            ask(admission, version)
    assert drain(admission) == [[1], [11]]


def test_an_adapter_is_removed_once_and_only_when_nobody_needs_it(admission):
    ask(admission, 1)
    admission.unload(1), admission.unload(2)
    assert admission.removable() == [2]
    started(admission)
    assert admission.removable() == []
    finish_all(admission)
    assert admission.removable() == [1] and admission.removable() == []


def test_an_answer_from_other_weights_is_an_error(admission):
    ask(admission, 1, BASE)
    adapter, base = admission.start()
    admission.check_drawn(adapter, "v1"), admission.check_drawn(base, None)
    for item, name in ((adapter, None), (adapter, "v2"), (base, "v1")):
        with pytest.raises(EngineError, match="asked version"):
            admission.check_drawn(item, name)
    admission.base_loaded(11)
    with pytest.raises(EngineError, match="on 11"):
        admission.check_drawn(base, None)


def test_clear_forgets_what_runs_and_what_waits(admission):
    ask(admission, BASE, 11)
    started(admission)
    assert sorted(item.version for item in admission.clear()) == [BASE, 11]
    assert not admission.running and not admission.waiting
