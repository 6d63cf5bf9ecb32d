"""Natural mistakes in chapter 12's exercises."""

import ignite.distributed as idist

MISTAKES = {
    "serve_with_momentum": {
        "return the weights, float64": {"return weights": "return weights[:2]"},
        "got different weights; update when all": {"worker)\n": "worker)\n            weights = weights - 0.1\n"},
        "before the last update": {"n_rows =": "before = weights\n        n_rows =", "return weights": "return before"},
        "each gradient weighs alike": {" * answer[-1]": "", "/ n_rows": "/ len(answers)"},
        "you add gradients up": {" / n_rows": ""},
        "the velocity is forgotten": {"momentum * velocity + ": ""},
        "the weights should be": {"return weights": "return weights + 1"},
    },
    "everyone_a_server": {
        "should return all weights": lambda weights, gradient, rate: weights[:3],
        "the step is 4 times too long": {"total / n": "total"},
        "only its own gradient": lambda weights, gradient, rate: weights - rate * gradient,
        "is not what worker 1 made of it: pull it": {
            "pulls = [dist.isend(chunks[rank], other) for other in others]": "pulls = []",
            "chunks[other] = receive(chunks[other], other)": "pass",
        },
        "chunk 0 of worker 0 should be": lambda weights, gradient, rate: weights,
        "differ in the last bits": lambda weights, gradient, rate: (
            weights - rate * sum(idist.all_gather(gradient[None]).roll(idist.get_rank(), 0)) / idist.get_world_size()
        ),
        "by all_reduce": lambda weights, gradient, rate: (
            weights - rate * idist.all_reduce(gradient) / idist.get_world_size()
        ),
        "sent 360 bytes; 3 chunks of gradient and as many of weights are 144": {
            "dist.isend(parts[other]": "dist.isend(gradient",
            "receive(parts[rank], other)": "receive(gradient, other).chunk(n)[rank]",
        },
    },
}
WAITING = {
    "serve_with_momentum": {"your ranks wait for each other: in each step the server": lambda weights, *_: weights}
}
