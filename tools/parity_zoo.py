"""Writes docs/parity_of_models.md: ddl.check_parity on models that we did not write, on each mesh.

pip install --target build/zoo transformers; pip install --no-deps --target build/zoo timm
PYTHONPATH=build/zoo python tools/parity_zoo.py                 runs all, some minutes, and writes the page
PYTHONPATH=build/zoo python tools/parity_zoo.py llama pp2       runs the lines with these words, and prints
PYTHONPATH=build/zoo python tools/parity_zoo.py shared          runs those on cp and ep, and writes that section
PYTHONPATH=build/zoo python tools/parity_zoo.py further         runs those on two meshes, and writes that section
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate

import ignite_ddl as ddl
from ignite_ddl.course import import_torchvision

PAGE = Path(__file__).parents[1] / "docs" / "parity_of_models.md"
WORDS, ROWS, LENGTH, WIDTH, HEADS, SIDE = 50, 8, 6, 32, 4, 32
MESHES = {
    "dp2": {"dp": 2},
    "dp2, shard": {"dp": 2, "shard": True},
    "tp2": {"tp": 2},
    "dp2 × tp2, shard": {"dp": 2, "tp": 2, "shard": True},
    "pp2": {"pp": 2},
    "dp2 × pp2 × tp2": {"dp": 2, "pp": 2, "tp": 2},
    "dp2 × pp2 × tp2, shard": {"dp": 2, "pp": 2, "tp": 2, "shard": True},
}


FEW_KEYS = {"intermediate_size": 64, "num_key_value_heads": 2}
EXPERTS_OF_12 = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, **FEW_KEYS}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ON_CP, ON_EP = ({"cp": 2},), ({"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "shard": True})
SHARED = {  # sequences and experts that ranks share: the model, how it is made, the mesh
    "transformers Llama, 2 heads of keys": ("Llama", FEW_KEYS, ({"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2, "shard": True},
                                                               {"cp": 2, "tp": 2})),
    "transformers Llama, packed documents": ("Llama", FEW_KEYS, ON_CP),
    "transformers Mistral, a window of 5": ("Mistral", {"sliding_window": 5, **FEW_KEYS}, ON_CP),
    "transformers Qwen3": ("Qwen3", {"head_dim": 8, **FEW_KEYS}, ON_CP),
    "transformers Gemma 3, windows of 5": ("Gemma3", {"head_dim": 8, "sliding_window": 5, "pad_token_id": 0,
                                                      **FEW_KEYS}, ON_CP),
    "transformers Mixtral, 4 experts, 2 a token": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2,
                                                               **FEW_KEYS},
                                                   ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 2},
                                                    {"dp": 2, "ep": 2, "shard": True}, {"cp": 2, "ep": 2})),
    "transformers Qwen3-MoE, 4 experts, 2 a token": ("Qwen3Moe", {"num_experts": 4, "head_dim": 8, **EXPERTS_OF_12},
                                                     ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 4},
                                                      {"dp": 2, "ep": 2, "shard": True}, {"cp": 2, "ep": 2})),
    "transformers Qwen2-MoE, 4 experts and a shared one": ("Qwen2Moe", {"num_experts": 4, **EXPERTS_OF_12,
                                                           "shared_expert_intermediate_size": 16}, ON_EP),
    "transformers DeepSeek-V3, 4 experts, 2 a token": ("DeepseekV3", {"n_routed_experts": 4, "n_group": 1,
                                                       "topk_group": 1, "first_k_dense_replace": 0, **EXPERTS_OF_12,
                                                       **LATENT, "num_key_value_heads": 4}, ON_EP),
    "transformers OLMoE, 4 experts, 2 a token": ("Olmoe", {"num_experts": 4, **EXPERTS_OF_12,
                                                 "intermediate_size": 12}, ON_EP),
}  # fmt: skip


class Case(NamedTuple):
    """A model, and how it is cut.

    Attributes:
        make: makes the model.
        plan: from the prefix of its blocks' names to the tensor plan.
        prefix: of its blocks' names.
        batch: x and y.
        loss_fn: the loss.
        layers: makes an nn.Sequential of the model's own blocks, for pp; None if it is none.
        prefix_of_layers: of the blocks' names in that.
    """

    make: Callable
    plan: Callable
    prefix: str
    batch: tuple
    loss_fn: Callable
    layers: Callable | None = None
    prefix_of_layers: str = "*."


# ------------------------------------------------------------------------------------------------- convolutions


def resnet():
    resnet18 = import_torchvision().models.resnet18
    return resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def layers_of_resnet(model):
    layers = OrderedDict(model.named_children())
    layers["fc"] = nn.Sequential(nn.Flatten(), layers["fc"])
    return nn.Sequential(layers)


class Convolved(nn.Sequential):
    def __init__(self, channels, more):
        super().__init__(OrderedDict(conv1=nn.Conv2d(channels, more, 3, padding=1), act1=nn.ReLU(),
                                     conv2=nn.Conv2d(more, more, 3, padding=1), act2=nn.ReLU()))  # fmt: skip


class UNet(nn.Module):
    """Ronneberger et al. 2015, small: each resolution on the way up also gets what left it on the way down."""

    def __init__(self, classes=3, widths=(8, 16, 32)):
        super().__init__()
        down = zip((3, *widths), widths, strict=False)
        self.down = nn.ModuleList(Convolved(channels, more) for channels, more in down)
        up = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(more, fewer, 2, stride=2) for more, fewer in up)
        self.joined = nn.ModuleList(Convolved(2 * fewer, fewer) for _, fewer in up)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        left = []
        for block in self.down:
            left.append(x := block(x if not left else F.max_pool2d(x, 2)))
        for up, block in zip(self.up, self.joined, strict=True):
            left.pop()
            x = block(torch.cat([left[-1], up(x)], 1))
        return self.head(x)


# ------------------------------------------------------------------------------------------------- transformers


def vit():
    import_torchvision()
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(SIDE, SIDE // 4, 2, HEADS, WIDTH, 2 * WIDTH, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.1)  # torchvision's zeros: nothing before them would train
    return model


class Patches(nn.Module):
    """What torchvision's ViT does before its blocks."""

    def __init__(self, vit):
        super().__init__()
        self.conv_proj, self.dropout = vit.conv_proj, vit.encoder.dropout
        self.class_token, self.pos_embedding = vit.class_token, vit.encoder.pos_embedding

    def forward(self, x):
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        return self.dropout(torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.pos_embedding)


