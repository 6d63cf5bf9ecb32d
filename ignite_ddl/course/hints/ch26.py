"""Hints for chapter 26's guesses: wrong answers that have a reason, from what its cells have computed."""


def exchange(seconds):
    """Seconds of an all-reduce between two cities."""
    return {seconds / 8: "A gigabit is an eighth of a gigabyte.", 2 * seconds: "Two ranks: twice one half."}


def exact():
    """Which optimizers train as with all-reduce in rounds of one step."""
    return {
        ("SGD",): "Is a momentum's average not the momentum of the average?",
        ("SGD", "SGD with momentum", "AdamW"): "AdamW divides by a root: is its mean the root of the mean?",
    }


def loss(large_batch):
    """The loss after four rounds of 32 steps."""
    return {large_batch: "So much after four steps with large batches."}


def best_round(steps, all_reduce=1):
    """The best H in a given time; ``steps`` is the longest round."""
    return {
        steps: "In its long rounds the cities drift furthest apart.",
        all_reduce: "It spends its time on the cable.",
    }


def rank(of_a_city):
    """The rank from which on PowerSGD is exact."""
    return {of_a_city: "So many rows has one city; the mean has the rows of both."}


def break_even(n_ranks):
    """From how many ranks on top-k sends more than a ring."""
    return {n_ranks / 2: "The ring goes round twice.", 2 * n_ranks: "An entry has a number and its place: 8 bytes."}


def first_sent():
    """The step in which a small entry is sent for the first time."""
    return {2: "It waits until what is left of it is larger than the other.", 10: "10 is less than 10.5."}


def wait(each_step, n_steps):
    """Percent of time that ranks wait for the slowest, in rounds."""
    return {
        each_step: "Fast and slow steps of one rank even out in a round.",
        each_step / n_steps: "The spread of a sum grows, too, with the root of its length.",
    }
