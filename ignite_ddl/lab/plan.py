"""Which mesh, schedule and sharding for a model on a cluster: every choice costed on paper, the best first.

:func:`predict` costs one choice, :func:`plan` all of them. Both take plain numbers (:class:`Model`,
:class:`Cluster`); torch is touched by :meth:`Model.of` alone, matplotlib by :func:`figure`. The parts are those of
``cost``: parameters and FLOPs of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, equations 2 and 3; states of ZeRO (Rajbhandari et al. 2020); activations of Korthikanti et al.
2022; rings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ignite_ddl.arguments import AMOUNT, COUNT, FLAG, MODULE, POSITIVE, SHARE, TEXT, a, each, one_of, takes, whole
from ignite_ddl.lab import cost
from ignite_ddl.lab.cost import FITS, RECOMPUTE, WHOLE, Link
from ignite_ddl.pipeline.schedules import divisors

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

__all__ = ["A100", "H100", "Cluster", "Model", "Plan", "figure", "plan", "predict", "table"]

# Those with closed forms that torch can run.
SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble")


@takes(
    **dict.fromkeys(("layers", "width", "heads", "vocabulary", "sequence"), WHOLE),
    **dict.fromkeys(("weight_bytes", "gradient_bytes", "optimizer_bytes", "value_bytes", "mask_bytes"), AMOUNT),
    **dict.fromkeys(("tied", "sequence_parallel"), FLAG),
)
@dataclass(frozen=True)
class Model:
    """A GPT, and the numbers in which it is trained.

    Args:
        layers: l, transformer layers with an MLP of width 4 h.
        width: h.
        heads: a, attention heads.
        vocabulary: V.
        sequence: s, tokens of a row.
        tied: whether the output layer shares the embedding. Default: True.
        sequence_parallel: whether tp also shares out what lies between its layers (Korthikanti et al. 2022), and with
            it what stages send. Default: True.
        weight_bytes: of a parameter in compute. Default: 2.
        gradient_bytes: of its gradient, kept and sent. Default: 2.
        optimizer_bytes: of its optimizer states. Default: 12, Adam in mixed precision with weights of 4 bytes.
        value_bytes: of an activation. Default: 2.
        mask_bytes: of an element of a dropout mask. Default: 1; 0 without dropout.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab.plan import Model

            gpt3 = Model(layers=96, width=12288, heads=96, vocabulary=51200, sequence=2048)
            assert round(gpt3.parameters / 1e9) == 175
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    tied: bool = True
    sequence_parallel: bool = True
    weight_bytes: float = 2
    gradient_bytes: float = 2
    optimizer_bytes: float = 12
    value_bytes: float = 2
    mask_bytes: float = 1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads should divide width={self.width}, but given {self.heads}")

    @classmethod
    @takes(module=MODULE, sequence=WHOLE)
    def of(cls, module: nn.Module, sequence: int, **given: Any) -> Model:
        """Describes a real model: an ``nn.Embedding``, equal blocks, and an attribute that counts the heads.

        Args:
            module: the model, built or on the meta device.
            sequence: tokens of a row.
            given: fields of :class:`Model` that are not to be read from the module. Bytes are by default those of its
                dtype, with Adam.

        Returns:
            Model: whose number of parameters is the module's within 2 %.

        Raises:
            ValueError: if a part cannot be found, or the numbers of parameters differ by more.

        Examples:
            .. code-block:: python

                from ignite_ddl.course import GPT
                from ignite_ddl.lab.plan import Model

                model = Model.of(GPT(80, length=16, width=32, n_heads=4, n_blocks=2), sequence=16)
                assert (model.layers, model.width, model.heads, model.weight_bytes) == (2, 32, 4, 4)
        """
        from torch import nn

        parts = list(module.modules())
        parameters = list(module.parameters())
        tables = [part for part in parts if isinstance(part, nn.Embedding)]
        names = ("n_heads", "num_heads", "n_head", "num_attention_heads")
        heads = [getattr(part, name) for part in parts for name in names if hasattr(part, name)]
        blocks = max(map(_equal_children, parts), key=lambda group: sum(map(_size, group)))
        found = {"an nn.Embedding": tables, "equal blocks": blocks, "a number of heads": heads or "heads" in given}
        if lacks := [name for name, part in found.items() if not part]:
            raise ValueError(f"module should have {' and '.join(lacks)}, but has none: describe it by Model(...)")
        vocabulary, width = max(tables, key=lambda one: one.num_embeddings).weight.shape
        size = parameters[0].element_size()
        read = {
            "layers": len(blocks),
            "width": width,
            "heads": heads[0] if heads else None,
            "vocabulary": vocabulary,
            **dict.fromkeys(("weight_bytes", "gradient_bytes", "value_bytes"), size),
            "optimizer_bytes": 2 * size,
            "mask_bytes": size * any(isinstance(part, nn.Dropout) and part.p > 0 for part in parts),
        }
        has = _size(module)
        either = (cls(sequence=sequence, **({"tied": tied} | read | given)) for tied in (True, False))
        model = min(either, key=lambda one: abs(one.parameters - has))
        if abs(model.parameters / has - 1) > 0.02:
            raise ValueError(
                f"module should be a GPT, 12 · layers · width², but has {has:,} parameters where {model} has "
                f"{model.parameters:,.0f}"
            )
        return model

    @property
    def parameters(self) -> float:
        """Of the whole model: equation 2 of Narayanan et al. 2021, and the output layer where it is not tied."""
        own = cost.transformer_parameters(self.width, self.layers, self.vocabulary, self.sequence)
        return own + (not self.tied) * self.vocabulary * self.width

    @takes(pp=COUNT, tp=COUNT, layers=whole(0))
    def parameters_on(self, pp: int, tp: int, layers: int) -> float:
        """Parameters that a rank of the fuller of the first and the last stage holds.

        Norms and the biases of the two row-parallel products are whole on every tp rank, all else is shared out. With
        pp, a tied embedding lies on both ends.
        """
        h, whole = self.width, layers * 6 * self.width
        shared = layers * (12 * h * h + 7 * h) + -(-self.vocabulary // tp) * tp * h
        if pp == 1:
            shared += (not self.tied) * self.vocabulary * h
        return shared / tp + whole + max(self.sequence * h, 2 * h if pp > 1 else 0) + (2 * h if pp == 1 else 0)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _equal_children(module: nn.Module) -> list:
    """The largest group of children whose parameters have the same shapes."""
    groups: dict[tuple, list] = {}
    for child in module.children():
        groups.setdefault(tuple(p.shape for p in child.parameters()), []).append(child)
    groups.pop((), None)
    return max(groups.values(), key=len, default=[])


@takes(
    devices=FITS["n_ranks"], node=WHOLE, flops=POSITIVE, best=POSITIVE, overlap=SHARE,
    **dict.fromkeys(("memory", "half_width", "reserved"), AMOUNT), **dict.fromkeys(("inside", "between"), FITS["link"]),
)  # fmt: skip
@dataclass(frozen=True)
class Cluster:
    """Devices in nodes. Ranks fill node after node, so that tp peers are neighbours, then dp, then pp.

    Args:
        devices: how many.
        memory: bytes of one.
        flops: its peak, in operations per second.
        inside: the network between two devices of a node.
        between: what one device has of the network between nodes. A ring that leaves a node has this bandwidth, also
            where several of its members share a node (our assumption; a library that spreads one ring over all of a
            node's ports does better).
        node: devices of a node. Default: 8.
        best: efficiency that a very wide model reaches in compute, of the peak. Default: 1.
        half_width: width with which half of that is reached: the curve is ``best`` h / (h + ``half_width``), because a
            product of matrices does h operations for each number that it moves (our assumption). Default: 0.
        overlap: share of compute that can hide dp's messages: of the backward pass, with ZeRO-3 of both. Default: 0.
        reserved: bytes of memory that are not for the model: libraries, fragments. Default: 0.
    """

    devices: int
    memory: float
    flops: float
    inside: Link
    between: Link
    node: int = 8
    best: float = 1.0
    half_width: float = 0.0
    overlap: float = 0.0
    reserved: float = 0.0

    @takes(width=POSITIVE)
    def efficiency(self, width: float) -> float:
        """Of compute, at a model's width."""
        return self.best * width / (width + self.half_width)

    @takes(n_ranks=COUNT, apart=COUNT)
    def link(self, n_ranks: int, apart: int) -> Link:
        """The network of a group of ranks that are ``apart`` ranks from each other."""
        return self.inside if n_ranks * apart <= self.node else self.between


# Peak, memory, NVLink in one direction: NVIDIA's data sheets, from memory. Between nodes: one port of 200 Gbit/s a GPU
# (Narayanan et al. 2021, section 5), and of 400 (Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.1).
# ASSUMED: 5 us a message inside a node and 10 between. Efficiency: fitted to the rows that course/published.py names.
A100 = {
    "memory": 80e9,
    "flops": 312e12,
    "inside": Link(latency=5e-6, bandwidth=300e9),
    "between": Link(latency=10e-6, bandwidth=25e9),
    "best": 0.641,
    "half_width": 815.0,
}
H100 = A100 | {
    "flops": 989e12,
    "inside": Link(latency=5e-6, bandwidth=450e9),
    "between": Link(latency=10e-6, bandwidth=50e9),
    "best": 0.647,
}


class Plan(NamedTuple):
    """One way to train, and what it costs on the fullest and slowest rank.

    Attributes:
        dp: data-parallel ranks.
        pp: pipeline stages' ranks.
        tp: tensor-parallel ranks.
        schedule: of the pipeline, "" without one.
        n_chunks: stages on each rank.
        microbatches: of each dp rank in a step; without a pipeline their gradients are accumulated.
        zero: 0 to 3, what dp shards.
        recompute: "none", "selective" or "full", as in ``cost.activation_bytes``.
        memory: bytes by part: weights, gradients, optimizer, activations, buffers.
        seconds: of a step by part: compute, tp, pp, dp (not hidden), bubble.
        sent: bytes that a rank of the first stage sends in a step, by axis.
        mfu: FLOPs of forward and backward, without recomputation, over what the devices could do in that time.
        tokens_per_second: of the whole cluster.
        short: bytes of memory that are lacking; negative where some are free.
        model: what is trained.
        batch: rows of a step, of all ranks.
    """

    dp: int
    pp: int
    tp: int
    schedule: str
    n_chunks: int
    microbatches: int
    zero: int
    recompute: str
    memory: dict[str, float]
    seconds: dict[str, float]
    sent: dict[str, float]
    mfu: float
    tokens_per_second: float
    short: float
    model: Model
    batch: int

    @property
    def fits(self) -> bool:
        """Whether the memory of a device is enough."""
        return self.short <= 0

    def arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments with which ``ddl`` runs this plan, by the function that takes them.

        Without a pipeline, the microbatches are batches of the loader, whose gradients the trainer accumulates.
        Recomputation is not among them: wrap the blocks by ``torch.utils.checkpoint`` before ``ddl.auto_model``;
        torch's fused attention is selective by itself.

        Returns:
            dict: of keyword arguments for "Parallel" (on one machine add ``backend`` and ``nproc_per_node``),
            "auto_dataloader", "auto_model" and "create_supervised_trainer".

        Raises:
            ValueError: if ``ddl`` has no such plan: where gradients are not accumulated it shards weights (``zero=3``)
                or keeps them between the passes (``zero=2``); while they are accumulated, as under pp, gradients stay
                whole, and so do weights (``zero=1``).

        Examples:
            .. code-block:: python

                from ignite_ddl.lab.plan import A100, Cluster, Model, predict

                model = Model(layers=36, width=4096, heads=32, vocabulary=51200, sequence=2048)
                cluster = Cluster(16, **A100)
                given = predict(model, cluster, 128, dp=2, pp=2, tp=4).arguments()
                assert given["Parallel"] == {"dp": 2, "pp": 2, "tp": 4}
                assert given["auto_model"]["split"] == [19, 19] and given["auto_model"]["n_microbatches"] == 64
                given = predict(model, cluster, 128, dp=2, tp=8, microbatches=4).arguments()
                assert given["auto_dataloader"] == {"batch_size": 32}
                assert given["create_supervised_trainer"] == {"gradient_accumulation_steps": 4}
        """
        accumulated = self.microbatches if self.pp == 1 else 1
        alone = self.pp == 1 and accumulated == 1  # else ddl keeps whole gradients while it accumulates them
        if self.zero not in ((0, 2, 3) if alone else (0, 1)):
            raise ValueError(
                f"zero should be {'0, 2 or 3' if alone else '0 or 1'} under pp={self.pp} with "
                f"microbatches={self.microbatches} for ddl, but is {self.zero}"
            )
        auto_model: dict[str, Any] = {"shard": self.zero > 0}
        if self.zero in (1, 2) and self.pp == 1:
            auto_model["reshard_after_forward"] = False
        if self.dp > 1 and self.pp * self.tp == 1 and not self.zero:
            auto_model["gradient_as_bucket_view"] = True  # of DDP, whose buckets are else a second copy
        if self.pp > 1:
            stages = self.pp * self.n_chunks
            split = [
                -(-self.model.layers * (i + 1) // stages) + -self.model.layers * i // stages for i in range(stages)
            ]
            split[0] += 1  # the embedding
            split[-1] += 1  # the head
            auto_model |= {"schedule": self.schedule, "n_microbatches": self.microbatches, "split": split}
        return {
            "Parallel": {"dp": self.dp, "pp": self.pp, "tp": self.tp},
            "auto_dataloader": {"batch_size": self.batch // accumulated},
            "auto_model": auto_model,
            "create_supervised_trainer": {"gradient_accumulation_steps": accumulated},
        }

    def __str__(self) -> str:
        return table([self])


_GIVEN = {"model": a("a plan.Model", Model), "cluster": a("a plan.Cluster", Cluster), "batch": WHOLE}


@takes(
    _GIVEN, schedule=one_of(*SCHEDULES), zero=one_of(*range(4)), recompute=one_of(*RECOMPUTE), n_chunks=WHOLE,
    microbatches=WHOLE, **dict.fromkeys(("dp", "pp", "tp"), WHOLE),
)  # fmt: skip
def predict(
    model: Model,
    cluster: Cluster,
    batch: int,
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    schedule: str = "1f1b",
    n_chunks: int | None = None,
    microbatches: int | None = None,
    zero: int = 0,
    recompute: str = "none",
) -> Plan:
    """What one plan costs.

    A rank's compute is its share of ``cost.transformer_flops``, at the cluster's efficiency; the last stage has the
    output layer, too, and the slowest stage sets the pace. tp: four all-reduces of a microbatch's activations a layer
    (``cost.tensor_parallel_bytes``), half as many more with full recomputation, none hidden. Bubble: (p - 1) / v times
    what a microbatch takes on a rank (``cost.pipeline_bubble``); interleaved zero bubble as in
    ``cost.zero_bubble_seconds``, with F, B and W a third each of the products. pp: short messages that the schedule
    cannot hide, 2 (p - 1) m / p + 2 (p - 2) for 1f1b, 2 (p v - 1) for the interleaved ones, and p - 1 more if backward
    is split: ours, what ``simulate`` gives where m is a multiple of p (for the last of 2 p or more). dp: rings
    (Rajbhandari et al. 2020, section 7), less what compute hides; ZeRO-3 gathers and reduces for each microbatch.

    Memory of states is ``cost.zero_memory`` of the parameters on a rank; with a single microbatch, gradients come while
    activations go, so that only what they need beyond those is counted. That of activations is
    ``cost.activation_bytes`` times ``cost.pipeline_peak_activations``; or on the last stage its own peak, and what the
    output layer keeps. Buffers: the gradients of logits, or the layer that full recomputation makes again; with ZeRO-3
    gathered layers; under pp one for each message that a stage receives in a step, as torch keeps them; with dp on a
    cut model the second copy of the weights that torch's ``replicate`` and FSDP2 keep.

    Left out: the optimizer's own time, embeddings' look-ups, loading data, and ranks that are late.

    Args:
        model: what is trained.
        cluster: where.
        batch: rows of a step, of all ranks.
        dp: data-parallel ranks. Default: 1.
        pp: pipeline ranks. Default: 1.
        tp: tensor-parallel ranks, a divisor of the heads. Default: 1.
        schedule: "1f1b" (default), "interleaved_1f1b" or "interleaved_zero_bubble"; not used without pp.
        n_chunks: stages on each rank. Default: 1 for 1f1b, 2 for the others.
        microbatches: of each dp rank. Default: one row each.
        zero: 0 (default) to 3.
        recompute: "none" (default), "selective" or "full".

    Returns:
        Plan: whether it fits, and what it costs.

    Raises:
        ValueError: for numbers that do not suit each other.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab.plan import A100, Cluster, Model, predict

            model = Model(layers=36, width=4096, heads=32, vocabulary=51200, sequence=2048)
            whole = predict(model, Cluster(1, **A100), batch=8)
            cut = predict(model, Cluster(8, **A100), batch=8, tp=8)
            assert not whole.fits and cut.fits
    """
    v, m = _checked(model, cluster, batch, dp, pp, tp, schedule, n_chunks, microbatches, zero, recompute)
    b, s, h = batch // dp // m, model.sequence, model.width
    layers = v * -(-model.layers // (pp * v))  # of the fullest rank
    value = b * s * h * model.value_bytes  # bytes of one activation

    # Seconds of a microbatch: a layer's forward, its gradients of inputs and of weights; the output layer; a message.
    rate = cluster.flops * cluster.efficiency(h) * tp
    scores = 4 * b * s * s * h
    forward, weights = (24 * b * s * h * h + scores) / rate, 24 * b * s * h * h / rate
    again = {"none": 0.0, "selective": scores / rate, "full": forward}[recompute]
    inputs = weights + 2 * scores / rate + again
    head = 6 * b * s * h * model.vocabulary / rate
    ring = cost.all_reduce_ring(tp, value, cluster.link(tp, 1)).seconds
    n_rings = 6 if recompute == "full" else 4
    split = tp if model.sequence_parallel else 1  # of what lies between layers
    message = cluster.link(pp, dp * tp).seconds(value / split)

    # The slowest rank's work on all microbatches, and what it waits.
    layer = forward + inputs + weights
    compute, tp_seconds = layers * layer + head, n_rings * layers * ring
    pass_through = model.layers * (layer + n_rings * ring) + head  # of one microbatch, all stages
    bubble = messages = 0.0
    if schedule == "interleaved_zero_bubble" and pp > 1:
        parts = (forward + 2 * ring, inputs + (n_rings - 2) * ring, weights)
        parts = [layers / v * part for part in parts]
        bubble = max(cost.zero_bubble_seconds(pp, *parts), (pp - 1) * parts[0])
        messages = 2 * (pp * v - 1) + pp - 1
    elif pp > 1:
        bubble = max(0.0, pass_through - compute - tp_seconds) / v
        messages = 2 * (pp - 1) * m / pp + 2 * (pp - 2) if v == 1 else 2 * (pp * v - 1)
    reduces, gathers = {0: (2, 0), 1: (1, 1), 2: (m, 1), 3: (m, 2 * m)}[zero]
    held = model.parameters_on(pp, tp, layers)
    dp_bytes = held * (reduces * model.gradient_bytes + gathers * model.weight_bytes)
    link = cluster.link(dp, tp)
    dp_seconds = (reduces + gathers) * (dp - 1) * link.latency + (dp - 1) / dp * dp_bytes / link.bandwidth
    hidden = cluster.overlap * m * compute * (1 if zero == 3 else 2 / 3)
    seconds = {
        "compute": m * compute,
        "tp": m * tp_seconds,
        "pp": messages * message,
        "dp": max(0.0, dp_seconds - hidden),
        "bubble": bubble,
    }
    total = sum(seconds.values())

    states = cost.zero_memory(held, dp, zero, model.weight_bytes, model.gradient_bytes, model.optimizer_bytes)
    shape = (b, s, h, model.heads, tp, model.sequence_parallel)
    numbers = {"value_bytes": model.value_bytes, "mask_bytes": model.mask_bytes}
    # Of a stage and a microbatch: what its layers keep, and under pp its output, to which its gradient comes.
    kept = layers / v * cost.activation_bytes(*shape, recompute, **numbers) + (pp > 1) * value / split
    first, last = (cost.pipeline_peak_activations(schedule, pp, m, rank, v) for rank in (0, pp - 1))
    logits = b * s * model.vocabulary / tp * model.value_bytes
    # The last stage also keeps what the last norm and the output layer read, logits, and their log-softmax.
    activations = max(first * kept, last * kept + 2 * value / split + 2 * logits)
    layer_parameters = (12 * h * h + 13 * h) / tp * (zero == 3)
    buffers = max(
        2 * logits + layer_parameters * model.weight_bytes,  # backward begins: the gradients of both
        layer_parameters * (2 * model.weight_bytes + model.gradient_bytes)  # backward of a layer
        + (recompute == "full") * cost.activation_bytes(*shape, "selective", **numbers),
    )
    memory = {
        **dict(zip(("weights", "gradients", "optimizer"), states, strict=False)),
        "activations": activations,
        "buffers": buffers + (pp > 1) * (2 * v - 1) * m * value / split,
    }
    # A second copy of the weights: replicate's whole, or FSDP2's shard of what stays whole.
    if dp > 1 and (zero in (1, 2) or pp * tp > 1 and not zero):
        memory["buffers"] += held * model.weight_bytes / (dp if zero else 1)
    if m == 1:  # gradients come while activations go
        memory["gradients"] = max(0.0, states.gradients - activations)
    flops = cost.transformer_flops(batch, s, h, model.layers, model.vocabulary)
    ends = 2 if pp == 1 else 1  # the embedding's outputs, and the gradient of what the output layer reads
    # Both ends hold a tied embedding, and tell each other its gradients.
    of_tied = model.tied * -(-model.vocabulary // tp) * h * model.gradient_bytes / (dp if zero else 1)
    return Plan(
        dp, pp, tp, schedule if pp > 1 else "", v, m, zero, recompute, memory, seconds,
        sent={
            "tp": m * (n_rings * layers + ends) * 2 * (tp - 1) / tp * value,
            "pp": (pp > 1) * (m * (2 * v - 1) * value / split + of_tied),
            "dp": (dp - 1) / dp * dp_bytes,
        },
        mfu=flops / (dp * pp * tp * cluster.flops * total),
        tokens_per_second=batch * s / total,
        short=sum(memory.values()) - (cluster.memory - cluster.reserved),
        model=model,
        batch=batch,
    )  # fmt: skip


@takes(
    _GIVEN,
    schedules=each(one_of(*SCHEDULES), f"some of {', '.join(SCHEDULES)}", least=1),
    recompute=each(one_of(*RECOMPUTE), f"some of {', '.join(RECOMPUTE)}", least=1),
)
def plan(
    model: Model,
    cluster: Cluster,
    batch: int,
    *,
    schedules: Iterable[str] = SCHEDULES,
    recompute: Iterable[str] = RECOMPUTE,
) -> list[Plan]:
    """All plans that ``ddl`` can run on all devices, by :func:`predict`: those that fit by seconds, then the others.

    Tries each mesh whose tp divides the heads, whose pp has a layer for each stage, and whose dp divides the batch;
    microbatches of 1, 2, 4, 8 and 16 rows, or all; schedules with their own number of stages on a rank, for
    interleaved ones with a number of microbatches that pp divides; dp with and without sharding (all, or under pp the
    optimizer); each recomputation.

    Args:
        model: what is to be trained.
        cluster: where.
        batch: rows of a step, of all ranks.
        schedules: of the pipeline. Default: the three of :func:`predict`.
        recompute: which to try. Default: all three; ("selective", "full") for torch's fused attention.

    Returns:
        list: of :class:`Plan`, the best first: those that fit by time, at equal times those of fewer microbatches,
        which keep a device busier than this model knows, then by memory; after them those that do not, by what is
        short.

    Raises:
        ValueError: if no mesh has all devices.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab.plan import A100, Cluster, Model, plan

            model = Model(layers=36, width=4096, heads=32, vocabulary=51200, sequence=2048)
            plans = plan(model, Cluster(16, **A100), batch=128)
            assert plans[0].fits and not plans[-1].fits
    """
    found = []
    for tp in divisors(cluster.devices):
        for pp in divisors(cluster.devices // tp):
            dp = cluster.devices // tp // pp
            if model.heads % tp or pp > model.layers or batch % dp:
                continue
            for schedule in schedules if pp > 1 else [""]:
                v = 2 if schedule.startswith("interleaved") else 1
                counts = {batch // dp // rows for rows in (1, 2, 4, 8, 16) if batch // dp % rows == 0} | {1}
                for m in sorted(counts):
                    if pp * v > model.layers or m < pp or (v > 1 and m % pp):
                        continue
                    # Under gradient accumulation, ddl keeps whole gradients: it shards all or nothing.
                    for zero in {0, 1 if pp > 1 else 3 if m == 1 else 0} if dp > 1 else {0}:
                        for again in recompute:
                            found.append(
                                predict(
                                    model, cluster, batch, dp=dp, pp=pp, tp=tp, schedule=schedule or "1f1b",
                                    n_chunks=v, microbatches=m, zero=zero, recompute=again,
                                )
                            )  # fmt: skip
    if not found:
        raise ValueError(
            f"batch should be divisible by the dp of a mesh of {cluster.devices} devices, with tp a divisor of "
            f"{model.heads} heads and pp at most {model.layers} layers, but given {batch}"
        )

    def place(one: Plan) -> tuple:
        worth = sum(one.seconds.values()) if one.fits else one.short
        # Of sums in another order only some digits count: the others would choose between equal times.
        return not one.fits, float(f"{worth:.9g}"), one.microbatches, sum(one.memory.values())

    return sorted(found, key=place)


def _checked(
    model: Model, cluster: Cluster, batch: int, dp: int, pp: int, tp: int, schedule: str, n_chunks: int | None,
    microbatches: int | None, zero: int, recompute: str,
) -> tuple[int, int]:  # fmt: skip
    """Refuses a plan that cannot be; returns the numbers of stages on each rank and of microbatches."""
    if dp * pp * tp > cluster.devices:
        raise ValueError(f"dp, pp and tp should be {cluster.devices} devices at most, but given {dp}, {pp} and {tp}")
    if model.heads % tp:
        raise ValueError(f"tp should divide {model.heads} heads, but given {tp}")
    own = 1 if schedule == "1f1b" else 2
    n_chunks = 1 if pp == 1 else own if n_chunks is None else n_chunks
    if schedule == "1f1b" and n_chunks > 1:
        raise ValueError(f"n_chunks should be 1 for 1f1b, but given {n_chunks}")
    if pp * n_chunks > model.layers:
        raise ValueError(f"pp should be at most {model.layers // n_chunks}, one layer a stage, but given {pp}")
    if batch % dp:
        raise ValueError(f"dp should divide batch={batch}, but given {dp}")
    count = batch // dp if microbatches is None else microbatches
    if batch // dp % count:
        raise ValueError(f"microbatches should divide the {batch // dp} rows of a dp rank, but given {count}")
    if pp > 1 and (count < pp or (n_chunks > 1 and count % pp)):
        kind = "at least" if n_chunks == 1 else "a multiple of"
        raise ValueError(f"microbatches should be {kind} pp={pp} for {schedule}, but given {count}")
    return n_chunks, count


@takes(plans=each(a("a Plan", Plan), "a list of plans"), n=COUNT)
def table(plans: Sequence[Plan], n: int = 10) -> str:
    """The first ``n`` plans, a line each.

    Args:
        plans: of :func:`plan` or :func:`predict`.
        n: lines. Default: 10.

    Returns:
        str: mesh, schedule, microbatches and rows of one, zero, recomputation, memory and what is short, seconds, MFU.
    """
    unit, name = _unit(plans[:n])
    lines = [
        f"{'dp × pp × tp':>14}  {'schedule':<23} {'m × rows':>9} {'zero':>4}  {'recompute':<9} {name:>7} {'short':>7} "
        f"{'seconds':>8} {'MFU':>4}"
    ]
    for one in plans[:n]:
        rows = one.batch // one.dp // one.microbatches
        lines.append(
            f"{f'{one.dp} × {one.pp} × {one.tp}':>14}  {one.schedule or '-':<23} {f'{one.microbatches} × {rows}':>9} "
            f"{one.zero:>4}  {one.recompute:<9} {sum(one.memory.values()) / unit:>7.1f} "
            f"{'' if one.fits else f'{one.short / unit:.1f}':>7} {sum(one.seconds.values()):>8.3g} {one.mfu:>4.0%}"
        )
    return "\n".join(lines)


def _unit(plans: Sequence[Plan]) -> tuple[float, str]:
    """The largest unit of bytes that the plan with the most memory fills."""
    most = max((sum(one.memory.values()) for one in plans), default=1e9)
    return next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if most >= unit), (1e3, "kB"))


@takes(plans=each(a("a Plan", Plan), "a list of plans, at least one", least=1), title=TEXT)
def figure(plans: Sequence[Plan], title: str = "Every plan: time against memory") -> Figure:
    """Seconds of a step against memory, a dot for each plan: colour is the mesh's pp, grey does not fit.

    Args:
        plans: of :func:`plan`, of one cluster.
        title: what the figure shows.

    Returns:
        the figure.
    """
    from ignite_ddl.lab import draw

    made, axes = draw.new_figure(title, height=3.6)
    unit, name = _unit(plans)
    shades = dict(zip(sorted({one.pp for one in plans}), draw.RANK[1:], strict=False))
    for one in reversed(plans):
        at = sum(one.memory.values()) / unit, sum(one.seconds.values())
        colour = shades.get(one.pp, draw.GREY) if one.fits else draw.GREY
        axes.plot(*at, "o", color=colour, markersize=5, alpha=0.9 if one.fits else 0.35, markeredgewidth=0)
    limit = (sum(plans[0].memory.values()) - plans[0].short) / unit
    axes.axvline(limit, color=draw.INK, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel=f"memory of a device, {name}", ylabel="seconds a step")
    draw.log_ticks(axes, *axes.get_ylim())
    low, high = axes.get_xlim()
    axes.set_xticks([n * 10**power for power in range(-3, 5) for n in (1, 2, 5) if low < n * 10**power < high])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    draw.key(made, {f"pp {pp}": colour for pp, colour in shades.items()} | {"does not fit": draw.GREY})
    return draw.on_any_page(made)
