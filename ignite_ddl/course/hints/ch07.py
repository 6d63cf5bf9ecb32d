"""Hints for chapter 07's guesses: wrong answers that have a reason, from what its cells have computed."""


def step():
    """Milliseconds of eight steps, by handlers that were attached too late."""
    return {8 * 20: "Which handlers run before the one that reads the clock?"}


def log():
    """Milliseconds of a handler that waits for the queue."""
    return {30: "How many steps are in the queue by then?", 0: "It waits for the number."}


def rank_0():
    """Milliseconds of a step on a rank that meets a late one."""
    return {10: "In the step it meets the others, in an all-reduce."}


def accused(late):
    """The rank with the shortest step; late is the one for which the others wait."""
    return {late: "For that one they wait. But is its step shorter than the others'?"}
