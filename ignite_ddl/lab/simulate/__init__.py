"""What parallel training would do, played out on a virtual clock: the same answer every time, on any machine.

- :func:`run`: ranks are generators that compute, send and receive; a heap of events moves the clock.
- Collectives and training steps, written for it as one would write them for real ranks; ``cost`` has the closed
  forms that they meet.
- :func:`pipeline`: any of torch's schedules, with times of your own; :func:`best_pipelines`; :func:`pipedream`,
  which never drains, and the versions of the weights that it uses.
- :func:`parameter_server`: workers of uneven speed, synchronous or not.

No wall clock, no random numbers but those of a seed. What comes back has ``Timeline``'s records, so that
``draw.timeline`` draws what was simulated as it draws what was measured.
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
from ignite_ddl.lab.simulate.pipelines import (
    PipeDream,
    Pipeline,
    PipelinePlan,
    best_pipelines,
    pipedream,
    pipeline,
)
from ignite_ddl.lab.simulate.server import Gradient, Lognormal, ServerRun, chen_2016, parameter_server
from ignite_ddl.lab.simulate.world import Rank, Simulation, run

__all__ = [
    "Gradient",
    "Lognormal",
    "PipeDream",
    "Pipeline",
    "PipelinePlan",
    "Rank",
    "ServerRun",
    "Simulation",
    "all_reduce_naive",
    "all_reduce_ring",
    "all_reduce_tree",
    "best_pipelines",
    "chen_2016",
    "ddp_step",
    "master_step",
    "parameter_server",
    "parameter_server_step",
    "pipedream",
    "pipeline",
    "ring",
    "run",
]
