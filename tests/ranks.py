"""What the tests of meshes have in common: functions run on ranks, and pipelines that need none."""

import math

import ignite_ddl as ddl
from ignite_ddl.mesh import AXES, Mesh
from ignite_ddl.pipeline.cut import cut_into_stages
from ignite_ddl.pipeline.pipeline import Pipeline

TIMEOUT = 120  # seconds: a hang, not a busy machine


def run(func, nproc, *args, **axes):
    return ddl.Parallel("gloo", nproc, timeout=TIMEOUT, **axes).run(func, *args)


def launch(mesh, function, *args):
    return run(function, math.prod(mesh.values()), *args, **mesh)


def mesh_of(pp, rank=0):
    return Mesh({"pp": pp, "dp": 1, "tp": 1}, rank, None, dict.fromkeys(AXES))


def pipeline_of(model, mesh, *args, **kwargs):
    return Pipeline(model, cut_into_stages(model, mesh.pp_size, *args, **kwargs), mesh)


def sizes(pipeline):
    return [len(layers) for layers in pipeline._cut.layers]
