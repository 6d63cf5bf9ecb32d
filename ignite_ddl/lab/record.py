"""The record of one thing that a rank did: what a timeline measures and a simulation returns."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "PASSES", "Record"]


KINDS = (
    "compute",
    "communication",
    "idle",  # waiting for another rank
    "data",
    "handlers",  # what an engine does between its steps
    "forward",  # this and the three below: a pipeline's passes, and spans of your own
    "backward",  # with respect to the input, or whole
    "backward_weight",
    "optimizer",
)


PASSES = ("forward", "backward", "backward_weight")


class Record(NamedTuple):
    """A rank did one thing from ``start`` to ``end``, in seconds.

    Attributes:
        rank: global rank.
        kind: one of ``KINDS``.
        name: what it was, such as "step 7", "allreduce", or "2F0" for the forward pass of stage 2, microbatch 0.
        start: seconds: of a clock, or since the first record of all ranks (merged, or simulated).
        end: seconds.
        waits_for: of "idle": the rank that it waits for, where that is one rank. None otherwise.
        stage: of a pipeline's passes: the stage. None otherwise.
        microbatch: of a pipeline's passes: the microbatch. None otherwise.
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
