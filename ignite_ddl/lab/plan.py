"""Which mesh, schedule and sharding for a model on a cluster: every choice costed on paper, the best first.

:func:`predict` costs one choice, :func:`plan` all of them. Both take plain numbers (:class:`Model`,
:class:`Cluster`); torch is touched by :meth:`Model.of` alone, matplotlib by :func:`figure`. The parts are those of
``cost``: parameters and FLOPs of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, equations 2 and 3; states of ZeRO (Rajbhandari et al. 2020); activations of Korthikanti et al.
2022; rings.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ignite_ddl.arguments import AMOUNT, COUNT, FLAG, POSITIVE, SHARE, TEXT, a, each, one_of, or_none, takes, whole
from ignite_ddl.lab import cost
from ignite_ddl.lab.cost import FITS, WHOLE, Link
from ignite_ddl.lab.model import KERNELS, RECOMPUTE, Model
from ignite_ddl.pipeline.schedules import SCHEDULES as PIPELINES, divisors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["A100", "H100", "Cluster", "Model", "Plan", "figure", "plan", "predict", "table"]

# Those with closed forms that torch can run.
SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble")
CLOSE_RATIO = 1.1  # see table


@takes(
    devices=FITS["n_ranks"], node=WHOLE, flops=POSITIVE, best=POSITIVE, overlap=SHARE,
    eager=or_none(AMOUNT), spread=FLAG, peaks=or_none(a("a dict of a dtype's name to operations a second", Mapping)),
    **dict.fromkeys(("memory", "half_width", "reserved"), AMOUNT), **dict.fromkeys(("inside", "between"), FITS["link"]),
)  # fmt: skip
@dataclass(frozen=True)
class Cluster:
    """Devices in nodes. Ranks fill node after node, so that tp peers are neighbours, then dp, then pp.

    Args:
        devices: how many.
        memory: bytes of one.
        flops: its peak, in operations per second, in the dtype of most work (bfloat16).
        inside: the network between two devices of a node.
        between: what one device has of the network between nodes; a ring that leaves a node has this bandwidth, see
            ``spread``.
        node: devices of a node. Default: 8.
        best: efficiency that a very wide model reaches in compute, of the peak. Default: 1.
        half_width: width with which half of that is reached: the curve is ``best`` h / (h + ``half_width``), because a
            product of matrices does h operations for each number that it moves (our assumption). Default: 0.
        overlap: share of the passes beside which dp's messages travel that hides them: gradients beside backward,
            weights beside forward, with ZeRO-3 both beside both; while gradients are accumulated, only of the
            microbatch in which they are sent. A layer's part is never hidden. Default: 0.
        reserved: bytes of memory that are not for the model: libraries, fragments. Default: 0.
        eager: ``half_width`` of torch's kernels one after the other, which move more numbers between the products.
            Default None: ``half_width``.
        peaks: peaks of other dtypes by their names, as "float32". Default: none.
        spread: whether a ring of which several members share a node has the ports of all of them, as NCCL's rings do,
            instead of one. Default: False.
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
    eager: float | None = None
    peaks: Mapping[str, float] | None = None
    spread: bool = False

    @takes(width=POSITIVE, kernels=one_of(*KERNELS))
    def efficiency(self, width: float, kernels: str = "fused") -> float:
        """The efficiency of compute, at a model's width."""
        return self.best * width / (width + self._half_width(kernels))

    def _half_width(self, kernels: str) -> float:
        return self.eager if kernels == "eager" and self.eager is not None else self.half_width

    def at(self, dtype: str) -> Cluster:
        """This cluster, whose peak is that of another dtype."""
        known = self.peaks or {}
        if dtype not in known:
            raise ValueError(f"dtype should be one of {', '.join(known) or 'none, without peaks'}, but given {dtype}")
        return dataclasses.replace(self, flops=known[dtype])

    @takes(n_ranks=COUNT, apart=COUNT)
    def link(self, n_ranks: int, apart: int) -> Link:
        """The slowest network of the groups of ranks whose neighbours are ``apart`` ranks away.

        Groups lie one after the other: of six ranks in nodes of eight, the second has two on one node, four on the
        next.
        """
        size = n_ranks * apart
        if size <= self.node and (self.devices <= self.node or self.node % size == 0):
            return self.inside
        ports = max(1, math.gcd(size, self.node) // apart) if self.spread else 1  # of the fewest on a node
        if ports == 1:
            return self.between
        return Link(self.between.latency, min(self.inside.bandwidth, ports * self.between.bandwidth))


# Peaks, memory, NVLink in one direction: NVIDIA's data sheets, from memory; peaks without sparsity. Between nodes: one
# port of 200 Gbit/s a GPU (Narayanan et al. 2021, section 5), and of 400 (Llama Team, "The Llama 3 Herd of Models",
# 2024, section 3.3.1). ASSUMED: 5 us a message inside a node and 10 between. Efficiencies (best, half_width, eager) are
# fitted to the rows that course/published.py names in FITTED, and ASSUMED to be the same share of other dtypes' peaks.
# overlap: torch's DDP and FSDP2 send beside the passes by themselves, all but the first gather (torch's notes on FSDP,
# "Implicit forward prefetching (always enabled)"); ASSUMED: what is sent there costs the passes nothing.
A100 = {
    "memory": 80e9,
    "flops": 312e12,
    "inside": Link(latency=5e-6, bandwidth=300e9),
    "between": Link(latency=10e-6, bandwidth=25e9),
    "best": 0.696,
    "half_width": 123.0,
    "overlap": 1.0,
    "spread": True,
    "eager": 240.0,
    "peaks": {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12},
}
H100 = A100 | {
    "flops": 989e12,
    "inside": Link(latency=5e-6, bandwidth=450e9),
    "between": Link(latency=10e-6, bandwidth=50e9),
    "best": 0.613,
    "half_width": 784.0,
    "eager": 1176.0,
    "peaks": {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12},
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
        recompute: "none", "selective", "pointwise" or "full", as in :meth:`Model.activation_bytes`.
        memory: bytes by part: weights, gradients, optimizer, activations, buffers.
        seconds: of a step by part: compute, tp, pp, dp (not hidden), bubble; cp and ep where they are more than 1.
        sent: bytes that a rank of the first stage sends in a step, by axis.
        mfu: FLOPs of forward and backward, without recomputation, over what the devices could do in that time.
        tokens_per_second: of the whole cluster.
        short: bytes of memory that are lacking; negative where some are free.
        model: what is trained.
        batch: rows of a step, of all ranks.
        cp: ranks that share the tokens of a row.
        ep: dp ranks that share a layer's experts.
        dp_shard: dp ranks that share the states of a replica; dp without replicas.
        full_layers: of a rank, recomputed in full.
        stages: layers of each, in order; stage i is on pipeline rank i modulo pp.
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
    cp: int = 1
    ep: int = 1
    dp_shard: int = 1
    full_layers: int = 0
    stages: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the memory of a device is enough."""
        return self.short <= 0

    @property
    def lacks(self) -> tuple[str, ...]:
        """What ``ddl`` cannot do of this plan today, in words; empty if it runs.

        Where gradients are not accumulated it shards weights (``zero=3``) or keeps them between the passes
        (``zero=2``); while they are accumulated, as under pp, gradients stay full, and so do weights (``zero=1``).
        Full gradients beside sharded weights, ``shard=True`` alone without pp, are none of these.
        """
        words = []
        alone = self.pp == 1 and self.microbatches == 1  # else ddl keeps full gradients while it accumulates them
        if self.zero not in ((0, 2, 3) if alone else (0, 1)):
            words.append(
                f"zero should be {'0, 2 or 3' if alone else '0 or 1'} under pp={self.pp} with "
                f"microbatches={self.microbatches} for ddl, but is {self.zero}"
            )
        if self.zero and self.dp_shard == 1 < self.dp:
            words.append("dp_shard should be more than 1 for ddl to shard, but is 1")
        if self.ep > 1 and self.zero and self.dp_shard < self.dp:
            words.append(f"dp_shard should be dp={self.dp} beside ep={self.ep} for ddl, but is {self.dp_shard}")
        if self.ep > 1 and self.pp > 1 and PIPELINES[self.schedule].split_backward:
            words.append(
                f"schedule should not split backward passes beside ep={self.ep} for ddl, but is {self.schedule!r}"
            )
        return tuple(words)

    def arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments with which ``ddl`` runs this plan, by the function that takes them.

        Without a pipeline, the microbatches are batches of the loader, whose gradients the trainer accumulates.
        Recomputation is not among them: wrap the blocks by ``torch.utils.checkpoint`` before ``ddl.auto_model``;
        torch's fused attention is selective by itself.

        Returns:
            dict: of keyword arguments for "Parallel" (on one machine add ``backend`` and ``nproc_per_node``),
            "auto_dataloader", "auto_model" and "create_supervised_trainer".

        Raises:
            ValueError: if ``ddl`` cannot run it, see :attr:`lacks`.

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
        if self.lacks:
            raise ValueError(self.lacks[0])
        accumulated = self.microbatches if self.pp == 1 else 1
        mesh = {"dp": self.dp, "pp": self.pp, "tp": self.tp}
        if self.zero and self.dp_shard < self.dp:
            mesh = {"dp_replicate": self.dp // self.dp_shard, "dp_shard": self.dp_shard, "pp": self.pp, "tp": self.tp}
        mesh |= {name: size for name, size in (("cp", self.cp), ("ep", self.ep)) if size > 1}
        auto_model: dict[str, Any] = {"shard": self.zero > 0}
        if self.zero in (1, 2) and self.pp == 1:
            auto_model["reshard_after_forward"] = False
        if self.dp > 1 and self.pp * self.tp * self.cp == 1 and not self.zero:
            auto_model["gradient_as_bucket_view"] = True  # of DDP, whose buckets are else a second copy
        if self.pp > 1:
            split = list(self.stages)
            split[0] += 1  # the embedding
            split[-1] += 1  # the head
            auto_model |= {"schedule": self.schedule, "n_microbatches": self.microbatches, "split": split}
        return {
            "Parallel": mesh,
            "auto_dataloader": {"batch_size": self.batch // accumulated},
            "auto_model": auto_model,
            "create_supervised_trainer": {"gradient_accumulation_steps": accumulated},
        }

    def __str__(self) -> str:
        return table([self])


_GIVEN = {"model": a("a plan.Model", Model), "cluster": a("a plan.Cluster", Cluster), "batch": WHOLE}


@takes(
    _GIVEN, schedule=one_of(*SCHEDULES), zero=one_of(*range(4)), recompute=one_of(*RECOMPUTE), n_chunks=WHOLE,
    microbatches=WHOLE, dp_shard=or_none(WHOLE), full_layers=or_none(whole(0)),
    **dict.fromkeys(("dp", "pp", "tp", "cp", "ep"), WHOLE),
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
    cp: int = 1,
    dp_shard: int | None = None,
    ep: int = 1,
    full_layers: int | None = None,
) -> Plan:
    """What one plan costs.

    A rank's compute is its share of :meth:`Model.flops`, at the cluster's efficiency; the last stage has the output
    layer, too, its layers are fewer where that makes the slowest stage faster, and the slowest sets the pace. tp: four
    all-reduces of a microbatch's activations a layer (``cost.tensor_parallel_bytes``), half as many more with full
    recomputation, none hidden. Bubble: (p - 1) / v times what a microbatch takes on a rank (``cost.pipeline_bubble``);
    interleaved zero bubble as in ``cost.zero_bubble_seconds``, with F, B and W a third each of the products. pp: short
    messages that the schedule cannot hide, 2 (p - 1) m / p + 2 (p - 2) for 1f1b, 2 (p v - 1) for the interleaved ones,
    and p - 1 more if backward is split: ours, what ``simulate`` gives where m is a multiple of p (for the last of 2 p
    or more). dp: rings (Rajbhandari et al. 2020, section 7), less what the passes beside them hide
    (``Cluster.overlap``); ZeRO-2 reduces for each microbatch, ZeRO-3 gathers twice for each, too; with ``dp_shard``
    these stay among its ranks, and replicas all-reduce a shard's gradients; experts' among every ep-th rank. cp: keys
    and values go round a ring, twice as many bytes in backward, with their gradients in the same dtype
    (``cost.ring_attention`` has what ``ddl`` sends: gradients in float32 and one hop more), less what attention's own
    products hide. ep: four exchanges of the tokens that experts take, forward and backward, none hidden.

    Memory of states is ``cost.zero_memory`` of the parameters on a rank; with a single microbatch, gradients come while
    activations go, so that only what they need beyond those is counted. That of activations is
    :meth:`Model.activation_bytes` times ``cost.pipeline_peak_activations``; or on the last stage its own peak, and what
    the output layer keeps. Buffers: the gradients of logits, or the layer that full recomputation makes again; with
    ZeRO-3 gathered layers; under pp one for each message that a stage receives in a step, as torch keeps them; with dp
    on a cut model the second copy of the weights that torch's ``replicate`` and FSDP2 keep.

    Left out: the optimizer's own time, embeddings' look-ups, loading data, ranks that are late, and experts that are
    chosen more than others.

    Args:
        model: what is trained.
        cluster: where.
        batch: rows of a step, of all ranks.
        dp: data-parallel ranks. Default: 1.
        pp: pipeline ranks. Default: 1.
        tp: tensor-parallel ranks, a divisor of the heads, also of those of keys. Default: 1.
        schedule: "1f1b" (default), "interleaved_1f1b" or "interleaved_zero_bubble"; not used without pp.
        n_chunks: stages on each rank. Default: 1 for 1f1b, 2 for the others.
        microbatches: of each dp rank. Default: one row each.
        zero: 0 (default) to 3.
        recompute: "none" (default), "selective", "pointwise" or "full", see :meth:`Model.activation_bytes`.
        cp: ranks that share the tokens of a row; they share weights as dp ranks do. Default: 1.
        dp_shard: with ``zero``, dp ranks of one replica (HSDP), a divisor of dp. Default: dp.
        ep: dp ranks that share a layer's experts, a divisor of both numbers. Default: 1.
        full_layers: with "full", how many of a rank's layers; the others are selective. Default: all.

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
    v, m = _checked(model, cluster, batch, dp, pp, tp, schedule, n_chunks, microbatches, cp, ep, recompute, full_layers)
    shard = dp if dp_shard is None else dp_shard
    if dp % shard or (shard < dp and not zero):
        raise ValueError(f"dp_shard should divide dp={dp}, and have zero=1, 2 or 3, but given {shard} with zero={zero}")
    given = (dp, pp, tp, cp, ep, shard, schedule if pp > 1 else "", v, m, zero)
    used = dataclasses.replace(cluster, devices=dp * pp * tp * cp)
    return _Costs(model, used, batch).plan(*given, recompute, full_layers)


class _Layer(NamedTuple):
    """Seconds of a microbatch in a layer: what it computes, and what it sends; and of the output layer.

    Attributes:
        forward: of the forward pass.
        inputs: of the gradients of inputs, with what is computed again.
        weights: of the gradients of weights.
        n_rings: how many rings of tp it sends.
        ring: of one of them.
        around: of cp's ring, less the attention beside it.
        exchange: of the tokens that visit experts.
        head: of all passes of the output layer.
    """

    forward: float
    inputs: float
    weights: float
    n_rings: float
    ring: float
    around: float
    exchange: float
    head: float

    @property
    def computed(self) -> float:
        return self.forward + self.inputs + self.weights

    @property
    def sent(self) -> float:
        return self.n_rings * self.ring + self.around + self.exchange


class _Costs:
    """The costs of one model, cluster and batch: what many plans share is computed once."""

    def __init__(self, model: Model, cluster: Cluster, batch: int) -> None:
        self.model, self.cluster, self.batch = model, cluster, batch
        self.flops, self.products = model.flops(batch), model.products()
        self.rate = cluster.flops * cluster.efficiency(model.width, model.kernels)
        half = cluster._half_width(model.kernels)
        self.between = half / (half + model.width)  # the share of a pass that is not products
        self.kept = functools.cache(model.activation_bytes)
        self.held = functools.cache(model._held)
        self.stages = functools.cache(self._stages)

    def _stages(self, pp: int, v: int) -> tuple[list[int], float]:
        """Layers of each stage, and the output layer's time in layers: the slowest stage takes the least."""
        model, n = self.model, pp * v
        head = model.vocabulary * model.width / (self.products + 2 * model.sequence * model.attention_width)
        even = model.layers // n
        equal = [-(-model.layers * (i + 1) // n) + -model.layers * i // n for i in range(n)]
        best, least = equal, _slowest_rank(equal, pp, head)
        for last in range(even, max(0, even - math.ceil(head) - 1), -1) if n > 1 else ():
            each_, more = divmod(model.layers - last, n - 1)
            tried = [each_ + (i < more) for i in range(n - 1)] + [last]
            if _slowest_rank(tried, pp, head) < least - 1e-9:
                best, least = tried, _slowest_rank(tried, pp, head)
        return best, head

    def plan(
        self, dp: int, pp: int, tp: int, cp: int, ep: int, shard: int, schedule: str, v: int, m: int, zero: int,
        recompute: str, full_layers: int | None = None,
    ) -> Plan:  # fmt: skip
        model, cluster, batch = self.model, self.cluster, self.batch
        b, s = batch // dp // m, model.sequence
        stages, _ = self.stages(pp, v)
        on_rank = [sum(stages[rank::pp]) for rank in range(pp)]
        layers = max(on_rank)
        value = b * s / cp * model.width * model.value_bytes  # bytes of one activation
        full = 0.0 if recompute != "full" else 1.0 if full_layers is None else min(1.0, full_layers / layers)
        split = tp if model.sequence_parallel else 1  # of what lies between layers
        layer = self._layer(b, tp, cp, ep, recompute, full)
        compute, bubble, messages = self._pipeline(layer, pp, v, m, on_rank, schedule)
        dense, experts = self.held(pp, tp, layers, ep)
        dp_seconds, dp_bytes = self._dp(dense, experts, dp, tp, cp, ep, shard, zero, m, layers, compute)
        seconds = {
            "compute": m * compute,
            "tp": m * layers * layer.n_rings * layer.ring,
            "pp": messages * cluster.link(pp, dp * cp * tp).seconds(value / split),
            "dp": dp_seconds,
            "bubble": bubble,
        }
        if cp > 1:
            seconds["cp"] = m * layers * layer.around
        if ep > 1:
            seconds["ep"] = m * layers * layer.exchange
        total = sum(seconds.values())

        memory = self._memory(
            dense, experts, b, dp, pp, tp, cp, ep, shard, schedule, v, m, zero, recompute, full, on_rank, value / split
        )
        ends = 2 if pp == 1 else 1  # the embedding's outputs, and the gradient of what the output layer reads
        sent = {
            "tp": m * (layer.n_rings * layers + ends) * 2 * (tp - 1) / tp * value,
            "pp": (pp > 1) * (m * (2 * v - 1) * value / split + self._tied_bytes(tp, shard * cp if zero else 1)),
            "dp": dp_bytes,
        }
        return Plan(
            dp, pp, tp, schedule, v, m, zero, recompute, memory, seconds, sent,
            mfu=self.flops / (dp * pp * tp * cp * cluster.flops * total),
            tokens_per_second=batch * s / total,
            short=sum(memory.values()) - (cluster.memory - cluster.reserved),
            model=model,
            batch=batch,
            cp=cp,
            ep=ep,
            dp_shard=shard,
            full_layers=layers if full == 1 else full_layers if full else 0,
            stages=tuple(stages),
        )  # fmt: skip

    def _layer(self, b: int, tp: int, cp: int, ep: int, recompute: str, full: float) -> _Layer:
        model, cluster = self.model, self.cluster
        tokens, rate = b * model.sequence / cp, self.rate * tp
        value = tokens * model.width * model.value_bytes
        scores = 4 * tokens * model.sequence * model.attention_width / rate
        weights = 2 * tokens * self.products / rate
        forward = weights + scores
        again = {"none": 0.0, "selective": scores, "pointwise": scores + self.between * weights}.get(recompute, scores)
        again = full * forward + (1 - full) * again
        around = exchange = 0.0
        if cp > 1:
            pairs = 2 * b * model.sequence * model.kv_width * model.value_bytes / tp  # keys and values of full rows
            sent = [_pass(cp, times * pairs, cluster.link(cp, tp)) for times in (1, 2)]
            around = max(0.0, sent[0] - scores) + max(0.0, sent[1] - 2 * scores)
        if ep > 1:
            moved = model.share_of_experts * model.chosen * value / tp * (ep - 1) / ep
            on = cluster.link(ep, tp * cp)
            exchange = 4 * (ep - 1) * on.latency + 4 * moved / on.bandwidth
        return _Layer(
            forward,
            weights + 2 * scores + again,
            weights,
            n_rings=4 + 2 * full,
            ring=_ring(tp, value, cluster.link(tp, 1)) if tp > 1 else 0.0,
            around=around,
            exchange=exchange,
            head=6 * tokens * model.width * model.vocabulary / rate,
        )

    def _pipeline(
        self, layer: _Layer, pp: int, v: int, m: int, on_rank: list[int], schedule: str
    ) -> tuple[float, float, float]:
        """The slowest rank's work on a microbatch, what it waits in a step, and how many messages it waits for."""
        layers = max(on_rank)
        compute = max(on_rank[-1] * layer.computed + layer.head, layers * layer.computed)
        if schedule == "interleaved_zero_bubble":
            backward = layer.inputs + (layer.n_rings - 2) * layer.ring + layer.around + layer.exchange
            parts = [layers / v * part for part in (layer.forward + 2 * layer.ring, backward, layer.weights)]
            bubble = max(cost.zero_bubble_seconds(pp, *parts), (pp - 1) * parts[0])
            return compute, bubble, 2 * (pp * v - 1) + pp - 1
        if pp == 1:
            return compute, 0.0, 0.0
        pass_through = self.model.layers * (layer.computed + layer.sent) + layer.head  # of one microbatch, all stages
        bubble = max(0.0, pass_through - compute - layers * layer.sent) / v
        return compute, bubble, 2 * (pp - 1) * m / pp + 2 * (pp - 2) if v == 1 else 2 * (pp * v - 1)

    def _tied_bytes(self, tp: int, n: int) -> float:
        """Both ends of a pipeline hold a tied embedding, and tell each other its gradients, each rank an n-th."""
        model = self.model
        return model.tied * -(-model.vocabulary // tp) * model.width * model.gradient_bytes / n

    def _dp(
        self, dense: float, experts: float, dp: int, tp: int, cp: int, ep: int, shard: int, zero: int, m: int,
        layers: int, compute: float,
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds of dp's messages that nothing hides, and bytes that a rank sends."""
        model, cluster, n = self.model, self.cluster, shard * cp
        if dp * cp == 1:
            return 0.0, 0.0
        passes = m if zero > 1 else 1  # with gradients of their own
        gathers = (0, 1, 1, 2 * m)[zero]
        forward, backward = compute * m / 3, 2 * compute * m / 3
        held = [(dense + experts, n, tp)] if ep == 1 else [(dense, n, tp), (experts, max(1, n // ep), tp * ep)]
        reduce = gather = sent = 0.0
        for numbers, n, apart in held:  # every ep-th rank has the same experts
            replicas = dp * cp * tp // (n * apart)
            link, across = cluster.link(n, apart), cluster.link(replicas, n * apart)
            gradient, weight = numbers * model.gradient_bytes, numbers * model.weight_bytes
            reduce += (1 if zero else 2) * _pass(n, gradient, link) + 2 * _pass(replicas, gradient / n, across)
            gather += _pass(n, weight, link)
            sent += (n - 1) / n * (passes * (1 if zero else 2) * gradient + gathers * weight)
            sent += passes * 2 * (replicas - 1) / replicas * gradient / n
        # What is sent in one microbatch alone can hide beside that one alone.
        beside_reduce = backward * passes / m
        if zero == 3:
            total, beside, least = m * reduce + gathers * gather, forward + backward, (reduce + gather) / layers
            left = _exposed(total, cluster.overlap * beside, least)
        else:
            left = _exposed(passes * reduce, cluster.overlap * beside_reduce, reduce / layers)
            left += _exposed(gathers * gather, cluster.overlap * forward / m, gather / layers) if gathers else 0.0
        return left, sent

    def _memory(
        self, dense: float, experts: float, b: int, dp: int, pp: int, tp: int, cp: int, ep: int, shard: int,
        schedule: str, v: int, m: int, zero: int, recompute: str, full: float, on_rank: list[int], message: float,
    ) -> dict[str, float]:  # fmt: skip
        model, n = self.model, shard * cp
        numbers = (model.weight_bytes, model.gradient_bytes, model.optimizer_bytes)
        sharded = [1 if zero < stage else n for stage in (3, 2, 1)]
        weights, gradients, optimizer = (
            (dense / over + experts / max(1, over / ep)) * size for over, size in zip(sharded, numbers, strict=True)
        )
        # Of a stage and a microbatch: what its layers keep, and under pp its output, to which its gradient comes.
        layer = full * self.kept(b, tp, cp, "full")
        layer += (1 - full) * self.kept(b, tp, cp, "selective" if recompute == "full" else recompute)
        places = ((0, on_rank[0]), (pp - 1, on_rank[-1]))
        name = schedule or "1f1b"
        first, last = (
            _in_flight(name, pp, m, rank, v) * (layers / v * layer + (pp > 1) * message) for rank, layers in places
        )
        logits = b * model.sequence / cp * model.vocabulary / tp
        # As the output layer makes them, and as the loss has them: kept, and then their gradients.
        logits *= model.value_bytes + (model.value_bytes if model.loss_bytes is None else model.loss_bytes)
        # The last stage also keeps what the last norm and the output layer read, logits, and their log-softmax.
        activations = max(first, last + 2 * message + logits)
        shared, whole_, of_experts = model._of_a_layer()
        gathered = (shared / tp + whole_ + of_experts / ep / tp) * (zero == 3)
        buffers = max(
            logits + gathered * model.weight_bytes,  # backward begins: the gradients of both
            gathered * (2 * model.weight_bytes + model.gradient_bytes)  # backward of a layer
            + (full > 0) * self.kept(b, tp, cp, "selective"),
        )
        memory = {
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
            "buffers": buffers + (pp > 1) * (2 * v - 1) * m * message,
        }
        # A second copy of the weights: replicate's full one, or FSDP2's shard of what stays full.
        if dp * cp > 1 and (zero in (1, 2) or pp * tp > 1 and not zero):
            copied = dense / n + experts / max(1, n / ep) if zero else dense + experts
            memory["buffers"] += copied * model.weight_bytes
        if m == 1:  # gradients come while activations go
            memory["gradients"] = max(0.0, gradients - activations)
        return memory


def _slowest_rank(stages: Sequence[int], pp: int, head: float) -> float:
    """The time of the slowest rank, in layers."""
    return max(sum(stages[rank::pp]) + head * (rank == pp - 1) for rank in range(pp))


def _pass(n: int, size: float, link: Link) -> float:
    """Seconds of ``cost.ring_pass``."""
    return (n - 1) * (link.latency + size / n / link.bandwidth)


def _ring(n: int, size: float, link: Link) -> float:
    return 2 * _pass(n, size, link)


def _exposed(seconds: float, hidden: float, least: float) -> float:
    """The seconds that are not hidden: a layer's part at least, since nothing is computed beside it."""
    return max(0.0, seconds - hidden, min(seconds, least) if hidden else seconds)


_in_flight = functools.cache(cost.pipeline_peak_activations)


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
    """Plans on all devices, by :func:`predict`: those that fit by seconds, then the others.

    Tries each mesh whose tp divides the heads, whose pp has a layer for each stage, whose cp leaves a rank 4,096 tokens
    of a row, and whose dp divides the batch; microbatches of 1, 2, 4, 8 and 16 rows, or all; schedules with their own
    number of stages on a rank, interleaved 1F1B also with 4 and 8, and a number of microbatches that pp divides; ZeRO
    0 to 3 over all of dp, or over as many of its ranks as share a node; ep with experts. Of the recomputations, the
    first that fits: the order is that of what they cost, and where "full" alone fits, of as few layers as do. If none
    fits, the one that lacks least.

    Args:
        model: what is to be trained.
        cluster: where.
        batch: rows of a step, of all ranks.
        schedules: of the pipeline. Default: the three of :func:`predict`.
        recompute: which to try. Default: all; without "none" for torch's fused attention.

    Returns:
        list: of :class:`Plan`, the best first: those that fit by time, at equal times those that ``ddl`` can run, then
        those of fewer microbatches, which keep a device busier than this model knows, then by memory; after them those
        that do not, by what is short. What ``ddl`` cannot run is among them: see :attr:`Plan.lacks`.

    Raises:
        ValueError: if no mesh has all devices.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab.plan import A100, Cluster, Model, plan

            model = Model(layers=36, width=4096, heads=32, vocabulary=51200, sequence=2048)
            plans = plan(model, Cluster(16, **A100), batch=128)
            assert plans[0].fits and not plans[-1].fits
    """
    costs, found = _Costs(model, cluster, batch), []
    options = [one for one in RECOMPUTE if one in recompute]
    for mesh in _meshes(model, cluster, batch):
        for how in _mesh_options(model, cluster, batch, mesh, schedules):
            found.append(_least_recomputation(costs, mesh, how, options))
    if not found:
        raise ValueError(
            f"batch should be divisible by the dp of a mesh of {cluster.devices} devices, with tp a divisor of "
            f"{model.heads} heads and pp at most {model.layers} layers, but given {batch}"
        )

    def place(one: Plan) -> tuple:
        worth = sum(one.seconds.values()) if one.fits else one.short
        # Of sums in another order only some digits count: the others would choose between equal times.
        return not one.fits, float(f"{worth:.9g}"), one.lacks != (), one.microbatches, sum(one.memory.values())

    return sorted(found, key=place)


def _meshes(model: Model, cluster: Cluster, batch: int) -> Iterator[tuple[int, int, int, int]]:
    """dp, pp, tp and cp of all devices."""
    for tp in divisors(cluster.devices):
        for pp in divisors(cluster.devices // tp):
            for cp in divisors(cluster.devices // tp // pp):
                dp = cluster.devices // tp // pp // cp
                heads_divide = model.heads % tp == 0 and (model.kv_heads or model.heads) % tp == 0
                enough_tokens = cp == 1 or (model.sequence % (2 * cp) == 0 and model.sequence // cp >= 4096)
                if enough_tokens and heads_divide and pp <= model.layers and batch % dp == 0:
                    yield dp, pp, tp, cp


def _mesh_options(
    model: Model, cluster: Cluster, batch: int, mesh: tuple[int, int, int, int], schedules: Iterable[str]
) -> Iterator[tuple]:
    """ep, ranks that share states, schedule, chunks, microbatches and ZeRO's stage."""
    dp, pp, tp, cp = mesh
    each_ = batch // dp
    counts = sorted({each_ // rows for rows in (1, 2, 4, 8, 16) if each_ % rows == 0} | {1})
    inside = math.gcd(dp, max(1, cluster.node // (tp * cp)))  # dp ranks that share a node
    shards = [(0, dp)] + [(zero, n) for zero in (1, 2, 3) for n in {dp, inside} if n * cp > 1]
    experts = divisors(math.gcd(model.experts, dp)) if model.experts else [1]
    for schedule in schedules if pp > 1 else [""]:
        for v in (2, 4, 8) if schedule == "interleaved_1f1b" else [2] if "zero" in schedule else [1]:
            for m in counts:
                if pp * v > model.layers or m < pp or (v > 1 and m % pp):
                    continue
                for zero, shard in shards:
                    for ep in experts:
                        yield ep, shard, schedule, v, m, zero


def _least_recomputation(costs: _Costs, mesh: tuple[int, int, int, int], how: tuple, options: Sequence[str]) -> Plan:
    """The plan with as little recomputation as fits."""
    dp, pp, tp, cp = mesh
    tried = []
    for again in options:
        one = costs.plan(dp, pp, tp, cp, *how, again)
        if not one.fits:
            tried.append(one)
            continue
        if again == "full" and one.full_layers > 1:
            for n in _full_layers_to_try(costs, one, (dp, pp, tp, cp, *how)):
                some = costs.plan(dp, pp, tp, cp, *how, again, n)
                if some.fits:
                    return some
        return one
    return min(tried, key=lambda one: one.short)


def _full_layers_to_try(costs: _Costs, one: Plan, given: tuple) -> list[int]:
    """How many layers have to be recomputed in full, by what one of them frees, and one more."""
    none = costs.plan(*given, "full", 0)
    freed = (none.short - one.short) / one.full_layers
    n = math.ceil(none.short / freed) if freed > 0 else one.full_layers
    return [k for k in (n, n + 1) if 0 < k < one.full_layers]


def _checked(
    model: Model, cluster: Cluster, batch: int, dp: int, pp: int, tp: int, schedule: str, n_chunks: int | None,
    microbatches: int | None, cp: int, ep: int, recompute: str, full_layers: int | None,
) -> tuple[int, int]:  # fmt: skip
    """Refuses a plan that cannot be; returns the numbers of stages on each rank and of microbatches."""
    _check_mesh(model, cluster, dp, pp, tp, cp, ep)
    if full_layers is not None and recompute != "full":
        raise ValueError(f'full_layers is for recompute="full", but given {full_layers} with {recompute}')
    default_chunks = 1 if schedule == "1f1b" else 2
    n_chunks = 1 if pp == 1 else default_chunks if n_chunks is None else n_chunks
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


def _check_mesh(model: Model, cluster: Cluster, dp: int, pp: int, tp: int, cp: int, ep: int) -> None:
    if dp * pp * tp * cp > cluster.devices:
        also = f", with cp={cp}" if cp > 1 else ""
        raise ValueError(
            f"dp, pp and tp should be {cluster.devices} devices at most, but given {dp}, {pp} and {tp}{also}"
        )
    if model.heads % tp:
        raise ValueError(f"tp should divide {model.heads} heads, but given {tp}")
    if model.kv_heads and model.kv_heads % tp:
        raise ValueError(f"tp should divide {model.kv_heads} heads of keys and values, but given {tp}")
    if cp > 1 and model.sequence % cp:
        raise ValueError(f"cp should divide sequence={model.sequence}, but given {cp}")
    if ep > 1 and (dp % ep or not model.experts or model.experts % ep):
        raise ValueError(f"ep should divide dp={dp} and experts={model.experts}, but given {ep}")


@takes(plans=each(a("a Plan", Plan), "a list of plans"), n=COUNT)
def table(plans: Sequence[Plan], n: int = 10) -> str:
    """The first ``n`` plans, a line each.

    "*" marks what ``ddl`` cannot run, "~" seconds that are too close to those of the fastest plan that fits for a
    prediction to decide: a ratio of at most ``CLOSE_RATIO``. Of 167 pairs of published runs of one model on one kind of
    device, two of three have a ratio that is predicted within it (``course/published.py``). Measure such plans.

    Args:
        plans: of :func:`plan` or :func:`predict`.
        n: lines. Default: 10.

    Returns:
        str: mesh, schedule and its stages on a rank, microbatches and rows of one, zero ("1:8": over 8 of the dp
        ranks), recomputation ("full 3": of 3 layers), memory and what is short, seconds, MFU.
    """
    unit, name = _unit(plans[:n])
    lines = [
        f"{'dp × pp × tp':>14}  {'schedule':<23} {'m × rows':>9} {'zero':>6}  {'recompute':<10} {name:>7} {'short':>7} "
        f"{'seconds':>8} {'MFU':>4}"
    ]
    fastest = min((sum(one.seconds.values()) for one in plans if one.fits), default=0.0)
    for one in plans[:n]:
        rows, seconds = one.batch // one.dp // one.microbatches, sum(one.seconds.values())
        mesh = _mesh_of(one)
        schedule = f"{one.schedule} {one.n_chunks}" if one.schedule == "interleaved_1f1b" else one.schedule or "-"
        zero = f"{one.zero}:{one.dp_shard}" if one.zero and one.dp_shard < one.dp else one.zero
        some = one.recompute == "full" and one.full_layers < sum(one.stages[:: one.pp])
        again = f"full {one.full_layers}" if some else one.recompute
        close = "~" if one.fits and fastest < seconds <= CLOSE_RATIO * fastest else ""
        lines.append(
            f"{mesh:>14}  {schedule:<23} {f'{one.microbatches} × {rows}':>9} {zero:>6}  {again:<10} "
            f"{sum(one.memory.values()) / unit:>7.1f} {'' if one.fits else f'{one.short / unit:.1f}':>7} "
            f"{close + (f'{seconds:.3g}' if seconds < 999.5 else f'{seconds:,.0f}'):>8} {one.mfu:>4.0%}"
            f"{' *' if one.lacks else ''}"
        )
    return "\n".join(lines)


def _mesh_of(plan: Plan) -> str:
    """Its axes in words: 8 × 2 × 1, with cp and ep behind if it has them."""
    others = (f" {axis}{size}" for axis, size in (("cp", plan.cp), ("ep", plan.ep)) if size > 1)
    return f"{plan.dp} × {plan.pp} × {plan.tp}" + "".join(others)


def _unit(plans: Sequence[Plan]) -> tuple[float, str]:
    """The largest unit of bytes that the plan with the most memory fills."""
    most = max((sum(one.memory.values()) for one in plans), default=1e9)
    return next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if most >= unit), (1e3, "kB"))


@takes(
    plans=each(a("a Plan", Plan), "a list of plans, at least one", least=1), title=TEXT,
    colour=one_of("dp", "pp", "tp", "cp", "zero"),
)  # fmt: skip
def figure(plans: Sequence[Plan], title: str = "Every plan: time against memory", colour: str = "pp") -> Figure:
    """Seconds of a step against memory, a dot for each plan: colour is the mesh's pp, grey does not fit.

    The fastest and the slowest of those that fit have their meshes beside them.

    Args:
        plans: of :func:`plan`, of one cluster.
        title: what the figure shows.
        colour: what colours stand for, "dp", "pp" (default), "tp", "cp" or "zero".

    Returns:
        the figure.
    """
    from matplotlib import colormaps

    from ignite_ddl.lab import draw

    made, axes = draw.new_figure(title, height=3.6)
    unit, name = _unit(plans)
    sizes = sorted({getattr(one, colour) for one in plans})
    colours = draw.RANK[1:]
    if len(sizes) > len(colours):
        colours = [colormaps["turbo"]((place + 0.5) / len(sizes)) for place in range(len(sizes))]
    shades = dict(zip(sizes, colours, strict=False))
    for one in reversed(plans):
        at = sum(one.memory.values()) / unit, sum(one.seconds.values())
        shade = shades.get(getattr(one, colour), draw.GREY) if one.fits else draw.GREY
        axes.plot(*at, "o", color=shade, markersize=5, alpha=0.9 if one.fits else 0.35, markeredgewidth=0)
    limit = (sum(plans[0].memory.values()) - plans[0].short) / unit
    axes.axvline(limit, color=draw.INK, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel=f"memory of a device, {name}", ylabel="seconds a step")
    for (low, high), ticks in ((axes.get_xlim(), axes.set_xticks), (axes.get_ylim(), axes.set_yticks)):
        steps = (1, 2, 5) if high > 10 * low else range(1, 10)
        ticks([n * 10**power for power in range(-3, 7) for n in steps if low < n * 10**power < high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    fitting = sorted((one for one in plans if one.fits), key=lambda one: sum(one.seconds.values()))
    for one in [*fitting[:1], *fitting[1:][-1:]]:
        at = sum(one.memory.values()) / unit, sum(one.seconds.values())
        draw.note(axes, _mesh_of(one), at, (-6, 0), ha="right")
    grey = {} if len(fitting) == len(plans) else {"does not fit": draw.GREY}
    draw.key(made, {f"{colour} {size}": shade for size, shade in shades.items()} | grey)
    return draw.on_any_page(made)
