"""Natural mistakes in chapter 05's exercises."""

READ = "list(islice(rows, batch_size))"
CUT = "batch[rank * len(batch) // world_size : (rank + 1) * len(batch) // world_size]"
LAST_TAKES_THE_REST = "batch[rank * (n := len(batch) // world_size) :][: n if rank < world_size - 1 else None]"
RIGHT = {"fair_accuracy": [{"(mine)": "(float(mine))"}], "deal_stream": [{"batch[rank::world_size]": CUT}]}
MISTAKES = {
    "fair_accuracy": {
        "your function returns nothing": lambda right, n_rows: None,
        "the share of all reads: the copies still count": {
            "rank < n_rows": "rank < world_size * len(right)",
            "/ n_rows": "/ (world_size * len(right))",
        },
        "18 rows on 4 ranks, of which 2 wrong: 0.889 are right, rank 0 returns 0.222": {
            "idist.all_reduce(mine)": "mine"
        },
        "9 rows on 2 ranks, of which 1 wrong: 0.889 are right, rank 0 returns 1.000": {
            "/ n_rows": "/ (n_rows - (n_rows == 9))"
        },
        "right, but a rank hands in": {"return ": "idist.all_gather(torch.zeros(9))\n    return "},
    },
    "deal_stream": {
        "cannot read what deal_stream returns (TypeError: 'NoneType' object is not iterable); it should be what its": {
            "yield ": ""
        },
        "yield a list of rows for each step, not a int": lambda stream, *_: stream,
        "your ranks make [3, 3, 2, 2] steps, so some wait for ever": {
            "iter(stream)": "islice(stream, rank, None, world_size)",
            READ: "list(islice(rows, batch_size // world_size))",
            "batch[rank::world_size]": "batch",
        },
        "one process makes 3 steps, your ranks make 2": {f"batch := {READ}": f"len(batch := {READ}) == batch_size"},
        "stream of 10 rows, batches of 4, 4 ranks: row 0 goes to 4": {"[rank::world_size]": ""},
        "step 1 should deal rows [0, 1, 2, 3], yours deals [1, 2, 3, 4]": {
            "iter(stream)": "(row + 1 for row in stream)"
        },
        "in step 3 your ranks hold [0, 0, 0, 2] rows": {"batch[rank::world_size]": LAST_TAKES_THE_REST},
        "a list of 10 rows, batches of 4, 4 ranks: your steps never end": {"iter(stream)": "stream"},
        "stream of 10 rows, batches of 4, 4 ranks: your steps go on after the 3 of one process": {
            f"while batch := {READ}:": f"while True:\n        batch = {READ}"
        },
        "you read 40 rows and gave no batch": {"iter(stream)": "iter(list(stream))"},
        "batches of 4: after step 1 you have read 8 rows of the stream, 4": {
            f"while batch := {READ}:": f"ahead = {READ}\n    while batch := ahead:\n        ahead = {READ}"
        },
    },
}
WAITING = {"fair_accuracy": {"your ranks wait for each other": {"return ": "return rank or "}}}
