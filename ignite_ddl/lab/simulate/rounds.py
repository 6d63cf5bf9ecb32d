"""Simulation of rounds of local steps, whose weights are averaged over a slow link."""

from __future__ import annotations

from collections.abc import Callable, Generator

from ignite_ddl.arguments import AMOUNT, COUNT, FLAG, FUNCTION, check, takes
from ignite_ddl.lab.cost import FITS, Link
from ignite_ddl.lab.simulate.collectives import ring
from ignite_ddl.lab.simulate.world import Rank, Simulation, run

__all__ = ["local_rounds"]


@takes(FITS, seconds=AMOUNT | FUNCTION, n_rounds=COUNT, fragments=COUNT, overlapped=FLAG)
def local_rounds(
    n_ranks: int,
    n_steps: int,
    seconds: float | Callable[[int, int], float],
    weight_bytes: float,
    link: Link,
    n_rounds: int = 1,
    fragments: int = 1,
    overlapped: bool = False,
) -> Simulation:
    """Rounds of local steps, as of ``ddl.LocalSGD``: their weights are averaged by rings, all at the end or in parts.

    With fragments, the weights are cut into equal parts that take turns: one is averaged every n_steps / fragments
    steps. Where that overlaps with the next steps, a rank waits at the next turn, until the part before has arrived.
    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512 (2025), section 2.
    ``cost.local_round`` has the closed form of one round; the numbers of the loss are left out here.

    Args:
        n_ranks: the dp ranks.
        n_steps: optimizer steps per round, H.
        seconds: of a step; or a function of a rank and its step, from 0.
        weight_bytes: of the weights that a rank trains.
        link: the network between neighbours.
        n_rounds: how many rounds. Default: 1.
        fragments: parts of the weights; n_steps is a multiple of them. Default: 1.
        overlapped: whether a rank goes on computing while its weights are averaged. Default: False.

    Returns:
        Simulation: ``in_flight`` holds all messages, ``records`` what each rank did or waited for.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost, simulate

            round = 2, 4, 0.5, 100, cost.Link(latency=0, bandwidth=100)
            assert simulate.local_rounds(*round).seconds == 4 * 0.5 + 1
            assert simulate.local_rounds(*round, fragments=2).seconds == 4 * 0.5 + 1
            assert simulate.local_rounds(*round, fragments=2, overlapped=True).seconds == 4 * 0.5 + 0.5
    """
    if n_steps % fragments:
        raise ValueError(f"fragments should divide n_steps={n_steps}, but given {fragments}")
    each = n_steps // fragments

    def program(rank: Rank) -> Generator:
        sent = None
        for step in range(n_steps * n_rounds):
            took = check("seconds", seconds(rank.number, step), AMOUNT) if callable(seconds) else seconds
            yield rank.compute(took, f"step {step}")
            if (step + 1) % each == 0:
                if sent is not None:
                    yield sent
                sent = rank.background(ring(rank, [1] * n_ranks, weight_bytes / fragments, tag=step))
                if not overlapped:
                    yield sent
        yield sent

    return run(program, n_ranks, link)
