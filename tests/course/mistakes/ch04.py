"""Natural mistakes in chapter 04's exercises."""

SAME_ROWS = "torch.utils.data.DataLoader(rows, batch_size // idist.get_world_size(), generator=torch.Generator(),"
RIGHT = {"train": [{"trainer.state.epoch": "trainer.state.epoch - 1"}]}  # epochs from 0
MISTAKES = {
    "train": {
        "return the trained weights by their names": lambda *_: 16,
        "DDP wraps the model": {"model.state_dict()": "replica.state_dict()"},
        "the ranks end with different weights": {"idist.auto_model(model)": "model"},
        "every epoch has the same order": {"loader.sampler.set_epoch(trainer.state.epoch)": "pass"},
        "your batches are divided twice": {"=batch_size": "=batch_size // idist.get_world_size()"},
        "but not with those of one process": {"idist.auto_dataloader(rows, batch_size=batch_size,": SAME_ROWS},
        "4 ranks, 48 rows, batches of 16, 3 epochs: all ranks end": {"lr=0.1": "lr=0.4"},
    },
    "average_gradients": {
        "without a gradient": {"parameter.grad = idist": "parameter.grad = None and idist"},
        "still each rank's own": lambda model, n_rows: 0,
        "4, 4, 4 and 4 rows: you added the gradients up": {" * n_rows / all_rows": ""},
        "7, 5, 3 and 1 rows: your mean weighs each": {" * n_rows / all_rows": " / 4"},
        "the ranks end with different gradients": {" * n_rows / all_rows)": ") * n_rows / all_rows"},
        "not those of one process": {" / all_rows": ""},
        "right values, but a rank handles": {
            "reduce(parameter.grad * n_rows / all_rows)": "gather((parameter.grad * n_rows / all_rows)[None]).sum(0)"
        },
    },
}
