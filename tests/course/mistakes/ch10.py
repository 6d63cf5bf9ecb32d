"""Natural mistakes in chapter 10's exercises."""

from ignite_ddl.course.checks.ch10 import _buckets, _never_above

WEIGHT = ', reduction="sum").div(n_rows)'
MISTAKES = {
    "buckets": {
        "return a list of lists": lambda sizes, cap, first_cap: [0],
        "is empty": lambda *args: [*_buckets(*args), []],
        "is in no bucket": lambda *args: _buckets(*args)[:-1],
        "your buckets hold": lambda *args: 2 * _buckets(*args),
        "backward goes from the last": lambda sizes, cap, first_cap: [list(range(len(sizes)))],
        "bucket by bucket": lambda *args: [bucket[::-1] for bucket in _buckets(*args)],
        "a cap of its own": {"cap if closed else first_cap": "cap"},
        "its cap or more; yours never hold more, and make": _never_above,
        "bucket 0 should hold": lambda sizes, cap, first_cap: [[i] for i in reversed(range(len(sizes)))],
    },
    "accumulate": {
        "has no gradient": lambda replica, microbatches: None,
        "sends nothing": {
            "    x, y = microbatches[-1]\n": "    with replica.no_sync():\n        x, y = microbatches[-1]\n    "
        },
        "add up": {WEIGHT: ")"},
        "weight by rows": {WEIGHT: ").div(len(microbatches))"},
        "off that of the big batch": {"n_rows =": "microbatches = microbatches[-1:]\n    n_rows ="},
        "right, but a forward pass of 12 rows; the largest microbatch has 4": {
            "n_rows =": "microbatches = [tuple(map(torch.cat, zip(*microbatches)))]\n    n_rows ="
        },
        "right, but 3 all-reduces": {"with replica.no_sync()": "if True"},
    },
}