class First(nn.Module):
    def forward(self, x):
        return x[:, 0]


def layers_of_vit(model):
    return nn.Sequential(Patches(model), *model.encoder.layers, model.encoder.ln, First(), model.heads)


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def layers_of_encoder(model):
    return nn.Sequential(*model.layers)


class Output(nn.Module):
    """A model of Hugging Face, whose output is an object, as one that returns its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def hugging_face(kind, head, **more):
    import_torchvision()  # transformers imports it
    import transformers

    names = {"GPT2": ("n_embd", "n_layer", "n_head"), "Bloom": ("hidden_size", "n_layer", "n_head"),
             "DistilBert": ("dim", "n_layers", "n_heads")}.get(
        kind, ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )  # fmt: skip
    sizes = dict(zip(names, (WIDTH, 2, HEADS), strict=True)) | {"vocab_size": WORDS, "use_cache": False}
    of_kind = getattr(transformers, f"{kind}{head}")
    return Output(of_kind(of_kind.config_class(**sizes, **more)))


class OnShared(nn.Module):
    """A model of transformers with ring attention on a mesh with cp, and its own elsewhere."""

    def __init__(self, kind, more, attention):
        super().__init__()
        from ignite_ddl.context.huggingface import register_attention

        self.model, self.attention = hugging_face(kind, "ForCausalLM", **more).model, attention
        register_attention()

    def forward(self, batch):
        self.model.set_attn_implementation(self.attention if ddl.get_mesh().cp_size > 1 else "sdpa")
        return self.model(**batch, use_cache=False).logits


class Block(nn.Module):
    """A block of Hugging Face, and what its model computes for all of them."""

    def __init__(self, layer, rotary=None):
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x):
        if self.rotary is None:
            return self.layer(x)
        places = torch.arange(x.shape[1], device=x.device)[None]
        return self.layer(x, position_embeddings=self.rotary(x, position_ids=places), position_ids=places)


class Embedded(nn.Module):
    """What GPT-2 does before its blocks."""

    def __init__(self, gpt):
        super().__init__()
        self.wte, self.wpe, self.drop = gpt.wte, gpt.wpe, gpt.drop

    def forward(self, ids):
        return self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))


def layers_of_llama(model):
    inner = model.model.model
    blocks = [Block(layer, inner.rotary_emb) for layer in inner.layers]
    return nn.Sequential(inner.embed_tokens, *blocks, inner.norm, model.model.lm_head)


def layers_of_gpt2(model):
    inner = model.model.transformer
    return nn.Sequential(Embedded(inner), *map(Block, inner.h), inner.ln_f, model.model.lm_head)


def layers_of_bert(model):
    bert, head = model.model.bert, (model.model.dropout, model.model.classifier)
    return nn.Sequential(bert.embeddings, *map(Block, bert.encoder.layer), bert.pooler, *head)


def next_word(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


# ------------------------------------------------------------------------------------------------- plans


def columns_and_rows(columns, rows, more=None):
    """A plan: Column for the first names, Row for the second, in each block."""

    def plan(prefix):
        styles = dict.fromkeys(columns, ddl.Column()) | dict.fromkeys(rows, ddl.Row()) | (more or {})
        return {prefix + name: style for name, style in styles.items()}

    return plan


WHOLE_OUTPUT, WHOLE_INPUT = (ddl.Column(output_layouts=Replicate()), ddl.Row(input_layouts=Replicate()))
LLAMA = ["self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"], ["self_attn.o_proj", "mlp.down_proj"]
NORMS = {"self_attn.[qk]_norm": ddl.SharedWeight()}
GPT2 = ["mlp.c_fc"], ["mlp.c_proj"], {"attn.c_attn": WHOLE_OUTPUT, "attn.c_proj": WHOLE_INPUT}
BERT = ["attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"]
PHI3 = {
    "self_attn.qkv_proj": WHOLE_OUTPUT,
    "self_attn.o_proj": WHOLE_INPUT,
    "mlp.gate_up_proj": ddl.Column(parts=2),
    "mlp.down_proj": ddl.Row(),
}


def convolutions(prefix):
    return {f"{prefix}.conv[12]": ddl.InputChannels(whole_input=True)}


def pairs_of_convolutions(prefix):
    return {f"{prefix}.*.conv1": ddl.OutputChannels(), f"{prefix}.*.conv2": ddl.InputChannels()}


GEMMA = {"head_dim": 8, "pad_token_id": 0, **FEW_KEYS}
NO_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # else beyond so few words
PHI = ["self_attn.[qkv]_proj", "mlp.fc1"], ["self_attn.dense", "mlp.fc2"]
NEOX = ["mlp.dense_h_to_4h"], ["attention.dense", "mlp.dense_4h_to_h"]
NEOX_FUSED = {"attention.query_key_value": ddl.Column(units=HEADS)}
BLOOM = ["mlp.dense_h_to_4h"], ["mlp.dense_4h_to_h"]
BLOOM_FUSED = {"self_attention.query_key_value": WHOLE_OUTPUT, "self_attention.dense": WHOLE_INPUT}
DISTILBERT = ["attention.[qkv]_lin", "ffn.lin1"], ["attention.out_lin", "ffn.lin2"]
VIT = ["attention.[qkv]_proj", "mlp.fc1"], ["attention.o_proj", "mlp.fc2"]
OUT_OF_BERT = ["attention.output.dense", "output.dense"]
SENTENCES, OF_BERT = "ForSequenceClassification", {"intermediate_size": 64, "num_labels": 10}
FURTHER = {  # the model, its head, its sizes, the plan, the prefix
    "Gemma": ("Gemma", "ForCausalLM", GEMMA, (*LLAMA,), "model.model.layers.*."),
    "Gemma 2": ("Gemma2", "ForCausalLM", GEMMA, (*LLAMA,), "model.model.layers.*."),
    "Gemma 3": ("Gemma3", "ForCausalLM", GEMMA, (*LLAMA, NORMS), "model.model.layers.*."),
    "Phi": ("Phi", "ForCausalLM", {"intermediate_size": 64, **NO_ENDS}, PHI, "model.model.layers.*."),
    "GPT-NeoX": ("GPTNeoX", "ForCausalLM", {"intermediate_size": 64, **NO_ENDS}, (*NEOX, NEOX_FUSED),
                 "model.gpt_neox.layers.*."),
    "Bloom": ("Bloom", "ForCausalLM", NO_ENDS, (*BLOOM, BLOOM_FUSED), "model.transformer.h.*."),
    "BERT": ("Bert", SENTENCES, OF_BERT, (BERT, OUT_OF_BERT), "model.bert.encoder.layer.*."),
    "RoBERTa": ("Roberta", SENTENCES, {**OF_BERT, **NO_ENDS}, (BERT, OUT_OF_BERT), "model.roberta.encoder.layer.*."),
    "DistilBERT": ("DistilBert", SENTENCES, {"hidden_dim": 64, "num_labels": 10}, DISTILBERT,
                   "model.distilbert.transformer.layer.*."),
    "ELECTRA": ("Electra", SENTENCES, {**OF_BERT, "embedding_size": WIDTH}, (BERT, OUT_OF_BERT),
                "model.electra.encoder.layer.*."),
    "ViT": ("ViT", "ForImageClassification", {**OF_BERT, "image_size": SIDE, "patch_size": SIDE // 4}, VIT,
            "model.vit.layers.*."),
}  # fmt: skip
TWO_MESHES = "dp2, shard", "tp2"


class Called(Output):
    """As its base, by the names of a model's arguments."""

    def forward(self, x):
        return self.model(**x).logits


