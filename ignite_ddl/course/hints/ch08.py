"""Hints for chapter 08's guesses: wrong answers that have a reason, from what its cells have computed."""


def average():
    """A timer's average in ms, attached with step alone."""
    return {10: "By default the timer runs from the run's start to its end."}


def step():
    """The average in ms of a timer that is told to pause between steps."""
    return {
        10: "A timer that starts is running. Who pauses it before the first step?",
        40: "From the second step on it is paused.",
    }


def window(both):
    """Milliseconds of a window that waits at its end; both is that of one that waits at both ends."""
    return {both: "Is the queue empty when the window opens?", 0: "It does wait, at the end."}


def first():
    """The first step, as a multiple of the median."""
    return {1: "The first step also does what is done once."}


def factor():
    """How many times narrower the interval of 640 steps is than that of 40."""
    return {640 / 40: "It shrinks as the root of that."}
