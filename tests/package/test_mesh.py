"""The grid of ranks: sizes that fit, who is where, and that each axis's group has the right ranks."""

import os
import subprocess
import sys
import textwrap

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import ignite_ddl as ddl
from ignite_ddl.mesh import AXES, Mesh, check_mesh

TIMEOUT = 60
axis = st.integers(1, 5)


def mesh_of(pp=1, dp=1, tp=1, rank=0):
    return Mesh({"pp": pp, "dp": dp, "tp": tp}, rank, None, dict.fromkeys(AXES))


def run(func, nproc, *args, **axes):
    return ddl.Parallel("gloo", nproc, timeout=TIMEOUT, **axes).run(func, *args)


# --------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("world", "given", "expected"),
    [
        (1, {}, {"pp": 1, "dp": 1, "tp": 1}),
        (8, {}, {"pp": 1, "dp": 8, "tp": 1}),
        (8, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}),
        (8, {"dp": 2, "pp": -1, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}),
        (6, {"dp": 1, "tp": -1}, {"pp": 1, "dp": 1, "tp": 6}),
        (12, {"dp": 2, "pp": 3, "tp": 2}, {"pp": 3, "dp": 2, "tp": 2}),
    ],
)
def test_sizes_that_fit(world, given, expected):
    assert check_mesh(world, **given) == expected


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
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_argument_and_the_value(world, given, message):
    with pytest.raises(ValueError, match=message):
        check_mesh(world, **given)


@given(dp=axis, pp=axis, tp=axis)
def test_a_free_axis_takes_what_the_others_leave(dp, pp, tp):
    sizes, world = {"pp": pp, "dp": dp, "tp": tp}, dp * pp * tp
    assert check_mesh(world, **sizes) == sizes
    for free in sizes:
        assert check_mesh(world, **(sizes | {free: -1})) == sizes


def test_parallel_refuses_before_anything_starts():
    with pytest.raises(ValueError, match="the number of ranks, 4, but given dp=3"):
        ddl.Parallel("gloo", 4, dp=3)
    with pytest.raises(ValueError, match="the number of ranks, 1, but given dp=1, pp=1, tp=2"):
        ddl.Parallel(dp=1, tp=2)


# ----------------------------------------------------------------------------------------------- who is where


@given(dp=axis, pp=axis, tp=axis, data=st.data())
def test_rank_at_and_coordinates_are_inverse(dp, pp, tp, data):
    mesh = mesh_of(pp, dp, tp)
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    at = mesh.coordinates(rank)
    assert mesh.rank_at(**at) == rank
    assert all(0 <= at[axis] < mesh.sizes[axis] for axis in AXES)
    here = mesh_of(pp, dp, tp, rank)
    assert (here.pp_rank, here.dp_rank, here.tp_rank) == (at["pp"], at["dp"], at["tp"])


@given(dp=axis, pp=axis, tp=axis)
def test_every_rank_has_a_place_and_tp_peers_are_neighbours(dp, pp, tp):
    mesh = mesh_of(pp, dp, tp)
    in_order = [mesh.rank_at(p, d, t) for p in range(pp) for d in range(dp) for t in range(tp)]
    assert in_order == list(range(dp * pp * tp))  # tp changes fastest, then dp, then pp


def test_a_mesh_prints_who_is_where():
    mesh = mesh_of(pp=2, dp=2, tp=2, rank=5)
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


def sums(local_rank):
    """The sum of rank numbers over each axis's group, and over torch's mesh of that axis."""
    mesh, result = ddl.get_mesh(), {}
    for name in AXES:
        group, total = getattr(mesh, f"{name}_group"), torch.tensor(float(mesh.rank))
        dist.all_reduce(total, group=group)
        result[name] = int(total), dist.get_world_size(group), mesh.device_mesh.get_local_rank(name)
    return result, (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank), mesh.device_mesh.mesh.tolist()


def test_groups_reduce_over_their_axis():
    results = run(sums, 8, dp=2, pp=2, tp=2)
    for rank, (result, place, layout) in enumerate(results):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        assert place == (pp, dp, tp)
        assert layout == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert result == {
            "pp": (dp * 2 + tp + 4 + dp * 2 + tp, 2, pp),
            "dp": (pp * 4 + tp + pp * 4 + 2 + tp, 2, dp),
            "tp": (pp * 4 + dp * 2 + pp * 4 + dp * 2 + 1, 2, tp),
        }


def plain_job(local_rank):
    mesh = ddl.get_mesh()
    total = torch.ones(())
    dist.all_reduce(total, group=mesh.dp_group)
    return dict(mesh.sizes), mesh.dp_rank, int(total), ddl.get_mesh() is mesh


def test_a_plain_job_is_data_parallel():
    for rank, result in enumerate(run(plain_job, 2)):
        assert result == ({"pp": 1, "dp": 2, "tp": 1}, rank, 2, True)


def made_by_hand(local_rank):
    before = dict(ddl.get_mesh().sizes)
    made = ddl.initialize_mesh(tp=2)
    with pytest.raises(ValueError, match="the number of ranks, 2"):
        ddl.initialize_mesh(dp=3)
    return before["dp"], dict(made.sizes), ddl.get_mesh() is made


def test_initialize_mesh_replaces_the_mesh_and_a_refused_one_leaves_it():
    assert run(made_by_hand, 2) == [(2, {"pp": 1, "dp": 1, "tp": 2}, True)] * 2


def two_jobs(local_rank, folder):
    """Two jobs one after the other in one process, as in a notebook that joins twice."""
    idist.finalize()
    found = []
    for job in range(2):
        idist.initialize(
            "gloo",
            init_method=f"file://{folder}/{job}",
            rank=local_rank,
            world_size=2,
        )
        mesh = ddl.initialize_mesh(tp=2) if job == 0 else ddl.get_mesh()
        total = torch.ones(())
        dist.all_reduce(total, group=mesh.tp_group)  # a group of the first job would raise in the second
        found.append((mesh.dp_size, mesh.tp_size, int(total)))
        idist.finalize()
    after = ddl.get_mesh()
    return found, after.world_size, after.device_mesh is None


def test_a_second_job_has_a_mesh_of_its_own(tmp_path):
    assert run(two_jobs, 2, str(tmp_path), tp=2) == [([(1, 2, 2), (2, 1, 1)], 1, True)] * 2


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            import torch, torch.distributed as dist
            import ignite_ddl as ddl

            def who(local_rank):
                mesh = ddl.get_mesh()
                total = torch.tensor(float(mesh.rank))
                dist.all_reduce(total, group=mesh.pp_group)
                return mesh.pp_rank, mesh.dp_rank, mesh.tp_rank, int(total)

            with ddl.Parallel("gloo", pp=2, dp=-1) as parallel:
                [result] = parallel.run(who)
            open(f"{tmp_path}/rank" + os.environ["RANK"], "w").write(repr(result))
            assert ddl.get_mesh().world_size == 1
            """
        )
    )
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert found == [(0, 0, 0, 1), (1, 0, 0, 1)]


def test_every_axis_waits_as_long_as_the_world():
    """torch gives a new group its default of 30 minutes; a host that is cut off would then be noticed after those."""

    def limits(local_rank):
        groups = [dist.group.WORLD, *ddl.get_mesh().groups.values()]
        return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}

    assert run(limits, 4, dp=2, tp=2) == [{TIMEOUT + 60}] * 4