def pit():
    from timm.models.pit import PoolingVisionTransformer

    return PoolingVisionTransformer(SIDE, 8, 4, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(2, 2, 2), mlp_ratio=2,
                                    num_classes=10)  # fmt: skip


def t5():
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0}
    return Called(hugging_face("T5", "ForConditionalGeneration", **sizes).model)


def traced(make, x, before):
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    return ddl.trace_layers(make(), x, before)


def through_traces() -> dict[str, Case]:
    """Models that are cut by ddl.trace_layers."""
    torch.manual_seed(0)
    ids, labels = torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(10, (ROWS,))
    images, following = torch.randn(ROWS, 3, SIDE, SIDE), torch.randint(WORDS, (ROWS, LENGTH))
    mamba = partial(hugging_face, "Mamba", "ForCausalLM", state_size=8, **NO_ENDS)
    lines = {
        "transformers Mamba": (mamba, ids, following, ["model.backbone.layers.1"]),
        "transformers T5": (t5, {"input_ids": ids, "decoder_input_ids": ids.flip(0)}, following,
                            ["model.decoder.block.0"]),
        "timm PiT": (pit, images, labels, ["transformers.1"]),
    }  # fmt: skip
    found = {}
    for name, (make, x, y, before) in lines.items():
        loss_fn = F.cross_entropy if y is labels else next_word
        two = {key: value[:2] for key, value in x.items()} if isinstance(x, dict) else x[:2]
        found[name] = Case(partial(traced, make, two, before), columns_and_rows([], []), "", (x, y), loss_fn)
    return found


