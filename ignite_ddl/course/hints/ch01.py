"""Hints for chapter 01's guesses: wrong answers that have a reason, from what its cells have computed."""


def faster(sort_alone):
    """How many times faster four processes are; sort_alone is that of the sort without the merge."""
    return {sort_alone: "That is the sort; what follows takes time, too.", 4: "Has each rank a core of its own?"}


def longer(answer):
    """How long eight ranks take with a thread for each core, compared with one; answer is what came out."""
    hints = {"the same": "It is the same work, but threads wait.", "about twice": "They do more than take turns."}
    return {guess: hint for guess, hint in hints.items() if guess != answer}


def best(most):
    """How many ranks are the fastest; most are the most that were tried."""
    return {most: "There the rest alone takes eleven seconds."}


def by_hand(one_gradient, all_gradients):
    """Bytes that an all-gather hands to each rank."""
    return {
        one_gradient: "That is one rank's gradient.",
        all_gradients - one_gradient: "A rank gets its own back, too.",
    }


def rank_1(put_in):
    """What rank 1 holds after an all-to-all; put_in is what it held before."""
    return {tuple(put_in): "That is what it puts in."}


def padded(without_note):
    """Bytes of rank 0 in the gathering of objects; without_note are those where no rank has a note."""
    return {without_note: "All must put in equally many."}


def outcome():
    """What happens when ranks disagree about the order of two sums."""
    return {
        "error": "Sizes and types agree: what could notice?",
        "hang": "Each call meets a call of the others: nobody waits.",
    }
