"""Run a function on N ranks and get N results back: :class:`Parallel`."""

from ignite_ddl.launch.job import RankError
from ignite_ddl.launch.parallel import Parallel

__all__ = ["Parallel", "RankError"]