def further(wanted: Callable[[str], bool]) -> tuple[list[str], int]:
    """The rows of further models of transformers, and how many are wrong."""
    torch.manual_seed(0)
    words, labels = torch.randint(1, WORDS, (ROWS, LENGTH)), torch.randint(10, (ROWS,))
    images, following = torch.randn(ROWS, 3, SIDE, SIDE), torch.randint(WORDS, (ROWS, LENGTH))
    rows, wrong = [], 0
    for name, (kind, head, sizes, styles, prefix) in FURTHER.items():
        y, loss_fn = (following, next_word) if head == "ForCausalLM" else (labels, F.cross_entropy)
        batch, plan = (images if kind == "ViT" else words, y), columns_and_rows(*styles)
        case = Case(partial(hugging_face, kind, head, **sizes), plan, prefix, batch, loss_fn)
        cells = []
        for mesh in TWO_MESHES:
            if not wanted(f"further {name} {mesh}"):
                continue
            print(f"{name:34}{mesh:24}", end="", flush=True)
            text, right, dead = said(case.make, plan(prefix) if mesh == "tp2" else None, case, **MESHES[mesh])
            wrong += not right or text.startswith("refused")
            cells.append(text + " *" * bool(dead))
        rows.append(f"| transformers {name} | " + " | ".join(cells) + " | |")
    for name, case in through_traces().items():
        if wanted(f"further {name} pp2"):
            print(f"{name:34}{'pp2':24}", end="", flush=True)
            text, right, dead = said(case.make, None, case, pp=2)
            wrong += not right or text.startswith("refused")
            rows.append(f"| {name} | | | {text + ' *' * bool(dead)} |")
    return rows, wrong


