"""Hints for chapter 03's guesses: wrong answers that have a reason, from what its cells have computed."""


def by_hand(n_batches):
    """Programs that the lazy tensor compiles in an epoch."""
    return {1: "The last batch has a shape of its own.", n_batches: "What was compiled is kept, and used again."}


def lines(n_lines):
    """Which lines compile more than once."""
    return {tuple(range(n_lines)): "A tensor's numbers, and a factor, are handed to the program."}


def short_run():
    """The fastest rule of padding for 1,000 steps."""
    return {"as it is": "512 programs of a minute each.", "multiples of 64": "Eight programs are eight minutes."}


def long_run():
    """The fastest rule of padding for 100,000 steps."""
    return {"always 512": "Half of every step is padding.", "as it is": "512 programs are eight hours and a half."}


def printed(unread, n_steps):
    """Programs of a loop that prints its loss; unread are those of one that reads nothing."""
    return {
        unread: "Each step reads its loss, and what was noted since then differs.",
        n_steps: "And who runs what is noted after the last loss?",
    }


def held(whole):
    """Bytes of x on one device; whole are all of x."""
    return {whole: "That is all of x.", whole // 4: "Devices of one row of the mesh hold the same rows of x."}


def all_reduces(right):
    """All-reduces in four training steps: data parallel; tensor parallel; that, where x needs a gradient; both."""
    data, model, inside, both = right
    return {
        (data - 1, model, inside, both - 1): "Each of the two weights has a gradient.",
        (data + 1, model, inside, both + 1): "Nobody reads the loss: its sum is left out.",
        (data, model, model, both - 1): "What x gets back is a sum over columns that lie on two devices.",
    }


def graphs(n_shapes):
    """Programs of Ignite's trainer."""
    return {n_shapes: "That is one for each shape. What does the first step do that no other does?"}
