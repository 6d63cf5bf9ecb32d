"""The grid of ranks: sizes that fit, who is where, and that each axis's group has the right ranks."""

import itertools

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from ranks import TIMEOUT, mesh_of, on_each_rank, run

import ignite_ddl as ddl
from ignite_ddl.checks.replicas import check_replicas
from ignite_ddl.mesh import AXES, check_mesh, sizes_without_world

axis = st.integers(1, 5)


# --------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("world", "given", "message"),
    [
        (8, {"tp": 0}, "tp should be a positive integer, or -1 for what is left, but given 0"),
        (8, {"pp": -2}, "pp should be a positive integer"),
        (8, {"dp": 2.0}, "dp should be a positive integer, .* but given 2.0"),
        (8, {"dp": True}, "dp should be a positive integer, .* but given True"),
        (8, {"tp": "2"}, "tp should be a positive integer, .* but given '2'"),
        (8, {"tp": -1}, "dp and tp are -1, but only one axis"),
        (8, {"dp": -1, "pp": -1, "tp": -1}, "pp and dp and tp are -1, but only one axis"),
        (8, {"pp": 3}, "dp=-1 should take what is left of 8 ranks, .*pp=3.*: 3 does not divide 8"),
        (8, {"dp": 2, "tp": 2}, "the number of ranks, 8, but given dp=2, pp=1, tp=2: 4"),
        (4, {"dp": 2, "pp": 2, "tp": 2}, "the number of ranks, 4, but given dp=2, pp=2, tp=2: 8"),
        (8, {"dp_shard": 0}, "dp_shard should be a positive integer, or -1 .* but given 0"),
        (8, {"dp_replicate": -1, "dp_shard": -1}, "dp_replicate and dp_shard are -1, but only one axis"),
        (8, {"dp_replicate": 3}, "dp_shard=-1 should take what is left of 8 ranks, .*: 3 does not divide 8"),
        (8, {"dp_replicate": 2, "dp_shard": 3}, "dp_replicate × dp_shard × pp × tp should be the number of ranks, 8,"),
        (8, {"dp": 4, "dp_replicate": 2, "dp_shard": 4, "tp": 2}, "should be dp, 4, but .*dp_shard=4: 8"),
        (8, {"dp": 8, "dp_replicate": 3}, "dp_shard=-1 should take what is left of dp=8, .*: 3 does not divide 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_argument_and_the_value(world, given, message):
    with pytest.raises(ValueError, match=message):
        check_mesh(world, **given)


@given(dp=axis, pp=axis, tp=axis)
def test_a_free_axis_takes_what_the_others_leave(dp, pp, tp):
    sizes, world = {"pp": pp, "dp": dp, "tp": tp}, dp * pp * tp
    assert check_mesh(world, **sizes) == check_mesh(world, pp=pp, tp=tp) == sizes
    assert check_mesh(world) == {"pp": 1, "dp": world, "tp": 1}
    for free in sizes:
        assert check_mesh(world, **(sizes | {free: -1})) == sizes


@given(replicas=axis, shard=axis, pp=axis, tp=axis)
def test_dp_is_what_its_two_axes_make_it(replicas, shard, pp, tp):
    world, both = replicas * shard * pp * tp, {"dp_replicate": replicas, "dp_shard": shard}
    sizes = {"pp": pp, "dp": replicas * shard, "tp": tp}
    for dp in ({}, {"dp": replicas * shard}, {"dp": -1}):
        for given_parts in (both, {"dp_replicate": replicas}, {"dp_shard": shard}):
            assert check_mesh(world, pp=pp, tp=tp, **dp, **given_parts) == sizes | both
    assert check_mesh(world, pp=pp, tp=tp, dp_shard=-1) == sizes | {"dp_replicate": 1, "dp_shard": sizes["dp"]}
    assert sizes_without_world(None, pp, tp, **both) == sizes | both


def test_parallel_refuses_before_anything_starts():
    with pytest.raises(ValueError, match="the number of ranks, 4, but given dp=3"):
        ddl.Parallel("gloo", 4, dp=3)
    with pytest.raises(ValueError, match="dp_replicate × dp_shard should be dp, 4, but given"):
        ddl.Parallel("gloo", 4, dp=4, dp_replicate=2, dp_shard=4)
    with pytest.raises(ValueError, match="dp_replicate × dp_shard should be dp, 2, but given"):
        ddl.check_model(torch.nn.Linear(2, 2), dp=2, dp_replicate=2, dp_shard=2)
    with pytest.raises(ValueError, match="the number of ranks, 1, but given dp=1, pp=1, tp=2"):
        ddl.Parallel(dp=1, tp=2)


# ----------------------------------------------------------------------------------------------- who is where


@given(dp=axis, pp=axis, tp=axis)
def test_tp_changes_fastest_then_dp_then_pp(dp, pp, tp):
    places = itertools.product(range(pp), range(dp), range(tp))
    for rank, at in enumerate(places):
        mesh = mesh_of(pp, rank, dp, tp)
        assert mesh.coordinates(rank) == dict(zip(AXES, at, strict=True))
        assert mesh.rank_at(*at) == rank
        assert (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank) == at


def test_a_mesh_prints_who_is_where():
    mesh = mesh_of(pp=2, rank=5, dp=2, tp=2)
    assert repr(mesh) == "Mesh(dp=2, pp=2, tp=2, rank=5)"
    assert str(mesh).splitlines() == [
        "mesh dp=2 × pp=2 × tp=2, 8 ranks",
        "  pp 0  dp 0  tp 0…1:  0   1 ",
        "  pp 0  dp 1  tp 0…1:  2   3 ",
        "  pp 1  dp 0  tp 0…1:  4  [5]",
        "  pp 1  dp 1  tp 0…1:  6   7 ",
    ]


def test_one_process_is_a_mesh_of_one():
    mesh = ddl.get_mesh()
    assert (mesh.dp_size, mesh.pp_size, mesh.tp_size, mesh.world_size) == (1, 1, 1, 1)
    assert (mesh.dp_rank, mesh.pp_rank, mesh.tp_rank) == (0, 0, 0)
    assert mesh.device_mesh is None
    assert mesh.dp_group is mesh.pp_group is mesh.tp_group is None
    assert ddl.Parallel().run(lambda local_rank: ddl.get_mesh().world_size) == [1]
    with pytest.raises(ValueError, match="the number of ranks, 1"):
        ddl.initialize_mesh(dp=2)


# ------------------------------------------------------------------------------------------------------ on ranks


@on_each_rank(dp=2, pp=2, tp=2)
def test_groups_reduce_over_their_axis(rank):
    """Sums of rank numbers over each axis's group, and torch's mesh of that axis."""
    mesh = ddl.get_mesh()
    pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
    assert (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank) == (pp, dp, tp)
    assert mesh.device_mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    peers = {"pp": 4 + 2 * (dp * 2 + tp), "dp": 2 + 2 * (pp * 4 + tp), "tp": 1 + 2 * (pp * 4 + dp * 2)}
    for name, place in (("pp", pp), ("dp", dp), ("tp", tp)):
        group, total = getattr(mesh, f"{name}_group"), torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        assert (int(total), dist.get_world_size(group)) == (peers[name], 2)
        assert mesh.device_mesh.get_local_rank(name) == place


def plain_job_and_one_by_hand(local_rank):
    plain, total = ddl.get_mesh(), torch.ones(())
    dist.all_reduce(total, group=plain.dp_group)
    assert (plain.sizes, plain.dp_rank, int(total)) == ({"pp": 1, "dp": 2, "tp": 1}, local_rank, 2)
    assert ddl.get_mesh() is plain
    made = ddl.initialize_mesh(tp=2)
    with pytest.raises(ValueError, match="the number of ranks, 2"):
        ddl.initialize_mesh(dp=3)
    assert made.sizes == {"pp": 1, "dp": 1, "tp": 2}
    for other in ({"dp": 2}, {"pp": 2}, {}, {"dp_shard": 2}):  # as in ddl.Parallel(tp=2)
        with pytest.raises(ValueError, match=r"but this job has Mesh\(dp=1, pp=1, tp=2, rank=.*once, in ddl"):
            ddl.initialize_mesh(**other)
    assert ddl.get_mesh() is made is ddl.initialize_mesh(tp=2)


def test_a_plain_job_is_data_parallel_until_a_mesh_replaces_it_and_a_refused_one_leaves_it():
    run(plain_job_and_one_by_hand, 2)


@on_each_rank(tp=2)
def test_a_second_job_has_a_mesh_of_its_own(local_rank, tmp_path):
    """Two jobs one after the other in one process, as in a notebook that joins twice."""
    idist.finalize()
    for job in range(2):
        idist.initialize("gloo", init_method=f"file://{tmp_path}/{job}", rank=local_rank, world_size=2)
        mesh = ddl.initialize_mesh(tp=2) if job == 0 else ddl.get_mesh()
        total = torch.ones(())
        dist.all_reduce(total, group=mesh.tp_group)  # a group of the first job would raise in the second
        assert (mesh.dp_size, mesh.tp_size, int(total)) == ((1, 2, 2) if job == 0 else (2, 1, 1))
        idist.finalize()
    assert ddl.get_mesh().world_size == 1
    assert ddl.get_mesh().device_mesh is None


@on_each_rank(dp=2, tp=2)
def test_every_axis_waits_as_long_as_the_world(local_rank):
    """torch gives a new group its default of 30 minutes; a host that is cut off would then be noticed after those."""
    for group in (dist.group.WORLD, *ddl.get_mesh().groups.values()):
        limit = group._get_backend(torch.device("cpu")).options._timeout
        assert limit.total_seconds() == TIMEOUT + 60


# ------------------------------------------------------------------------------------------------ dp as two axes


@on_each_rank(dp_replicate=2, dp_shard=2)
def test_hsdp_shards_within_a_replica_and_compares_replicas(rank):
    mesh = ddl.get_mesh()
    assert repr(mesh) == f"Mesh(dp=4, dp_shard=2, pp=1, tp=1, rank={rank})"
    assert str(mesh).startswith("mesh dp=4 (dp_replicate=2 × dp_shard=2) × pp=1 × tp=1, 4 ranks")
    ranks = {name: dist.get_process_group_ranks(group) for name, group in mesh.groups.items()}
    assert ranks == {"pp": [rank], "dp": [0, 1, 2, 3], "tp": [rank], "dp_replicate": [rank % 2, rank % 2 + 2],
                     "dp_shard": [rank // 2 * 2, rank // 2 * 2 + 1]}  # fmt: skip
    with pytest.raises(ValueError, match="shard should be left out, or True, where .* dp_shard=2, but given False"):
        ddl.auto_model(torch.nn.Linear(4, 4), shard=False)
    model = ddl.auto_model(torch.nn.Linear(4, 4))
    assert [str(placement) for placement in model.weight.placements] == ["R", "S(0)"]
    assert ddl.full_state_dict(model)["weight"].shape == (4, 4)
    check_replicas(model)
    assert ddl.check_in_sync(model) == []
    if rank == 3:  # the other replica's copy of this half is rank 1's
        with torch.no_grad():
            model.weight.to_local()[0, 0] += 1
    assert str(ddl.check_in_sync(model)[0]) == "weight: ranks 1 | 3 differ by up to 1"
    with pytest.raises(ValueError, match="'weight' should be the same on all dp_replicate ranks"):
        check_replicas(model)


@on_each_rank(dp_replicate=4)
def test_replicas_alone_are_ddp(rank):
    with pytest.raises(ValueError, match="shard should be left out, or False, where .* dp_shard=1, but given True"):
        ddl.auto_model(torch.nn.Linear(4, 4), shard=True)
    with pytest.raises(ValueError, match="offload is for shard=True"):
        ddl.auto_model(torch.nn.Linear(4, 4), offload=True)
    with pytest.raises(ValueError, match="reshard_after_forward is for shard=True"):
        ddl.auto_model(torch.nn.Linear(4, 4), reshard_after_forward=False)
    assert isinstance(ddl.auto_model(torch.nn.Linear(4, 4)), torch.nn.parallel.DistributedDataParallel)
