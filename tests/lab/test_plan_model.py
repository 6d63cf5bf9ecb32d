"""Models as numbers: parameters of transformers' own, operations by torch's counter, activations by autograd."""

import importlib.util

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ignite_ddl.course import GPT, import_torchvision
from ignite_ddl.lab import cost
from ignite_ddl.lab.model import Model

transformers_only = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: bash tests/extra_huggingface.sh"
)
LLAMA = {"tie_word_embeddings": False, "num_key_value_heads": 8}
PUBLISHED = {  # as in each model's config.json
    "Llama 3.1 8B": ("LlamaConfig", 4096, 32, 32, 14336, 128256, LLAMA),
    "Llama 3.1 70B": ("LlamaConfig", 8192, 80, 64, 28672, 128256, LLAMA),
    "Qwen2.5 7B": ("Qwen2Config", 3584, 28, 28, 18944, 152064, LLAMA | {"num_key_value_heads": 4}),
    "Qwen3 8B": ("Qwen3Config", 4096, 36, 32, 12288, 151936, LLAMA | {"head_dim": 128}),
    "Mistral 7B": ("MistralConfig", 4096, 32, 32, 14336, 32000, LLAMA),
    "Mixtral 8x7B": (
        "MixtralConfig", 4096, 32, 32, 14336, 32000, LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Qwen3 30B-A3B": (
        "Qwen3MoeConfig", 2048, 48, 32, 6144, 151936,
        LLAMA | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                 "moe_intermediate_size": 768},
    ),
    "Gemma 7B": (
        "GemmaConfig", 3072, 28, 16, 24576, 256000,
        {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    ),
    "Gemma 2 9B": (
        "Gemma2Config", 3584, 42, 16, 14336, 256000,
        {"num_key_value_heads": 8, "head_dim": 256, "tie_word_embeddings": True},
    ),
}  # fmt: skip
TINY = {
    "GPT2Config": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 96},
    **dict.fromkeys(
        ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "GemmaConfig"),
        {"head_dim": 24, "intermediate_size": 112},
    ),
    "MixtralConfig": {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeConfig": {
        "num_key_value_heads": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip


def made(kind, **how):
    import_torchvision()
    import transformers

    return transformers, getattr(transformers, kind)(**how)


@transformers_only
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_transformers(name):
    kind, width, layers, heads, mlp, vocabulary, more = PUBLISHED[name]
    transformers, config = made(
        kind, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=mlp,
        vocab_size=vocabulary, **more,
    )  # fmt: skip
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    model = Model.of(config, sequence=4096)
    assert model.parameters == pytest.approx(module.num_parameters(), rel=1e-3)
    assert Model.of(module, sequence=4096).parameters == model.parameters
    assert model.weight_bytes == 2
    assert Model.of(module, sequence=4096).weight_bytes == 4


@transformers_only
@pytest.mark.parametrize("kind", TINY)
def test_operations_are_those_that_torch_counts(kind):
    how = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    how |= {} if kind.startswith(("GPT2", "Qwen2Moe")) else {"num_key_value_heads": 2}
    transformers, config = made(kind, **TINY[kind] if kind == "GPT2Config" else how | TINY[kind])
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("eager")
    model = Model.of(module, sequence=16)
    ids = torch.randint(96, (3, 16))
    with FlopCounterMode(display=False) as counter:
        module(ids, labels=ids).loss.backward()
    # transformers' rotary tables are products of positions and frequencies: 2 a token and frequency, forward alone.
    assert counter.get_total_flops() == pytest.approx(model.flops(3), rel=2e-3)


def test_of_a_gpt_all_is_narayanan_s_and_korthikanti_s():
    model = Model(4, 128, 4, 512, 64)
    assert model.parameters == model.active_parameters == cost.transformer_parameters(128, 4, 512, 64)
    assert model.flops(3) == cost.transformer_flops(3, 64, 128, 4, 512)
    for tp in (1, 2, 4):
        for recompute in ("none", "selective", "full"):
            theirs = cost.activation_bytes(3, 64, 128, 4, tp, True, recompute)
            assert model.activation_bytes(3, tp, recompute=recompute) == pytest.approx(theirs)


def test_experts_count_as_parameters_but_work_only_if_chosen():
    dense = Model(4, 128, 4, 512, 64, gated=True, bias=False, positions=0)
    mixed = Model(
        4, 128, 4, 512, 64, gated=True, bias=False, positions=0, experts=8, chosen=2, expert_width=256, expert_layers=2
    )
    assert mixed.parameters - dense.parameters == 2 * (8 * 3 * 128 * 256 + 8 * 128 - 3 * 128 * 512)
    assert mixed.parameters - mixed.active_parameters == 2 * 6 * 3 * 128 * 256
    assert mixed.flops(1) - dense.flops(1) == 6 * 64 * 2 * 8 * 128  # two of half the width: the router alone is more
    assert mixed.parameters_on(1, 1, 4) - mixed.parameters_on(1, 1, 4, ep=4) == 2 * 6 * 3 * 128 * 256


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Model(2, 32, 4, 9, 9, kv_heads=3), "kv_heads should divide heads=4, but given 3"),
        (lambda: Model(2, 32, 4, 9, 9, experts=4), "chosen should be from 1 to experts=4, but given 0"),
        (lambda: Model(2, 32, 4, 9, 9, experts=4, chosen=5), "chosen should be from 1 to experts=4, but given 5"),
        (lambda: Model(2, 32, 4, 9, 9, expert_layers=3), "expert_layers should be at most layers=2, but given 3"),
        (lambda: Model(2, 32, 4, 9, 9, kernels="slow"), "kernels should be one of fused, eager, compiled"),
        (lambda: Model.of(3, 9), "module should be a module, or a config of transformers, but given 3"),
        (lambda: Model.of(type("C", (), {"model_type": "t5"})(), 9), "should be of a known model type, gpt2 or llama"),
    ],
)
def test_bad_input_says_which(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_ours_are_read_as_before():
    with torch.device("meta"):
        module = GPT(512, length=64, width=128, n_heads=4, n_blocks=4)
    assert Model.of(module, 64) == Model(4, 128, 4, 512, 64, True, True, 4, 4, 8, 4, 0)


def test_bytes_are_those_of_all_weights_and_of_those_that_are_trained():
    module = GPT(80, length=16, width=64, n_heads=4, n_blocks=4, tied=False).bfloat16()
    module.embed.float()
    n = sum(p.numel() for p in module.parameters())
    for p in module.parameters():
        p.requires_grad_(p.dtype == torch.float32)
    model, trained = Model.of(module, 16), sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert 0 < trained < n / 10
    assert model.weight_bytes * n == pytest.approx(2 * n + 2 * trained)
    assert (model.gradient_bytes * n, model.optimizer_bytes * n) == pytest.approx((4 * trained, 8 * trained))
    assert model.value_bytes == 2
