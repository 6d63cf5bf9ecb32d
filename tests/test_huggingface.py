"""transformers' Llama, not a line of it changed: the example's losses on meshes, and files that transformers writes.

It runs where transformers is installed: tests/extra_huggingface.sh, part of `make test-all`.
"""

import functools
import importlib.util
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Events
from torch.utils.data import TensorDataset

import ignite_ddl as ddl
from ignite_ddl.context.huggingface import register_attention
from ignite_ddl.course import import_torchvision

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: bash tests/extra_huggingface.sh"
)
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_llama.py"


def lines_of(*arguments):
    command = [sys.executable, EXAMPLE, "--steps", "4", "--every", "1", "--batch-size", "8", *map(str, arguments)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    return [float(bits) for bits in re.findall(r"step \d+: ([\d.]+) bits", printed)]


def test_the_example_gives_the_losses_of_one_process(tmp_path):
    alone = lines_of("--save", tmp_path)
    assert len(alone) == 4
    assert alone[0] > alone[-1]
    for mesh in (["--ranks", 4, "--dp", 2, "--tp", 2, "--shard"], ["--ranks", 2]):
        assert lines_of(*mesh) == pytest.approx(alone, abs=5e-5)
    on = lines_of("--load", tmp_path)
    assert on[0] < alone[0]
    assert lines_of("--load", tmp_path, "--ranks", 2, "--tp", 2) == pytest.approx(on, abs=5e-5)


def new_llama(tied):
    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False,
        )
    )  # fmt: skip


def loaded(local_rank, folder, tied, options):
    """Losses of three steps of a model whose weights come from the folder."""
    logging.disable(logging.INFO)
    with ddl.empty_weights():
        model = new_llama(tied)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = ddl.auto_model(model.double(), **options)
    ddl.import_weights(model, folder)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    trainer = ddl.create_supervised_trainer(
        model,
        optimizer,
        lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
        model_transform=lambda output: output.logits,
    )
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    ids = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    trainer.run(ddl.auto_dataloader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=8), max_epochs=3)
    return losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {}),
        ({"dp": 2}, {"shard": True}),
        ({"tp": 2}, {"tensor_plan": "auto"}),
        ({"dp": 2, "tp": 2}, {"tensor_plan": "auto", "shard": True}),
    ],
    ids=["dp2", "dp2 shard", "tp2", "dp2 x tp2 shard"],
)
def test_files_of_transformers_go_straight_onto_a_mesh(tmp_path, axes, options, tied):
    torch.manual_seed(0)
    model = new_llama(tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    alone = loaded(0, tmp_path, tied, {})
    n = axes.get("dp", 1) * axes.get("tp", 1)
    with ddl.Parallel("gloo", nproc_per_node=n, threads_per_rank=1, timeout=100, **axes) as parallel:
        for losses in parallel.run(loaded, tmp_path, tied, options):
            assert losses == pytest.approx(alone, abs=1e-12)


def generated(local_rank, options):
    """Ten tokens of transformers' own generate, with its cache, in two ways; and those of a pipeline's loop."""
    torch.manual_seed(0)
    model, ids = new_llama(True).double().eval(), torch.tensor([[1, 2, 3], [5, 4, 3]])
    model = ddl.auto_model(model, **options)
    model = getattr(model, "module", model)  # of DDP
    torch.manual_seed(1)
    greedy = model.generate(ids, max_new_tokens=10, do_sample=False, use_cache=True, pad_token_id=0)
    drawn = model.generate(ids, max_new_tokens=10, do_sample=True, pad_token_id=0)
    return greedy.tolist(), drawn.tolist()


@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2}, {}), ({"dp": 2}, {"shard": True}), ({"tp": 2}, {"tensor_plan": "auto"})],
    ids=["dp2", "dp2 shard", "tp2"],
)
def test_generate_of_transformers_gives_the_tokens_of_one_process(axes, options):
    alone = generated(0, {})
    with ddl.Parallel("gloo", nproc_per_node=2, threads_per_rank=1, timeout=100, **axes) as parallel:
        assert parallel.run(generated, options) == [alone, alone]


def causal(kind, **options):
    """A small model of a family, its weights random."""
    import_torchvision()
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def cross_entropy(output, y):
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten())


IDS = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(1))
BATCH = IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous()


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp2", "dp2 x tp2"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Phi", "Phi3"])
def test_a_model_of_transformers_has_the_numbers_of_one_process_under_its_plan(kind, axes):
    options = {"num_key_value_heads": 4 if kind == "Phi3" else 2, "head_dim": 8}
    report = ddl.check_parity(functools.partial(causal, kind, **options), "auto", BATCH, cross_entropy, **axes)
    assert report.equal, report
    assert report.worst.error < 1e-12