def cases():
    torch.manual_seed(0)
    ids, images = torch.randint(WORDS, (ROWS, LENGTH)), torch.randn(ROWS, 3, SIDE, SIDE)
    vectors, labels = torch.randn(ROWS, LENGTH, WIDTH), torch.randint(10, (ROWS,))
    words = ids, torch.randint(WORDS, (ROWS, LENGTH)), next_word
    ids_and_labels, pictures = (ids, labels, F.cross_entropy), (images, labels, F.cross_entropy)
    masks = images, torch.randint(3, (ROWS, SIDE, SIDE)), F.cross_entropy
    regression = vectors, vectors.flip(0), F.mse_loss
    no_ends = {"bos_token_id": 0, "eos_token_id": 0}  # else beyond so few words
    few_keys = {"intermediate_size": 64, "num_key_value_heads": 2}
    lines = {
        "torchvision ResNet-18, GroupNorm": (resnet, convolutions, "layer*.*", pictures, layers_of_resnet, "layer*.*"),
        "a U-Net": (UNet, pairs_of_convolutions, "*", masks),
        "torchvision ViT": (vit, columns_and_rows(["mlp.0"], ["mlp.3"]), "encoder.layers.*.", pictures, layers_of_vit),
        "nn.TransformerEncoder": (encoder, columns_and_rows(["linear1"], ["linear2"]), "layers.*.", regression,
                                  layers_of_encoder),
        "transformers Llama": (partial(hugging_face, "Llama", "ForCausalLM", **few_keys), columns_and_rows(*LLAMA),
                               "model.model.layers.*.", words, layers_of_llama, "*.layer."),
        "transformers Qwen3": (partial(hugging_face, "Qwen3", "ForCausalLM", head_dim=8, **few_keys),
                               columns_and_rows(*LLAMA, NORMS), "model.model.layers.*.", words, layers_of_llama,
                               "*.layer."),
        "transformers Phi-3": (partial(hugging_face, "Phi3", "ForCausalLM", pad_token_id=0, **no_ends, **few_keys),
                               columns_and_rows([], [], PHI3), "model.model.layers.*.", words, layers_of_llama,
                               "*.layer."),
        "transformers GPT-2": (partial(hugging_face, "GPT2", "LMHeadModel", **no_ends), columns_and_rows(*GPT2),
                               "model.transformer.h.*.", words, layers_of_gpt2, "*.layer."),
        "transformers BERT": (partial(hugging_face, "Bert", "ForSequenceClassification", intermediate_size=64,
                                      num_labels=10),
                              columns_and_rows(BERT, ["attention.output.dense", "output.dense"]),
                              "model.bert.encoder.layer.*.", ids_and_labels, layers_of_bert, "*.layer."),
    }  # fmt: skip
    found = {}
    for name, (make, plan, prefix, (x, y, loss_fn), *layers) in lines.items():
        found[name] = Case(make, plan, prefix, (x, y), loss_fn, *layers)
    return found


