"""Hints for chapter 18's guesses: wrong answers that have a reason, from what its cells have computed."""


def gpipe(working, one_process):
    """Milliseconds of GPipe by hand; working is how long each rank works."""
    return {
        working: "So long does a rank work; when do the last and the first begin?",
        one_process: "That is without overlap.",
    }


def twice(n_microbatches):
    """How many times its gradient a step leaves behind when it follows another without zero_grad."""
    return {
        2: "At the end of the second step, what is divided?",
        1: "The first step's gradient is still there.",
        2 / n_microbatches: "A step's own gradients are a sum over microbatches.",
    }


def smaller():
    """Which schedule has the smaller bubble."""
    return dict.fromkeys(("1f1b", "gpipe"), "Do the passes change, or their order?")


def tensors(of_gpipe):
    """Tensors that rank 0 keeps under GPipe with recomputation; of_gpipe is without."""
    return {of_gpipe: "Now a microbatch keeps its stage's input only.", 1: "One for each microbatch that is under way."}


def best(counts):
    """The fastest of the numbers of microbatches."""
    return {
        4: "Close: it takes 336 ms, and 6 take 324.",
        max(counts): "Each turn has its price.",
        min(counts): "Then three ranks wait.",
    }


def layers(by_cost):
    """The layers of the first stage, balanced by parameters; by_cost are those balanced by work."""
    return {by_cost: "That is by work. How many parameters has the embedding?"}


def fourteen():
    """What the gradient of 14 rows is with four microbatches by hand."""
    return {
        "right": "What does the mean over microbatches weigh alike?",
        "error": "`chunk` makes the last one smaller.",
    }
