"""Hints for chapter 12's guesses: wrong answers that have a reason, from what its cells have computed."""


def times(times):
    """How many times the model's bytes pass through the server's port, with four workers."""
    return {round(times / 2): "Weights go out and gradients come in.", 2: "That is for each worker."}


def rows(batches):
    """The rows that have an effect, where the server keeps the last weights."""
    return {sum(map(len, batches)): "Each message of weights replaces the one before."}


def busier():
    """The share of the busier of two servers, in %."""
    return {100 / 2: "A parameter is not cut, and one is larger than all others."}


def of_a_table(table_bytes, n_ids):
    """What passes through a worker's port, where it looks up n_ids rows of 128 bytes."""
    return {
        2 * table_bytes: "That is the whole table, in and out.",
        n_ids * 2 * 128: "The server has to be told which rows.",
        n_ids * (8 + 128): "Rows come in, and their gradients go out.",
    }
