"""The record of what a rank did: measured by a timeline, or returned by a simulation."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "PASSES", "Record"]


KINDS = (
    "compute",
    "communication",
    "idle",  # waiting for another rank
    "data",
    "handlers",  # what an engine does between its steps
    "forward",  # this and the three below: a pipeline's passes, and user-defined spans
    "backward",  # with respect to the input, or both parts
    "backward_weight",
    "optimizer",
)


PASSES = ("forward", "backward", "backward_weight")


class Record(NamedTuple):
    """What a rank did from ``start`` to ``end``, in seconds.

    Attributes:
        rank: global rank.
        kind: one of ``KINDS``.
        name: such as "step 7", "allreduce", or "2F0" for the forward pass of stage 2, microbatch 0.
        start: seconds of the rank's clock, or since the first record of all ranks (merged, or simulated).
        end: seconds.
        waits_for: for "idle", the rank waited for, if it is a single one; else None.
        stage: for a pipeline's passes, the stage; else None.
        microbatch: for a pipeline's passes, the microbatch; else None.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    waits_for: int | None = None
    stage: int | None = None
    microbatch: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start
