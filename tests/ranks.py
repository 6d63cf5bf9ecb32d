"""What the tests of meshes have in common: functions run on ranks, and pipelines that need none."""

import contextlib
import functools
import inspect
import math
import time

import ignite.distributed as idist
import psutil
import pytest
import torch
import torch.nn.functional as F

import ignite_ddl as ddl
from ignite_ddl.mesh import AXES, Mesh
from ignite_ddl.pipeline.cut import cut_into_stages
from ignite_ddl.pipeline.pipeline import Pipeline

TIMEOUT = 120  # seconds: a hang, not a busy machine


def in_float64(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return inner


def parallel(nproc=2, **kwargs):
    given = {"backend": "gloo", "nproc_per_node": nproc, "timeout": TIMEOUT, "threads_per_rank": 1}
    return ddl.Parallel(**(given | kwargs))


def run(func, nproc, *args, **kwargs):
    return parallel(nproc, **kwargs).run(func, *args)


def launch(mesh, function, *args, **kwargs):
    return run(function, math.prod(mesh.values()), *args, **mesh, **kwargs)


def on(function, *args, **axes):
    """Runs on as many ranks as the axes need. What is refused raises here as it does there."""
    try:
        return launch(axes, function, *args)
    except ddl.RankError as error:
        raise (error.exception or error) from None


def refused(function, words, **axes):
    """Whether ranks refuse it, in these words."""
    with pytest.raises(ValueError, match=words):
        on(function, **axes)


def assert_right(function, **axes):
    """Whether losses and weights on ranks are those of one process."""
    right = function(0)
    for losses, weights in on(function, **axes):
        assert losses == pytest.approx(right[0], abs=1e-12)
        assert (weights - right[1]).abs().max() <= 1e-12


def time_to_start(nproc):
    """Seconds in which ranks surely start on this machine, as busy as it is now."""
    run(abs, 1)  # a warm server
    start = time.monotonic()
    run(idist.all_reduce, nproc)
    return round(1 + 5 * (time.monotonic() - start), 1)


def failing(func, *args, nproc=2, within=4.0, **kwargs):
    """The error of a run on ranks that ends with one, not long after they have started."""
    within += time_to_start(nproc)
    start = time.monotonic()
    with pytest.raises(ddl.RankError) as caught:
        run(func, nproc, *args, **kwargs)
    assert time.monotonic() - start < within
    return caught.value


def comes_true(condition, within=10.0):
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pids):
    """True if none of the processes is alive, perhaps after a moment."""
    return comes_true(lambda: not any(map(alive, pids)), within=5)


def on_each_rank(**axes):
    """Makes a test of a function: each rank of a mesh runs it, with its assertions.

    The mesh may be a parameter of the test, ``mesh``, which the function itself does not get.
    """

    def decorate(function):
        def test(**given):
            mesh = axes or given.pop("mesh")
            launch(mesh, functools.partial(function, **given))

        _, *own = inspect.signature(function).parameters.values()
        own += [] if axes else [inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        test.__signature__ = inspect.Signature(own)
        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return decorate


def trainer_of(model, loss_fn=F.mse_loss, lr=0.1, **options):
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=lr))
    return ddl.create_supervised_trainer(model, optimizer, loss_fn, **options)


def mesh_of(pp=1, rank=0, dp=1, tp=1):
    return Mesh({"pp": pp, "dp": dp, "tp": tp}, rank, None, dict.fromkeys(AXES))


def pipeline_of(model, mesh, *args, **kwargs):
    return Pipeline(model, cut_into_stages(model, mesh.pp_size, *args, **kwargs), mesh)


def sizes(pipeline):
    return [len(layers) for layers in pipeline._local_stages.cut.layers]