def causal_layers(kind, **options):
    return ddl.trace_layers(causal(kind, **options), BATCH[0][:2], "auto")


def logits_to_targets(output, y):
    return F.cross_entropy(output["logits"].flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    ("kind", "axes"), [("Llama", {"pp": 2}), ("Qwen3", {"dp": 2, "pp": 2}), ("Mistral", {"pp": 4})], ids=str
)
def test_a_model_of_transformers_is_cut_by_its_own_plan(kind, axes):
    make = functools.partial(causal_layers, kind, num_key_value_heads=2, head_dim=8)
    assert len(make()) == 5, "the embedding, two blocks, the norm, the head"
    report = ddl.check_parity(make, None, BATCH, logits_to_targets, n_microbatches=axes["pp"], **axes)
    assert report.equal, report
    assert report.worst.error < 1e-12


def test_a_model_without_a_plan_for_stages_is_refused():
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match='before="auto" takes .* but GPT2LMHeadModel has none'):
        ddl.trace_layers(model, BATCH[0][:2], "auto")


def test_a_plan_of_experts_is_refused_by_name():
    model = causal("Mixtral", num_local_experts=2)
    with pytest.raises(ValueError, match="the plan of MixtralForCausalLM has .*'moe_tp_experts' for 'model.layers"):
        ddl.check_model(model, "auto", tp=2)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(**x, use_cache=False).logits


def traced(local_rank, n_ranks):
    """Losses of three steps of transformers' T5 in a pipeline: an encoder and a decoder with one embedding."""
    import_torchvision()
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    model = Logits(T5ForConditionalGeneration(config).double())
    ids = torch.randint(1, 50, (10, 9), generator=torch.Generator().manual_seed(1))
    x = {"input_ids": ids[:, :8], "attention_mask": (ids[:, :8] > 5).long(), "decoder_input_ids": ids[:, :8]}
    if n_ranks > 1:
        first = {name: tensor[:2] for name, tensor in x.items()}
        before = ["model.encoder.block.1", "model.decoder.block.0", "model.decoder.block.1"]
        model = ddl.trace_layers(model, first, before)
    pipeline = ddl.auto_model(model, schedule="interleaved_1f1b", n_microbatches=4)
    optimizer = ddl.auto_optim(torch.optim.SGD(pipeline.parameters(), lr=0.1))
    losses, engine = [], ddl.MeshEngine(lambda engine, batch: None)
    for rows in (slice(8), slice(8), slice(8, 10)):
        optimizer.zero_grad()
        part = {name: tensor[rows] for name, tensor in x.items()}
        _, loss = ddl.forward_backward(
            engine, pipeline, part, ids[rows, 1:], lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
        )
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_t5_is_traced_and_trained_in_a_pipeline():
    alone = traced(0, 1)
    with ddl.Parallel("gloo", nproc_per_node=2, pp=2, threads_per_rank=1, timeout=200) as parallel:
        for losses in parallel.run(traced, 2):
            assert losses == pytest.approx(alone, abs=1e-12)


# ----------------------------------------------------------------------------------------------- context parallel


class OnCp(torch.nn.Module):
    """A model of transformers: ring attention where the sequence is shared, its own where it is not."""

    def __init__(self, kind, attention, **options):
        super().__init__()
        import_torchvision()
        register_attention()
        self.model = causal(kind, **options)
        self.attention = attention

    def forward(self, x):
        alone = ddl.get_mesh().world_size == 1
        self.model.set_attn_implementation("sdpa" if alone else self.attention)
        return self.model(**x, use_cache=False).logits


LONG = torch.randint(64, (6, 17), generator=torch.Generator().manual_seed(1))
PLACES = torch.arange(16).expand(6, -1).contiguous()
PIECES = torch.tensor([[*range(5), *range(8), *range(3)], [*range(16)]] * 3)


