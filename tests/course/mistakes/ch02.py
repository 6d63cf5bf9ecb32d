"""Natural mistakes in chapter 02's exercises."""

from functools import partial


def timed(launch, synchronize, clock, n, warm_up=True, before=True, each=False, after=True):
    if warm_up:
        launch()
    if before:
        synchronize()
    start = clock()
    for _ in range(n):
        launch()
        if each:
            synchronize()
    if after:
        synchronize()
    return (clock() - start) / n


def overflows(gradients):
    return not all(gradient.isfinite().all() for gradient in gradients)


def to_float32(gradient, scale):
    return gradient.float() / scale


def scaled(
    gradients, scale, good, n, unscale=to_float32, overflow=overflows, up=2, down=2, restart=1, forget=1
):
    if overflow(gradients):
        return None, scale / down, 0 if forget else good
    good += 1
    scales = (scale * up, 0 if restart else good) if good == n else (scale, good)
    return [unscale(gradient, scale) for gradient in gradients], *scales


MISTAKES = {
    "time_kernel": {
        "return seconds": lambda launch, synchronize, clock, n: None,
        "right, but with 0 launches": lambda launch, synchronize, clock, n: 2e-3,
        "you waited 101 times": partial(timed, each=True, after=False),
        "is all 100 together": lambda launch, synchronize, clock, n: n * timed(launch, synchronize, clock, n),
        "that is what launching costs": partial(timed, after=False),
        "the first launch of a kernel compiles it": partial(timed, warm_up=False),
        "the queue still holds work": partial(timed, before=False),
    },
    "scaled_step": {
        "return three things": lambda gradients, scale, good, interval: gradients,
        "this step must be left out": partial(
            scaled, overflow=lambda gradients: not gradients[0].isfinite().all()
        ),
        "all gradients are finite, and you left": partial(scaled, overflow=lambda gradients: True),
        "float16; the weights": partial(scaled, unscale=lambda gradient, scale: gradient / scale),
        "divided in float16 it vanishes": partial(scaled, unscale=lambda g, scale: (g / scale).float()),
        "still times the scale": partial(scaled, unscale=lambda gradient, scale: gradient.float()),
        "step 4 (interval 4): the scale goes from 65,536 to 131,072": partial(scaled, up=1),
        "to 32,768, yours to 65,536": partial(scaled, down=1),
        "step 8 (interval 4): the scale goes from 131,072 to 262,144": partial(scaled, restart=0),
        "an overflow in the third step, step 4": partial(scaled, forget=0),
    },
}
