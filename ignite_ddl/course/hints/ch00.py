"""Hints for chapter 00's guesses: wrong answers that have a reason, from what its cells have computed."""


def entries(everywhere, of_one_rank):
    """Entries in the notebook's list after four ranks have appended."""
    return {
        everywhere: "Each rank appended to a list of its own.",
        of_one_rank: "That is the list of one rank, a copy of the notebook's.",
    }


def others():
    """What the other ranks get when rank 3 does not call all_reduce."""
    return {
        1 + 2 + 3: "Who would tell the three that they need not wait for rank 3?",
        1 + 2 + 3 + 4: "Rank 3's number has not come.",
        "an error": "Is rank 3 late, or will it never call? The others cannot tell.",
    }


def entry(mean, n_ranks):
    """An entry of the whole batch's gradient."""
    return {n_ranks * mean: "That is the sum of the four; the loss is a mean."}


def mean(of_rows):
    """The mean of the ranks' means."""
    return {of_rows: "That is the mean of the rows, not of the means."}


def rows(by_payload):
    """Rows with which both cuts send the same."""
    return {by_payload: "That compares what is handed over, not what is sent."}


def gigabytes(weights, of_world):
    """GB a rank of plain data parallelism; of_world is a share of it for each rank."""
    return {weights: "That is the weights alone.", of_world: "No rank leaves a weight out: each has a copy."}
