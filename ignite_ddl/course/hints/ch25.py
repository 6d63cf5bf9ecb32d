"""Hints for chapter 25's guesses: wrong answers that have a reason, from what its cells have computed."""

import math


def bits(letters_only, n_characters):
    """Bits per character of a model that knows nothing yet."""
    return {letters_only: "So many if it knew how frequent each is.", math.log(n_characters): "That is in nats."}


def first_cut():
    """The axis that the planner takes up first when memory shrinks."""
    return {"tp": "Four all-reduces a layer, none hidden, at 0.2 ms a message: count them."}


def axis():
    """The axis on which the loss agrees."""
    return {"dp": "A dp rank has some of the rows.", "pp": "A stage sees some of the rows at a time."}


def places(length):
    """In how many of a row's places the repaired model sees the future."""
    return {length: "After the last one nothing comes.", 0: "Over what is the scale's maximum taken?"}
