"""Hints for chapter 14's guesses: wrong answers that have a reason, from what its cells have computed."""


def gb_after_stage_1(of_stage):
    """GB on a rank after stage 1; of_stage holds those of the stages 0 to 3."""
    return {
        of_stage[3]: "Stage 1 divides the optimizer's states alone.",
        of_stage[2]: "That is stage 2.",
        of_stage[1] - of_stage[3]: "A 64th of the optimizer's states is left, too.",
    }


def passes_of_stage_3():
    """Passes over the weights of a step of stage 3."""
    return {2: "The shards of the weights are gathered forward and backward."}


def two_queues(one_by_one):
    """Milliseconds of a step with two queues."""
    return {round(one_by_one): "That is one after the other."}


def tokens(across, inside):
    """Tokens a rank from which a gather between machines hides."""
    return {inside: "That is inside one machine.", 2 * across: "A weight has 2 bytes and makes 2 operations."}


def order():
    """What happens where the optimizer is made before the model is sharded."""
    return {
        "nothing learned": "So it is with torch alone: the old parameters get no gradient. ddl watches them.",
        "as DDP": "Sharding makes new parameters.",
    }


def peak(layer_by_layer, states, whole):
    """The peak in MiB where all layers are one unit; whole: of all weights."""
    return {
        layer_by_layer: "That is layer by layer.",
        states: "Those are the states alone.",
        states + whole: "The weights are whole. What else is, when backward ends?",
    }
