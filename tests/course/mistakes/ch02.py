"""Natural mistakes in chapter 02's exercises."""

MISTAKES = {
    "time_kernel": {
        "return seconds": lambda launch, synchronize, clock, n: None,
        "right, but with 0 launches": lambda launch, synchronize, clock, n: 2e-3,
        "you waited 101 times": {"launch()\n    synchronize()\n": "launch()\n        synchronize()\n"},
        "is all 100 together": {") / n": ")"},
        "that is what launching costs": {"launch()\n    synchronize()\n": "launch()\n"},
        "the first launch of a kernel compiles it": {"launch()  # warm-up": "# warm-up"},
        "the queue still holds work": {"synchronize()  # and": "# and"},
    },
    "scaled_step": {
        "return three things": lambda loss, weights, scale, good, interval: scale,
        "a weight has no gradient": lambda loss, weights, scale, good, interval: (True, scale, good),
        "this step must be left out": {"for weight in weights)": "for weight in weights[-1:])"},
        "all gradients are finite, and you leave": {"not all(": "any("},
        "still times the scale": {"weight.grad /= scale": "pass"},
        "tiny losses, step 1: these gradients went without a scale": {"loss * scale": "loss", "/= scale": "/= 1"},
        "not those of torch.amp.GradScaler": {"loss * scale": "2 * loss * scale"},
        "step 4 (interval 4): the scale goes from 65,536 to 131,072": {"scale * 2": "scale"},
        "to 32,768, yours to 65,536": {"scale / 2": "scale"},
        "step 8 (interval 4): the scale goes from 131,072 to 262,144": {"scale * 2, 0": "scale * 2, good + 1"},
        "an overflow in the third step, step 4": {"scale / 2, 0": "scale / 2, good"},
    },
}
