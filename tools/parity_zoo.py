"""ddl.check_parity on models that we did not write: a line for each model and mesh.

pip install --target build/zoo transformers
PYTHONPATH=build/zoo python tools/parity_zoo.py [words that a line should have]
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ignite_ddl as ddl

WORDS, ROWS, LENGTH, WIDTH = 50, 8, 6, 32


class Output(nn.Module):
    """A model of Hugging Face, whose output is an object, as one that returns its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def resnet():
    from ignite_ddl.course import import_torchvision

    resnet18 = import_torchvision().models.resnet18
    return resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def hugging_face(kind, head, **more):
    def make(n_layers=2):
        from ignite_ddl.course import import_torchvision

        import_torchvision()  # transformers imports it
        import transformers

        names = {"gpt2": ("n_embd", "n_layer", "n_head")}.get(
            kind.lower(), ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        sizes = dict(zip(names, (WIDTH, n_layers, 4), strict=True)) | {
            "vocab_size": WORDS,
            "use_cache": False,
        }
        config = getattr(transformers, f"{kind}Config")(**sizes, **more)
        return Output(getattr(transformers, f"{kind}{head}")(config))

    return make


def next_word(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def plan(column, row):
    """Column for the first names, Row for the second, inside of the two blocks."""
    return {f"{name}": ddl.Column() for name in column} | {f"{name}": ddl.Row() for name in row}


def main(words):
    torch.manual_seed(0)
    ids, images, vectors = (
        torch.randint(WORDS, (ROWS, LENGTH)),
        torch.randn(ROWS, 3, 32, 32),
        torch.randn(ROWS, LENGTH, WIDTH),
    )
    labels, next_ids = torch.randint(10, (ROWS,)), torch.randint(WORDS, (ROWS, LENGTH))
    llama = "model.model.layers.*."
    bert = "model.bert.encoder.layer.*."
    models = {
        "torchvision resnet18, GroupNorm": (resnet, {"layer4.1.conv2": ddl.InputChannels(whole_input=True)},
            (images, labels), F.cross_entropy),
        "nn.TransformerEncoder": (encoder, plan(["layers.*.linear1"], ["layers.*.linear2"]),
            (vectors, vectors.flip(0)), F.mse_loss),
        "transformers Llama": (hugging_face("Llama", "ForCausalLM", intermediate_size=64, num_key_value_heads=2),
            plan([llama + f"self_attn.{n}_proj" for n in "qkv"] + [llama + "mlp.gate_proj", llama + "mlp.up_proj"],
                 [llama + "self_attn.o_proj", llama + "mlp.down_proj"]), (ids, next_ids), next_word),
        "transformers GPT2": (hugging_face("GPT2", "LMHeadModel"), None, (ids, next_ids), next_word),
        "transformers Bert": (hugging_face("Bert", "ForSequenceClassification", intermediate_size=64, num_labels=10),
            plan([bert + f"attention.self.{n}" for n in ("query", "key", "value")] + [bert + "intermediate.dense"],
                 [bert + "attention.output.dense", bert + "output.dense"]), (ids, labels), F.cross_entropy),
    }  # fmt: skip
    meshes = {"dp2": {"dp": 2}, "dp2 shard": {"dp": 2, "shard": True}, "tp2": {"tp": 2},
              "dp2 tp2 shard": {"dp": 2, "tp": 2, "shard": True}, "pp2": {"pp": 2}}  # fmt: skip
    wrong = 0
    for name, (model, tensor_plan, batch, loss_fn) in models.items():
        for mesh, options in meshes.items():
            line = f"{name:32} {mesh:14}"
            if not all(word in line for word in words) or ("tp" in options and tensor_plan is None):
                continue
            try:
                report = ddl.check_parity(
                    model, tensor_plan if "tp" in options else None, batch, loss_fn, **options
                )
                said = f"equal to {report.worst.error:.0e}" if report.equal else f"\n{report}"
                said += f"; zero gradients: {', '.join(report.dead)}" * bool(report.equal and report.dead)
                wrong += not report.equal
            except ValueError as error:
                said = f"refused: {error}"
            except ddl.RankError as error:
                said, wrong = f"failed: {error.summary}", wrong + 1
            print(line, said, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
