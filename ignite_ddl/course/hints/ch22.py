"""Hints for chapter 22's guesses: wrong answers that have a reason, from what its cells have computed."""


def steps(n_different):
    """Steps of all starts together, of n_different that a run has."""
    return {n_different: "What was done since the last checkpoint is done again."}


def found():
    """Whether check_in_sync finds a gradient that is wrong before the sum over ranks, or after it."""
    return {"both": "What does the sum do with a wrong gradient?", "before": "What do all ranks get from the sum?"}


def lost(interval, save, restart, mean_time):
    """The share of time that is lost, in percent; all four in minutes."""
    saving = 100 * save / (interval + save)
    return {
        saving: "That goes into saving; what is lost with each failure?",
        saving + 100 * restart / mean_time: "And the work since the last save?",
    }
