"""Run a function on N ranks and get N results back: :class:`Parallel`; and what is known when they stand."""

from ignite_ddl.launch.hangs import report_hangs
from ignite_ddl.launch.job import RankError
from ignite_ddl.launch.parallel import Parallel
from ignite_ddl.launch.report import Call, HangReport, UnlikeCalls

__all__ = ["Call", "HangReport", "Parallel", "RankError", "UnlikeCalls", "report_hangs"]
