"""Natural mistakes in chapter 26's exercises."""

MISTAKES = {
    "best_round": {
        "return one of the rounds": lambda needed, compute, exchange: 2,
        "a long round needs more steps": lambda needed, compute, exchange: max(needed),
        "has to end": {"math.ceil(steps / H)": "steps / H"},
        "fewest steps are not fewest seconds": lambda needed, compute, exchange: min(needed, key=needed.get),
    },
    "send_with_memory": {
        "return two tensors": {"return torch.stack(sent), error": "return torch.stack(sent)"},
        "a row for each gradient": {"torch.stack(sent)": "sum(sent)"},
        "you compress 12 times in 6 steps": {
            "sent.append(compress(wanted))": "sent.append(compress(compress(wanted)))"
        },
        "without what the steps before have left out": {"gradient + error": "gradient"},
        "what was wanted minus what was sent": {"wanted - sent[-1]": "gradient - sent[-1]"},
        "sent and left add up": {"return torch.stack(sent), error": "return torch.stack(sent), wanted"},
    },
}
