"""The checks of chapter 25: the first wrong layer in few runs, and a plan in the numbers of other libraries."""

import math

from ignite_ddl.arguments import is_count
from ignite_ddl.course.exercises import Hint, exercise


@exercise
def first_wrong(function):
    """Right for each place, within the runs that bisection needs."""
    for n_layers in (1, 2, 7, 100):
        allowed = math.ceil(math.log2(n_layers + 1))
        for wrong in [*range(min(n_layers, 9)), n_layers - 1, None]:
            case = f"{n_layers} layers, " + ("none wrong" if wrong is None else f"layer {wrong} is the first wrong one")
            asked = []

            def differs(n, wrong=wrong, asked=asked, n_layers=n_layers, case=case):
                if not is_count(n) or n > n_layers:
                    raise Hint(f"{case}: you run {n!r} layers; it should be 1 to {n_layers}")
                asked.append(n)
                return wrong is not None and n > wrong

            found = function(differs, n_layers)
            if found != wrong or isinstance(found, bool):
                near = isinstance(found, int) and wrong is not None and abs(found - wrong) == 1
                why = ": differs(n) runs layers 0 to n - 1" if near else ""
                raise Hint(f"{case}: you return {found!r}{why}")
            if len(asked) > allowed:
                raise Hint(f"{case}: {len(asked)} runs; {allowed} are enough")
    return "no more runs than it takes"


@exercise
def their_numbers(function):
    """The same rows in each step, and ValueError where they do not come out whole."""
    for batch, world_size, pp, tp, microbatches in (
        (32, 8, 2, 2, 16),
        (512, 64, 4, 8, 32),
        (96, 24, 1, 4, 2),
        (60, 6, 3, 1, 5),
    ):
        case = f"batch {batch} on {world_size} ranks, pp {pp}, tp {tp}, {microbatches} microbatches"
        found = function(batch, world_size, pp, tp, microbatches)
        if not isinstance(found, tuple) or len(found) != 3 or not all(type(number) is int for number in found):
            raise Hint(f"{case}: return three whole numbers, not {found!r:.40}")
        dp, rows, follow = found
        if dp != world_size // (pp * tp):
            raise Hint(f"{case}: dp {dp}, but {pp * tp} ranks share one model")
        if dp * rows * follow != batch:
            raise Hint(f"{case}: {dp} · {rows} · {follow} is {dp * rows * follow} rows, not {batch}")
        if follow != microbatches:
            raise Hint(
                f"{case}: {follow} micro-batches follow one another; the pipeline was planned for {microbatches}"
            )
    for numbers in ((30, 8, 2, 2, 16), (32, 8, 3, 1, 4), (8, 8, 2, 2, 16)):
        try:
            found = function(*numbers)
        except ValueError:
            continue
        batch, world_size, pp, tp, microbatches = numbers
        raise Hint(
            f"batch {batch} on {world_size} ranks, pp {pp}, tp {tp}, {microbatches} microbatches does not come out "
            f"whole, but you return {found!r:.40}"
        )
    return "the same step, or none"
