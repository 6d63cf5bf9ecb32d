"""Hints for chapter 13's guesses: wrong answers that have a reason, from what its cells have computed."""


def sync(alone):
    """The accuracy of 32 synchronous workers; alone is that of one worker, in %."""
    return {alone: "Its gradients are as fresh, but it makes 8 updates, not 256."}


def backups(of_spread):
    """The best number of backups where steps vary by a tenth; of_spread is the best for each spread."""
    return {
        of_spread[0.05]: "So many at 5 %.",
        of_spread[0.2]: "So many at 20 %.",
        0: "Waiting for the slowest of 100 costs more.",
    }
