"""The placement planner: what fits is placed whole and once, what does not is one error that names the key."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tinker.core.placement import PlacementError, Role, fewest_nodes, place

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def actor(nnodes: int, per_node: int, tp: int = 1, **more) -> Role:
    return Role("actor, rollout, ref", 1, nnodes * per_node, per_node, "trainer.n_gpus_per_node", ((tp, TP),), **more)


def teacher(name: str, tp: int, replicas: int = 1, per_node: int = 8, **more) -> Role:
    key = f"distillation.teacher_models.{name}.num_replicas"
    return Role(f"teacher {name}", replicas, tp, per_node, key, ((tp, key),), **more)


def refusal(nodes, roles) -> str:
    with pytest.raises(PlacementError) as caught:
        place(nodes, roles)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_gpu_holds_trainer_sampler_and_reference():
    assert place([1], [actor(1, 1)]).gpus("actor, rollout, ref") == [(0, 0)]


@pytest.mark.parametrize("gpus", [1, 4, 8, 16, 64])
def test_a_pool_takes_the_whole_of_a_cluster(gpus):
    per_node = min(gpus, 8)
    nodes = [per_node] * (gpus // per_node)
    plan = place(nodes, [actor(len(nodes), per_node, tp=min(2, gpus))])
    assert plan.gpus("actor, rollout, ref") == [(n, g) for n in range(len(nodes)) for g in range(per_node)]


def test_the_single_teacher_preset_on_eight_gpus():
    plan = place([8], [actor(1, 4), teacher("large", 4)])
    assert plan.gpus("actor, rollout, ref") == [(0, g) for g in range(4)]
    assert plan.gpus("teacher large") == [(0, g) for g in range(4, 8)]


def test_the_multi_teacher_preset_on_two_nodes():
    plan = place([8, 8], [actor(1, 4), teacher("huge", 8), teacher("large", 4)])
    assert plan.nodes("actor, rollout, ref") == plan.nodes("teacher large") != plan.nodes("teacher huge")
    assert len(plan.gpus("teacher huge")) == 8


def test_sixty_four_gpus_hold_a_separate_sampler_and_teachers():
    roles = [actor(4, 8, tp=4), Role("rollout", 8, 2, 8, "actor_rollout_ref.rollout.nnodes", ((2, TP),)),
             teacher("huge", 8, 1), teacher("small", 1, 8)]
    plan = place([8] * 8, roles)
    assert sum(len(plan.gpus(role.name)) for role in roles) == 64


def test_small_ones_leave_room_for_large_ones_whatever_the_order():
    for roles in itertools.permutations([actor(1, 4), teacher("huge", 8), teacher("a", 2), teacher("b", 2)]):
        assert place([8, 8], roles).nodes("teacher huge") not in ([0, 1],)


def test_a_search_goes_back_where_the_largest_first_would_fail():
    # 5 + 3 + 2 and 4 + 4 + 2; the largest first puts 4 beside 5, which leaves 10 for 4 + 3 + 2 + 2.
    sizes = [5, 4, 4, 3, 2, 2]
    assert place([10, 10], [teacher(str(i), size, per_node=10) for i, size in enumerate(sizes)])


def test_a_replica_that_is_larger_than_a_node_takes_whole_nodes():
    plan = place([8, 8, 4], [teacher("huge", 16), actor(1, 4)])
    assert plan.nodes("teacher huge") == [0, 1] and plan.nodes("actor, rollout, ref") == [2]


def test_replicas_of_a_packed_role_stand_on_one_node():
    loose, packed = teacher("a", 2, 3), teacher("a", 2, 3, strict_pack=True)
    assert place([4, 4], [loose]).nodes("teacher a") == [0, 1]
    assert place([4, 8], [packed]).nodes("teacher a") == [1]
    assert "strict_pack" in refusal([4, 4], [packed])
    assert place([4, 4], [teacher("a", 2, 4, strict_pack=True)]).nodes("teacher a") == [0, 1]


@pytest.mark.parametrize("nodes, roles, text", [
    ([8], [actor(1, 8), teacher("a", 4)], "actor, rollout, ref (8), teacher a (4) are 12 GPUs, and 1 node of 8 have 8; "
     "lower trainer.n_gpus_per_node or distillation.teacher_models.a.num_replicas, or give more nodes"),
    ([4, 4], [actor(1, 8)], "takes 8 GPUs of one node, and the largest node has 4; lower trainer.n_gpus_per_node"),
    ([16], [actor(2, 8)], "do not fit on 1 node of 16"),
    ([8], [actor(1, 6, tp=4)], f"{TP} is 4, which does not divide its 6 GPUs"),
    ([8, 8], [actor(2, 6, tp=4)], f"{TP} is 4, so that a group would lie on parts of two nodes with 6 GPUs each"),
    ([8], [teacher("a", 12)], "takes 12 GPUs for a replica and at most 8 of a node, which does not divide them"),
    ([8], [teacher("a", 1, 0)], "teacher a asks for no GPU"),
    ([5, 5, 5], [teacher("a", 3, 4)], "do not fit on 3 nodes of 5, whose GPUs would be enough"),
    ([], [actor(1, 1)], "the largest node has 0"),
])
def test_what_does_not_fit_is_one_error_that_names_the_key(nodes, roles, text):
    assert text in refusal(nodes, roles)


def test_how_many_nodes_are_needed():
    assert fewest_nodes(8, [actor(1, 4), teacher("huge", 8), teacher("large", 4)]) == 2
    assert fewest_nodes(5, [teacher("a", 3, 4)]) == 4
    assert fewest_nodes(8, [actor(2, 4)]) == 2
    with pytest.raises(PlacementError, match="largest node has 4"):
        fewest_nodes(4, [teacher("a", 8)])


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
NODES = st.lists(st.integers(1, 8), min_size=1, max_size=8)


@st.composite
def requests(draw):
    """Roles with odd and even sizes, some packed, and perhaps a pool over several nodes."""
    roles = []
    if draw(st.booleans()):
        roles.append(actor(draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(SIZES)))
    for i in range(draw(st.integers(0 if roles else 1, 4))):
        roles.append(teacher(str(i), draw(SIZES), draw(st.integers(1, 4)), draw(st.integers(1, 8)),
                             strict_pack=draw(st.booleans())))
    return roles


@settings(max_examples=300, deadline=None)
@given(NODES, requests())
def test_a_plan_gives_each_gpu_once_and_to_each_role_what_it_asked_for(nodes, roles):
    try:
        plan = place(nodes, roles)
    except PlacementError as error:
        assert any(role.key in str(error) or any(key in str(error) for _, key in role.groups) for role in roles)
        return
    given_out = [gpu for role in roles for gpu in plan.gpus(role.name)]
    assert len(given_out) == len(set(given_out)) == sum(role.size for role in roles)
    assert all(0 <= node < len(nodes) and 0 <= gpu < nodes[node] for node, gpu in given_out)
    for role in roles:
        assert [len(replica) for replica in plan.roles[role.name]] == [role.replica_size] * role.replicas
        for replica in plan.roles[role.name]:
            check_replica(role, replica)
        if role.strict_pack and role.size <= max(nodes):
            assert len(plan.nodes(role.name)) == 1


def check_replica(role, replica):
    on_a_node = min(role.per_node, role.replica_size)
    if not role.strict_pack:
        for node in {node for node, _ in replica}:
            assert sum(n == node for n, _ in replica) == on_a_node
    for size, _ in role.groups:
        for first in range(0, len(replica), size):
            if size <= on_a_node:
                assert len({node for node, _ in replica[first:first + size]}) == 1


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_what_could_be_placed_is_placed(nodes, sizes):
    """Against every arrangement there is."""
    roles = [teacher(str(i), size) for i, size in enumerate(sizes)]
    possible = any(
        all(sum(s for s, n in zip(sizes, where) if n == node) <= room for node, room in enumerate(nodes))
        for where in itertools.product(range(len(nodes)), repeat=len(sizes)))
    try:
        place(nodes, roles)
        assert possible
    except PlacementError:
        assert not possible