def refused_plans():
    """What a user may well try: the model, the mesh, the plan in words, and the plan."""
    llama, gpt2 = "model.model.layers.*.", "model.transformer.h.*."
    qwen = columns_and_rows(*LLAMA)(llama)
    fused = {"self_attn.qkv_proj": ddl.Column(parts=(32, 16, 16)), "self_attn.o_proj": ddl.Row()}
    return [
        ("transformers Llama", {"tp": 4}, "tp4, of 2 heads of keys", columns_and_rows(*LLAMA)(llama)),
        ("transformers Qwen3", {"tp": 2}, "no `SharedWeight` for the norms of heads", qwen),
        ("transformers GPT-2", {"tp": 2}, "`attn.c_attn: Column(parts=3)`",
         {gpt2 + "attn.c_attn": ddl.Column(parts=3), gpt2 + "attn.c_proj": ddl.Row()}),
        ("transformers GPT-2", {"tp": 2}, "`attn.c_attn: Column()`",
         {gpt2 + "attn.c_attn": ddl.Column(), gpt2 + "attn.c_proj": ddl.Row()}),
        ("transformers Phi-3", {"tp": 2}, "`qkv_proj: Column(parts=(32, 16, 16))`",
         {llama + name: style for name, style in fused.items()}),
        ("transformers Phi-3", {"tp": 2}, "`gate_up_proj: Column()`",
         columns_and_rows(["mlp.gate_up_proj"], ["mlp.down_proj"])(llama)),
        ("torchvision ResNet-18, GroupNorm", {"tp": 2}, "`conv1: OutputChannels()` before a GroupNorm",
         {"layer1.*.conv1": ddl.OutputChannels(), "layer1.*.conv2": ddl.InputChannels()}),
        ("a U-Net", {"pp": 2}, "under pp; so is each model here, as it comes", None),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- the page


def layers_of(case):
    """The nn.Sequential of a model's own blocks."""
    return case.layers(case.make())


def check_layers(case):
    """It computes what the model does."""
    torch.manual_seed(0)
    model = case.make().eval()
    with torch.no_grad():
        torch.testing.assert_close(case.layers(model).eval()(case.batch[0]), model(case.batch[0]))


def said(make, plan, case, **mesh):
    """What check_parity says: the error, or the sentence of refusal; and whether that is as it should be."""
    begin = time.perf_counter()
    try:
        report = ddl.check_parity(make, plan, case.batch, case.loss_fn, **mesh)
        text, right = f"{report.worst.error:.0e}" if report.equal else str(report), report.equal
        dead = report.dead
    except ValueError as error:
        text, right, dead = f"refused: {error}", True, []
    except ddl.RankError as error:
        text, right, dead = f"FAILED: {error.summary}", False, []
    print(f"{text} ({time.perf_counter() - begin:.0f} s)", flush=True)
    return text, right, dead


def shared(wanted: Callable[[str], bool]) -> tuple[list[str], int]:
    """The rows of models whose sequences or experts ranks share, and how many are wrong."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (ROWS, 17))
    places = torch.arange(16).expand(ROWS, -1).contiguous()
    pieces = torch.tensor([[*range(5), *range(8), *range(3)], [*range(16)]] * (ROWS // 2))
    rows, wrong = [], 0
    for name, (kind, more, meshes) in SHARED.items():
        packed = "packed" in name
        x = {"input_ids": ids[:, :-1].contiguous(), "position_ids": pieces if packed else places}
        make = partial(OnShared, kind, more, "ddl_ring_packed" if packed else "ddl_ring")
        for sizes in meshes:
            how = " × ".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1 and axis != "shard")
            mesh = how + ", shard" * ("shard" in sizes)
            if not wanted(f"shared {name} {mesh}"):
                continue
            print(f"{name:46}{mesh:24}", end="", flush=True)
            plan = {"model.model.layers.*.mlp.experts": ddl.Experts()} if "ep" in sizes else None
            if "tp" in sizes:
                plan = columns_and_rows(*LLAMA)("model.model.layers.*.")
            case = Case(make, columns_and_rows([], []), "", (x, ids[:, 1:].contiguous()), next_word)
            text, right, _ = said(make, plan, case, **sizes)
            wrong += not right or text.startswith("refused")
            rows.append(f"| {name} | {mesh} | {text} |")
    return rows, wrong


def main(words: list[str]) -> int:
    models, rows, notes, wrong = cases(), [], {}, 0

    def wanted(line: str) -> bool:
        return all(word.lower() in line.lower() for word in words)

    if words in (["shared"], ["further"]):  # that section of the page alone
        written, wrong = shared(wanted) if words == ["shared"] else further(wanted)
        first, _, others = PAGE.read_text().partition("\n" + SECTION)
        on_shared, _, of_further = others.partition("\n" + FURTHER_MODELS)
        on_shared, of_further = SECTION + on_shared, FURTHER_MODELS + of_further
        if words == ["shared"]:
            on_shared = section(written)
        else:
            of_further = section_of_further(written)
        PAGE.write_text("\n".join([first, on_shared, of_further]))
        return int(wrong > 0)

    for name, case in models.items():
        if case.layers and wanted(name):
            check_layers(case)
        cells = []
        for mesh, sizes in MESHES.items():
            if not wanted(f"{name} {mesh}"):
                continue
            print(f"{name:34}{mesh:24}", end="", flush=True)
            layers = sizes.get("pp") and case.layers
            plan = case.plan(case.prefix_of_layers if layers else case.prefix) if sizes.get("tp") else None
            text, right, dead = said(partial(layers_of, case) if layers else case.make, plan, case, **sizes)
            uncut = bool(sizes.get("pp")) and not case.layers  # as the U-Net, whose refusal stands below
            wrong += not right or text.startswith("refused") != uncut
            cells.append("refused" if text.startswith("refused") else text)
            if dead:
                notes[name] = dead
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    sentences = []
    for name, sizes, what, plan in refused_plans():
        if not wanted(f"{name} refused {what}"):
            continue
        print(f"{name:34}{what:44}", end="", flush=True)
        text, right, _ = said(models[name].make, plan, models[name], **sizes)
        wrong += not (right and text.startswith("refused"))
        sentences.append(f"| {name} | {what} | {text.removeprefix('refused: ')} |")
    (on_shared, failed), (of_further, failed_too) = shared(wanted), further(wanted)
    wrong += failed + failed_too
    if not words:
        PAGE.write_text("\n".join([page(rows, sentences, notes), section(on_shared), section_of_further(of_further)]))
    return int(wrong > 0)


def page(rows: list[str], sentences: list[str], notes: dict[str, list[str]]) -> str:
    dead = "; ".join(f"{name}: {', '.join(f'`{weight}`' for weight in weights)}" for name, weights in notes.items())
    return f"""# Models that others wrote, on each mesh

Written by `python tools/parity_zoo.py` on {datetime.date.today()}: {os.cpu_count()}-core CPU, gloo, torch \
{torch.__version__.partition("+")[0]}, {versions()}.

Each number is the worst of `ddl.check_parity`: three steps of SGD in float64 beside one process, with an uneven \
second batch; of every loss, gradient and weight the largest difference, relative to the largest of its kind. Models \
are as their libraries make them, small ({ROWS} rows, 2 blocks of width {WIDTH}, {HEADS} heads, images of {SIDE} × \
{SIDE}). Under pp it is an `nn.Sequential` of the model's own blocks, whose output equals the model's; as it comes, \
each is refused there (below), and so is the U-Net, whose connections skip stages: `ddl.trace_layers` cuts such
models (tests/package/test_trace.py, tests/test_huggingface.py).

| model | {" | ".join(MESHES)} |
|---|{"---|" * len(MESHES)}
{chr(10).join(rows)}

Weights whose gradients are zero in one process, too, so that equality says nothing about them: {dead or "none"}.

The tensor plans, by block: Llama and Qwen3 `Column` for q, k, v, gate and up, `Row` for o and down, Qwen3's norms of \
heads `SharedWeight`; BERT the same with its names; Phi-3 `Column(parts=2)` for `gate_up_proj`, and `qkv_proj`, which \
it takes apart by whole sizes, `Column(output_layouts=Replicate())` before `Row(input_layouts=Replicate())`; GPT-2 so, \
too, for `c_attn` and `c_proj`, and its MLP `Column` and `Row`; ViT and nn.TransformerEncoder their MLPs (torch's \
`nn.MultiheadAttention` keeps q, k and v in one bare weight, which no style cuts); ResNet-18 `InputChannels(\
whole_input=True)`; U-Net `OutputChannels` and `InputChannels` in turn.

