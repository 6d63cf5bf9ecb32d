"""Hints for chapter 20's guesses: wrong answers that have a reason, from what its cells have computed."""


def outputs():
    """Of tp ranks that read different rows."""
    return {"right": "Whose rows do the two ranks add up?", "error": "The shapes agree."}


def slices():
    """How many different slices of a layer DDP over the world leaves."""
    return {2: "The world holds both tp ranks.", 4: "Copies begin alike."}


def norm(asked, n_parts):
    """The norm of the whole where each of n_parts is clipped to what is asked."""
    return {asked: f"That is the norm of each of {n_parts} parts.", n_parts * asked: "Squares add up, not norms."}


def most():
    """The axis that sends most."""
    return {"dp": "A rank holds a quarter of the weights.", "pp": "It sends one activation, once."}
