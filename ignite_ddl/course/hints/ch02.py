"""Hints for chapter 02's guesses: wrong answers that have a reason, from what its cells have computed."""


def rows(flop_a_byte):
    """From how many rows on a product is compute-bound; flop_a_byte is what the device can do in the time of a byte."""
    return {round(flop_a_byte): "So many FLOP a byte the device can do. The product does n / 6."}


def done(n_kernels):
    """How many kernels are done when the loop has ended."""
    return {n_kernels: "The loop only writes the orders."}


def reading(with_reading, n_steps, prepare, step):
    """Milliseconds of training whose loss is read at the end."""
    return {
        with_reading: "That is with reading.",
        n_steps * step: "The first step has to wait for the first batch.",
        n_steps * prepare: "The device needs longer than the host.",
    }


def pinned(pageable, two_queues):
    """Milliseconds from pinned memory, with one queue."""
    return {pageable: "That is pageable memory.", two_queues: "That needs a second queue, for the copies."}


def peak(mib):
    """The MiB at a step's peak; mib is what StepMemory has found at each moment."""
    return {
        sum(mib[moment].values()): "So much there is after forward, and again after backward; in between there is more."
        for moment in ("after forward", "after backward")
    }


def gradient_type(of_weights):
    """The type of an activation's gradient."""
    return {of_weights: "So are the weights' gradients. Which type has the tensor?"}


def passing(answers):
    """How many jobs pass NCCL's check; answers are what the ranks of each job say."""
    return {sum("ok" in said for said in answers.values()): "A job passes if all its ranks do."}
