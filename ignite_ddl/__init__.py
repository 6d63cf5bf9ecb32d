"""Model parallelism for PyTorch-Ignite, and the tools of the ignite-ddl course."""

from ignite_ddl.launch import Parallel, RankError

__all__ = ["Parallel", "RankError"]
