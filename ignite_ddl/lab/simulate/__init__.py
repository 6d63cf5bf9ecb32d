"""A deterministic event simulation of parallel training on a virtual clock.

- :func:`run`: ranks are generators that compute, send and receive.
- Collectives and training steps, written as programs for :func:`run`; ``cost`` has their closed forms.
- :func:`pipeline`: any of torch's schedules, with given times; :func:`best_pipelines`; :func:`pipedream`, without
  flushes, with the versions of the weights that it uses.
- :func:`parameter_server`: workers of different speeds, synchronous or asynchronous.
- :func:`local_rounds`: steps without communication, then an average of the weights; in fragments, and overlapped.
- :func:`failures`: a run whose nodes fail, and which goes on from checkpoints.

Random numbers come from a given seed only. Results hold the same records as ``Timeline``, so ``draw.timeline`` draws
both.
"""

from ignite_ddl.lab.simulate.collectives import (
    all_reduce_naive,
    all_reduce_ring,
    all_reduce_tree,
    ddp_step,
    master_step,
    parameter_server_step,
    ring,
)
from ignite_ddl.lab.simulate.failures import RunWithFailures, failures
from ignite_ddl.lab.simulate.pipelines import PipeDream, Pipeline, PipelinePlan, best_pipelines, pipedream, pipeline
from ignite_ddl.lab.simulate.rounds import local_rounds
from ignite_ddl.lab.simulate.server import Gradient, Lognormal, ServerRun, parameter_server
from ignite_ddl.lab.simulate.world import Rank, Simulation, run

__all__ = [
    "Gradient",
    "Lognormal",
    "PipeDream",
    "Pipeline",
    "PipelinePlan",
    "Rank",
    "RunWithFailures",
    "ServerRun",
    "Simulation",
    "all_reduce_naive",
    "all_reduce_ring",
    "all_reduce_tree",
    "best_pipelines",
    "ddp_step",
    "failures",
    "local_rounds",
    "master_step",
    "parameter_server",
    "parameter_server_step",
    "pipedream",
    "pipeline",
    "ring",
    "run",
]