## What is refused

| model | plan or mesh | what `ddl.check_parity` and the trainer say |
|---|---|---|
{chr(10).join(sentences)}
"""


SECTION = "## Sequences and experts that ranks share\n"


def section(rows: list[str]) -> str:
    return f"""{SECTION}
Written by `python tools/parity_zoo.py shared` on {datetime.date.today()}: {os.cpu_count()}-core CPU, gloo, torch \
{torch.__version__.partition("+")[0]}, {versions()}. The same comparison, of the same size of models: under cp with \
`ddl_ring` as the attention (`ignite_ddl.context.huggingface.register_attention`) beside torch's in one process, under \
ep with `ddl.Experts()` for `layers.*.mlp.experts`, by a loop of experts, since torch's `grouped_mm` has no float64.

| model | mesh | worst |
|---|---|---|
{chr(10).join(rows)}
"""


FURTHER_MODELS = "## Further models\n"


def section_of_further(rows: list[str]) -> str:
    import timm

    return f"""{FURTHER_MODELS}
Written by `python tools/parity_zoo.py further` on {datetime.date.today()}: {os.cpu_count()}-core CPU, gloo, torch \
{torch.__version__.partition("+")[0]}, {versions()}, timm {timm.__version__}. The same comparison, of the same size of \
models, on two meshes; those on pp2 by `ddl.trace_layers`. A star: with a weight whose gradient is zero in one \
process, too, such as the bias of keys. Plans as above; GPT-NeoX `Column(units=<heads>)` for `query_key_value`; \
Bloom, which takes it apart by the number of all heads, `Column(output_layouts=Replicate())` before \
`Row(input_layouts=Replicate())`.

| model | {" | ".join(TWO_MESHES)} | pp2 |
|---|---|---|---|
{chr(10).join(rows)}
"""


def versions() -> str:
    import transformers

    return f"torchvision {import_torchvision().__version__.partition('+')[0]}, transformers {transformers.__version__}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