def on_tokens(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def targets(**x):
    return {"input_ids": LONG[:, :-1].contiguous(), **x}, LONG[:, 1:].contiguous()


@pytest.mark.parametrize(
    ("kind", "attention", "places", "options", "axes"),
    [
        ("Llama", "ddl_ring", PLACES, {"num_key_value_heads": 2}, {"cp": 2}),
        ("Llama", "ddl_ring_packed", PIECES, {"num_key_value_heads": 2}, {"cp": 2}),
        ("Llama", "ddl_ring_packed", PIECES, {"num_key_value_heads": 2}, {"cp": 2, "dp": 2, "shard": True}),
        ("Mistral", "ddl_ring", PLACES, {"num_key_value_heads": 2, "sliding_window": 5}, {"cp": 2}),
        ("Qwen3", "ddl_ring", PLACES, {"num_key_value_heads": 2, "head_dim": 8}, {"cp": 4}),
    ],
    ids=["Llama", "Llama packed", "Llama packed dp2 shard", "Mistral window", "Qwen3 cp4"],
)
def test_a_model_of_transformers_has_the_numbers_of_one_process_on_cp(kind, attention, places, options, axes):
    make = functools.partial(OnCp, kind, attention, **options)
    report = ddl.check_parity(make, None, targets(position_ids=places), on_tokens, steps=5, **axes)
    assert report.equal, report
    assert report.worst.error < 1e-12


def test_labels_that_were_shifted_before_the_cut_may_be_in_the_batch():
    make = functools.partial(OnCp, "Llama", "ddl_ring", num_key_value_heads=2)
    x, y = targets(position_ids=PLACES)
    report = ddl.check_parity(make, None, (x | {"shift_labels": y}, y), on_tokens, cp=2)
    assert report.equal, report


@pytest.mark.parametrize(
    ("attention", "x", "words"),
    [
        ("ddl_ring", {}, "position_ids should be the tokens' places"),
        ("ddl_ring_packed", {}, "gives other outputs for a cp rank's tokens"),
        ("ddl_ring", {"position_ids": PIECES}, "position_ids should be the tokens' places"),
        ("ddl_ring", {"position_ids": PLACES, "attention_mask": (PLACES < 13).long()}, "does not carry padding"),
        ("sdpa", {"position_ids": PLACES}, "gives other outputs for a cp rank's tokens"),
        ("ddl_ring", {"position_ids": PLACES, "labels": LONG[:, :-1]}, "'model' gives other outputs for a cp rank's"),
    ],
    ids=["no positions", "no positions, packed", "packed positions", "padding", "sdpa", "labels"],
)
def test_what_transformers_would_leave_out_is_refused_on_cp(attention, x, words):
    make = functools.partial(OnCp, "Llama", attention, num_key_value_heads=2)
    with pytest.raises((ValueError, ddl.RankError), match=words):
        ddl.check_parity(make, None, targets(**x), on_tokens, cp=2)


def new_experts(kind="Mixtral", **options):
    """A mixture of experts of transformers, with random weights."""
    import_torchvision()
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = (
        {"num_local_experts": 4}
        if kind == "Mixtral"
        else {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 4}
    )
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, num_key_value_heads=2, num_experts_per_tok=2, use_cache=False, **sizes, **own, **options
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def logits_of(output):
    return output.logits


def token_loss(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


EXPERTS_PLAN = {"model.layers.*.mlp.experts": ddl.Experts()}


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_of_transformers_train_as_in_one_process(kind):
    batch = tuple(torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(i)) for i in range(2))
    report = ddl.check_parity(
        functools.partial(new_experts, kind), EXPERTS_PLAN, batch, token_loss, dp=2, ep=2, steps=5,
        trainer={"model_transform": logits_of},
    )  # fmt: skip
    assert report.equal, str(report)
    assert "grouped_mm has no float64" in str(report)


def test_experts_of_transformers_train_as_in_one_process_on_cp():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    make = functools.partial(OnCp, "Mixtral", "ddl_ring", **sizes)
    plan = {"model.model.layers.*.mlp.experts": ddl.Experts()}
    report = ddl.check_parity(make, plan, targets(position_ids=PLACES), on_tokens, cp=2, ep=2)
    assert report.equal, str(report)


def losses_with_grouped_mm(local_rank):
    model = ddl.auto_model(new_experts(), EXPERTS_PLAN)
    optimizer = ddl.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = ddl.create_supervised_trainer(model, optimizer, token_loss, model_transform=logits_of)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    x, y = (torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(i)) for i in range(2))
    trainer.run(ddl.auto_dataloader(TensorDataset(x, y), batch_size=8), max_epochs=4)
    return losses


def test_experts_of_transformers_run_by_grouped_mm_in_float32():
    expected = losses_with_grouped_mm(0)
    assert expected[-1] < expected[0]
    for losses in ddl.Parallel("gloo", 2, dp=2, ep=2, timeout=120).run(losses_with_grouped_mm):
        assert losses == pytest.approx(expected, abs=1e-5)


def test_the_balance_loss_of_transformers_is_refused():
    with pytest.raises(ValueError, match="output_router_logits=True .* a rank's own rows"):
        ddl.check_model(new_experts(output_router_logits=True), EXPERTS_PLAN, dp=2, ep=2)
