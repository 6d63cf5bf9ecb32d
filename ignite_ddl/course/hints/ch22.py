"""Hints for chapter 22's guesses: wrong answers that have a reason, from what its cells have computed."""


def mean(in_order, of_rank_1):
    """Rank 0's mean where rank 1 sums in another order."""
    return {in_order: "That is in one order.", of_rank_1: "That is rank 1's."}


def steps(n_different):
    """Steps of all starts together, of n_different that a run has."""
    return {n_different: "What was done since the last checkpoint is done again."}


def lost(interval, save, restart, mean_time):
    """The share of time that is lost, in percent; all four in minutes."""
    saving = 100 * save / (interval + save)
    return {
        saving: "That goes into saving; what is lost with each failure?",
        saving + 100 * restart / mean_time: "And the work since the last save?",
    }
