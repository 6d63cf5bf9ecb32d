"""Hints for chapter 05's guesses: wrong answers that have a reason, from what its cells have computed."""


def reads(n_rows, n_ranks):
    """Rows that all ranks read together where they do not divide."""
    return {
        n_rows: "Each rank takes as many rows as the others.",
        n_rows // n_ranks * n_ranks: "Rows are added, not left out.",
    }


def accuracy(true, with_another):
    """The accuracy with a wrong row that is asked twice, in percent; with_another is that of one asked once."""
    return {true: "Row 0 is asked twice.", with_another: "That is so if a row is wrong that is asked once."}


def kept(one_process, n_rows):
    """Rows that four ranks read with drop_last."""
    return {
        one_process: "That is one process. Who pads, and who drops, and in which order?",
        n_rows: "The sampler pads first.",
    }


def weight(one_process, padded):
    """The weight after the last step, by ddl's loader and Ignite's trainer."""
    return {one_process: "DDP divides by four; how many ranks have rows?", padded: "That is with rows 0 and 1 again."}


def new(n_epochs):
    """Orders of a second run that the first did not have."""
    return {n_epochs: "The sampler shuffles by seed + epoch."}


def stream(dealt, padded):
    """Rows that all ranks read of a stream."""
    return dict.fromkeys((dealt, padded), "Who deals, where there are no row numbers?")


def classes():
    """Classes in the first batch, with a buffer of 100 rows."""
    return {1: "64 rows have gone out: who came in for them?"}
