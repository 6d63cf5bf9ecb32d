"""Hints for chapter 21's guesses: wrong answers that have a reason, from what its cells have computed."""


def files(n_old):
    """From how many old files a new rank reads; n_old pieces hold the tensor."""
    return {n_old: "Which of them share rows and columns with it?", 1: "No old piece holds all of its rows."}


def minutes(mean_time):
    """How often to save; a failure comes every mean_time minutes."""
    return {mean_time: "Then hardly a life reaches its first save.", 1: "Half of the time would go into saving."}


def runs():
    """How many runs go on with the losses of the uninterrupted one."""
    return {3: "Which rank draws the masks of which rows?", 1: "A mesh alone changes no loss."}
