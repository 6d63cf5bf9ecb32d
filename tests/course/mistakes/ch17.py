"""Natural mistakes in chapter 17's exercises."""

import torch.nn.functional as F

NOT_SHIFTED = "logits.exp().sum().log() - logits.flatten().logsumexp(0)"  # 0, where exp has room for it
OWN_CLASSES = "(idist.all_reduce(logits.gather(1, place)[:, 0] * here) - logits.mean(dim=1)).mean()"
CHANGE = " + smoothing * change / len(target)"
RIGHT = {"smoothed_loss": [{"return loss": "return [loss", CHANGE: f"{CHANGE}]"}]}  # a list will do
MISTAKES = {
    "smoothed_loss": {
        "index 17 is out of bounds": {"target < first + logits": "target <= first + logits"},
        "rank 0 should return the loss and the gradient": {f", gradient{CHANGE}": ""},
        "the loss of rank 0 should be one float64 number": {"return loss": "return float(loss)"},
        "of rank 0 should have the shape of its logits, (6, 17)": {CHANGE: "[:, 1:]"},
        "logits near 1000, and the loss of rank 0 is inf: subtract": {"return loss": f"return loss + {NOT_SHIFTED}"},
        "rank 0 returns the loss without smoothing": {"loss + smoothing *": "loss + 0 *"},
        "rank 0 smooths over its own 17 classes": {"idist.all_reduce(share).mean()": OWN_CLASSES},
        "the loss of rank 0 is not that of F.cross_entropy": {"loss + smoothing *": "loss + 2 * smoothing *"},
        "the gradient of rank 0 is 6 times too large: the loss is a mean": {
            f"gradient{CHANGE}": "gradient * len(target) + smoothing * change"
        },
        "the loss is right, but the gradient of rank 0 is that": {CHANGE: ""},
        "but the gradient of rank 0 is not that of F.cross_entropy": {
            "return loss, gradient": "return loss, -gradient"
        },
        "right, but rank 0 puts in 3312 bytes; four numbers a row are 192": {
            "here =": "idist.all_reduce(torch.zeros(len(target), n_words).double())\n    here ="
        },
    },
    "cut_dropout": {
        "rank 0 should return a float64 tensor of shape (5, 2)": lambda x, p, n: F.dropout(x, p)[:, 1:],
        "rank 0 draws for its own features alone": lambda x, p, n: F.dropout(x, p),
        "what is kept is not divided by 1 − p": {"F.dropout(ones, p)": "F.dropout(ones, p).bool()"},
        "rank 1 does not keep what one process keeps": {"[idist.get_rank()]": "[0]"},
        "the next number of rank 0 is not that of one process": {"return ": "torch.rand(())\n    return "},
        "right, but rank 0 puts in 80 bytes; nothing has to be sent": {
            "return ": "return 0 * idist.all_reduce(x.clone()) + "
        },
    },
}
