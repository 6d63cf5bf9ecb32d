"""What parallel training costs, on paper: seconds, bytes and messages in closed form.

Every function says where its formula is from, in which units, and what it leaves out. Times are in seconds, sizes in
bytes, and a network is two numbers (a :class:`Link`): the latency of a message and the bandwidth.
A rank sends one message at a time and can receive one at the same time; additions take no time. ``simulate``
computes the same quantities message by message, ``timeline`` measures them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ignite_ddl.arguments import AMOUNT, AMOUNTS, FLAG, POSITIVE, SHARE, Fits, a, check, number, one_of, takes, whole

__all__ = [
    "RESNET50_P100",
    "Collective",
    "DDPStep",
    "ForwardBackward",
    "Link",
    "LocalRound",
    "MasterStep",
    "ScaledStep",
    "ServerStep",
    "ShardedStep",
    "ZeroMemory",
    "activation_bytes",
    "all_reduce_naive",
    "all_reduce_ring",
    "all_reduce_tree",
    "batch_size_of_same_noise",
    "checkpoint_interval",
    "data_parallel_step",
    "ddp_buckets",
    "ddp_step",
    "goodput",
    "local_round",
    "master_step",
    "noise_scale",
    "parameter_server_step",
    "pipeline_bubble",
    "pipeline_peak_activations",
    "ring_attention",
    "ring_pass",
    "tensor_parallel_bytes",
    "transformer_flops",
    "transformer_parameters",
    "ulysses_attention",
    "zero_bubble_seconds",
    "sharded_step",
    "zero_memory",
]


@takes(latency=AMOUNT, bandwidth=number(above=0, most=math.inf))
@dataclass(frozen=True)
class Link:
    """The alpha-beta model of a network: a message of n bytes takes ``latency + n / bandwidth`` seconds.

    Source: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994), from memory: there bandwidth
    is r_inf and latency t_0. Assumes that every pair of ranks is equally near and that the switch is never the
    bottleneck.

    Args:
        latency: seconds that a message costs before its first byte (alpha).
        bandwidth: bytes per second in each direction (1 / beta).

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            ethernet = cost.Link(latency=20e-6, bandwidth=1.25e9)     # 10 Gbit/s
            assert ethernet.seconds(1_250_000) == 20e-6 + 1e-3
    """

    latency: float
    bandwidth: float

    @takes(n_bytes=AMOUNT)
    def seconds(self, n_bytes: float) -> float:
        """The time of one message of ``n_bytes`` bytes."""
        return self.latency + n_bytes / self.bandwidth


# What fits the arguments of cost and simulate, by their names.
WHOLE, _RANKS = whole(floats=True), whole(most=10**6, floats=True)
_AMOUNTS = (
    "n_bytes weight_bytes input_bytes output_bytes gradient_bytes optimizer_bytes value_bytes mask_bytes "
    "activation_bytes loss_bytes first_bucket_bytes forward_seconds backward_seconds loss_seconds compute_seconds "
    "server_seconds transfer overhead save restart work interval mean_time learning_rate n_parameters n_samples "
    "sequence hidden kv_hidden heads layers vocabulary gradient_value_bytes"
)
FITS = {
    **dict.fromkeys(_AMOUNTS.split(), AMOUNT),
    **dict.fromkeys(("n_ranks", "n_workers", "n_servers", "n_chunks", "n_nodes"), _RANKS),
    **dict.fromkeys(("n_microbatches", "n_steps", "batch_size", "batch_per_rank"), WHOLE),
    **dict.fromkeys(("bucket_bytes", "parameter_bytes", "ready"), AMOUNTS),
    "link": a("a cost.Link", Link),
    "overlap": SHARE,
    "recompute": FLAG,
    "rank": whole(0, floats=True),
}


def when_full(bucket_bytes: Sequence[float], backward_seconds: float, ready: Sequence[float] | None) -> list[float]:
    """When each of DDP's buckets is full, in seconds from the start of backward; by default in proportion to bytes."""
    if ready is None:
        total, filled = sum(bucket_bytes), itertools.accumulate(bucket_bytes)
        return [min(backward_seconds, backward_seconds * size / (total or 1)) for size in filled]
    if len(ready) != len(bucket_bytes):
        raise ValueError(f"ready should have a time for each of {len(bucket_bytes)} buckets, but has {len(ready)}")
    times = [0, *ready, backward_seconds]
    if not all(one <= after for one, after in zip(times, times[1:], strict=False)):
        raise ValueError(
            f"ready should rise from 0 to backward_seconds={backward_seconds} at most, but given {list(ready)}"
        )
    return list(ready)


class Collective(NamedTuple):
    """What a collective costs.

    Attributes:
        seconds: from the time at which all ranks enter until the last one leaves.
        messages: how many messages each rank sends, in rank order.
        bytes: how many bytes each rank sends, in rank order.
    """

    seconds: float
    messages: list[int]
    bytes: list[float]


# --------------------------------------------------------------------------------------------- all-reduce


@takes(FITS)
def all_reduce_naive(n_ranks: int, n_bytes: float, link: Link) -> Collective:
    """Each rank sends its whole buffer to every other rank: n - 1 messages per rank, one after the other.

    seconds = (n - 1) (alpha + n_bytes beta). Source: by definition; each rank starts with a different receiver, so
    that no rank receives two messages at once.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network between any two ranks.

    Returns:
        Collective: seconds, and messages and bytes sent by each rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            cost = cost.all_reduce_naive(4, 48, cost.Link(latency=0, bandwidth=1))
            assert cost.bytes == [144, 144, 144, 144] and cost.seconds == 144
    """
    others = n_ranks - 1
    return Collective(others * link.seconds(n_bytes), [others] * n_ranks, [others * n_bytes] * n_ranks)


@takes(FITS)
def all_reduce_tree(n_ranks: int, n_bytes: float, link: Link) -> Collective:
    """A reduction up a binomial tree and a broadcast down it: 2 ceil(log2 n) rounds with the whole buffer.

    seconds = 2 ceil(log2 n) (alpha + n_bytes beta). Source: Thakur, Rabenseifner, Gropp, "Optimization of
    Collective Communication Operations in MPICH", IJHPCA 19 (2005), from memory (binomial reduce and broadcast).
    Rank r sends its sum to r minus its lowest set bit; all ranks together send 2 (n - 1) messages.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network between any two ranks.

    Returns:
        Collective: seconds, and messages and bytes sent by each rank. They differ by rank: rank 0 only broadcasts.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            cost = cost.all_reduce_tree(4, 48, cost.Link(latency=1, bandwidth=1e30))
            assert cost.messages == [2, 1, 2, 1] and cost.seconds == 4
    """
    rounds = (n_ranks - 1).bit_length()  # ceil(log2(n_ranks)), exactly
    messages = []
    for rank in range(n_ranks):
        up = 1 if rank else 0
        span = rank & -rank if rank else 1 << rounds  # the largest possible size of this rank's subtree
        down = sum(rank + (1 << k) < n_ranks for k in range(span.bit_length() - 1))
        messages.append(up + down)
    return Collective(2 * rounds * link.seconds(n_bytes), messages, [m * n_bytes for m in messages])


@takes(FITS)
def all_reduce_ring(n_ranks: int, n_bytes: float, link: Link) -> Collective:
    """A ring reduce-scatter and a ring all-gather, in chunks of n_bytes / n.

    seconds = 2 (n - 1) (alpha + n_bytes beta / n); each rank sends 2 (n - 1) / n of its buffer, which is the lower
    bound for the busiest rank. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", JPDC 69 (2009); from memory, so without sections. Assumes equal chunks.

    Args:
        n_ranks: size of the world.
        n_bytes: size of one rank's buffer.
        link: the network between neighbours.

    Returns:
        Collective: seconds, and messages and bytes sent by each rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            cost = cost.all_reduce_ring(4, 48, cost.Link(latency=0, bandwidth=1))
            assert cost.bytes == [72, 72, 72, 72] and cost.messages == [6, 6, 6, 6]
    """
    one = ring_pass(n_ranks, n_bytes, link)
    return Collective(2 * one.seconds, [2 * m for m in one.messages], [2 * b for b in one.bytes])


def _ring_bytes(n_ranks: int, n_bytes: float) -> float:
    """Bytes that each rank sends in one pass of a ring over a buffer of ``n_bytes``: (n - 1) / n of it."""
    return (n_ranks - 1) * n_bytes / n_ranks  # not (n_ranks - 1) * (n_bytes / n_ranks): whole numbers stay whole


@takes(FITS)
def ring_pass(n_ranks: int, n_bytes: float, link: Link) -> Collective:
    """One pass of a ring: a reduce-scatter or an all-gather.

    seconds = (n - 1) (alpha + n_bytes beta / n). Source: the comment in MPICH's
    ``src/mpi/coll/allgather/allgather_intra_ring.c``; from memory also Thakur et al. 2005 (ring all-gather).

    Args:
        n_ranks: size of the world.
        n_bytes: size of the whole buffer: the input of a reduce-scatter, the output of an all-gather.
        link: the network between neighbours.

    Returns:
        Collective: seconds, and messages and bytes sent by each rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            assert cost.ring_pass(4, 48, cost.Link(latency=0, bandwidth=1)).bytes == [36] * 4
    """
    steps = n_ranks - 1
    each = _ring_bytes(n_ranks, n_bytes)
    return Collective(steps * link.seconds(n_bytes / n_ranks), [steps] * n_ranks, [each] * n_ranks)


# ------------------------------------------------------------------- master, parameter server, DDP


class MasterStep(NamedTuple):
    """What a step of the master scheme costs.

    Attributes:
        seconds: the whole step.
        communication_seconds: the time during which the master sends or receives.
        sent: bytes that the master sends.
        received: bytes that the master receives.
        messages: messages that the master sends or receives.
        phases: seconds of each phase by name, in order.
    """

    seconds: float
    communication_seconds: float
    sent: float
    received: float
    messages: int
    phases: dict[str, float]


@takes(FITS)
def master_step(
    n_ranks: int,
    weight_bytes: float,
    input_bytes: float,
    output_bytes: float,
    link: Link,
    forward_seconds: float = 0.0,
    backward_seconds: float = 0.0,
    loss_seconds: float = 0.0,
) -> MasterStep:
    """One step with rank 0 as the master of all other ranks, as in ``torch.nn.DataParallel``.

    The master sends weights and inputs, gathers the outputs (logits), computes the loss, sends back the gradients of
    the outputs, gathers the gradients of the weights and updates. It sends or receives one message at a time, n - 1
    in each phase: communication grows with n, while each rank's compute shrinks with 1 / n. Source: a note of
    boostcamp AI Tech on the basic concepts of parallelism (in Korean), steps "initialise" to "backward"; the sum is
    by definition.

    Args:
        n_ranks: size of the world, including the master, which computes too.
        weight_bytes: size of all weights, and of their gradients.
        input_bytes: size of the whole batch; each rank gets 1 / n of it.
        output_bytes: size of the outputs of the whole batch, and of their gradients.
        link: the network between the master and each other rank.
        forward_seconds: forward of the whole batch on one rank. Default: 0.
        backward_seconds: backward of the whole batch on one rank. Default: 0.
        loss_seconds: the loss of the whole batch, at the master. Default: 0.

    Returns:
        MasterStep: seconds, and bytes through the master.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            step = cost.master_step(4, 1000, 80, 40, cost.Link(latency=0, bandwidth=1))
            assert step.sent == 3 * (1000 + 20 + 10) and step.received == 3 * (10 + 1000)
    """
    others, share = n_ranks - 1, 1 / n_ranks
    messages = {
        "send weights": weight_bytes,
        "scatter inputs": input_bytes * share,
        "gather outputs": output_bytes * share,
        "scatter output gradients": output_bytes * share,
        "gather gradients": weight_bytes,
    }
    times = {name: others * link.seconds(size) for name, size in messages.items()}
    work = {"forward": forward_seconds * share, "loss": loss_seconds, "backward": backward_seconds * share}
    order = ["send weights", "scatter inputs", "forward", "gather outputs", "loss"]
    order += ["scatter output gradients", "backward", "gather gradients"]
    phases = {name: (times | work)[name] for name in order}
    received = others * (messages["gather outputs"] + messages["gather gradients"])
    sent = others * sum(messages.values()) - received
    return MasterStep(sum(phases.values()), sum(times.values()), sent, received, 5 * others, phases)


class ServerStep(NamedTuple):
    """What a synchronous step with parameter servers costs.

    Attributes:
        seconds: the whole step.
        communication_seconds: pull and push.
        server_bytes: bytes that one server sends and receives.
        worker_bytes: bytes that one worker sends and receives.
        server_messages: messages that one server sends and receives.
    """

    seconds: float
    communication_seconds: float
    server_bytes: float
    worker_bytes: float
    server_messages: int


@takes(FITS)
def parameter_server_step(
    n_workers: int, weight_bytes: float, link: Link, n_servers: int = 1, compute_seconds: float = 0.0
) -> ServerStep:
    """A synchronous step: every worker pulls the weights, computes, pushes its gradients.

    With k servers each holds 1 / k of the weights. Pull and push each take max(n, k) (alpha + W beta / k): a server
    sends or receives n messages one by one, a worker k, and the larger number decides. Source: by definition of the
    one-port model; that the bound is reached is open-shop scheduling with equal times (server j begins with worker
    j). The scheme: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 3.
    The update itself takes no time.

    Args:
        n_workers: how many workers, servers not counted.
        weight_bytes: all weights; their gradients are as large.
        link: the network between a worker and a server.
        n_servers: how many servers share the weights. Default: 1.
        compute_seconds: forward and backward of one worker's part. Default: 0.

    Returns:
        ServerStep: seconds, and bytes through a server and a worker.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            link = cost.Link(latency=0, bandwidth=1)
            assert cost.parameter_server_step(8, 100, link).seconds == 1600
            assert cost.parameter_server_step(8, 100, link, n_servers=4).seconds == 400
    """
    part = weight_bytes / n_servers
    communication = 2 * max(n_workers, n_servers) * link.seconds(part)
    return ServerStep(
        seconds=communication + compute_seconds,
        communication_seconds=communication,
        server_bytes=2 * n_workers * part,
        worker_bytes=2 * weight_bytes,
        server_messages=2 * n_workers,
    )


class DDPStep(NamedTuple):
    """What a step of DistributedDataParallel costs.

    Attributes:
        seconds: forward, backward, and the communication that does not overlap with backward.
        communication_seconds: the time of all buckets' all-reduces.
        exposed_seconds: the part of it that does not overlap with backward.
    """

    seconds: float
    communication_seconds: float
    exposed_seconds: float


@takes(FITS)
def ddp_step(
    n_ranks: int,
    bucket_bytes: Sequence[float],
    link: Link,
    forward_seconds: float = 0.0,
    backward_seconds: float = 0.0,
    ready: Sequence[float] | None = None,
) -> DDPStep:
    """A step whose gradients are all-reduced by a ring, bucket by bucket, during backward.

    The all-reduce of bucket i starts at ready_i, or later when that of bucket i - 1 ends, so that the last one ends
    at max over k of (ready_k + c_k + c_k+1 + ...), c being the buckets' all-reduce times. Source: Li et al.,
    "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3
    (the overlap; the maximum is by definition). Assumes that communication does not slow compute down.

    Args:
        n_ranks: size of the world.
        bucket_bytes: the buckets in the order in which backward fills them, the last layers first.
        link: the network between neighbours.
        forward_seconds: one rank's forward. Default: 0.
        backward_seconds: one rank's backward. Default: 0.
        ready: when each bucket is full, in seconds from the start of backward, in ascending order.
            Default: in proportion to the bytes.

    Returns:
        DDPStep: seconds.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            link = cost.Link(latency=0, bandwidth=1)
            step = cost.ddp_step(2, [4, 4], link, forward_seconds=5, backward_seconds=10)
            assert step.communication_seconds == 8 and step.exposed_seconds == 4    # the first bucket hides
    """
    ready = when_full(bucket_bytes, backward_seconds, ready)
    times = [all_reduce_ring(n_ranks, size, link).seconds for size in bucket_bytes]
    end = max([backward_seconds] + [at + sum(times[k:]) for k, at in enumerate(ready)])
    return DDPStep(forward_seconds + end, sum(times), end - backward_seconds)


@takes(FITS, bucket_bytes=AMOUNT)
def ddp_buckets(
    parameter_bytes: Sequence[int], bucket_bytes: int | None = None, first_bucket_bytes: int | None = None
) -> list[int]:
    """The sizes of DDP's buckets, in the order in which backward fills them.

    Parameters are added from the last to the first, and a bucket is closed once it holds its cap or more; with the
    default cap the first bucket is small, so that communication begins early. Source: Li et al. 2020, section 3.2.2;
    for the caps torch 2.13's ``nn/parallel/distributed.py`` and ``_compute_bucket_assignment_by_size``. Assumes one
    device and dtype, and gradients ready in the reverse order of ``model.parameters()``; DDP rebuilds its buckets in
    the actual order after its first step.

    Args:
        parameter_bytes: the parameters' sizes, in the order of ``model.parameters()``.
        bucket_bytes: the cap, DDP's ``bucket_cap_mb`` times 2 ** 20. Default: DDP's own, 25 MiB.
        first_bucket_bytes: the first bucket's cap. Default: as in DDP, 1 MiB if ``bucket_bytes`` is not given, else
            ``bucket_bytes``.

    Returns:
        list: bytes of each bucket.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            assert cost.ddp_buckets([10, 10, 10, 10], bucket_bytes=20) == [20, 20]
            assert cost.ddp_buckets([10, 10, 10, 10], bucket_bytes=20, first_bucket_bytes=5) == [10, 20, 10]
            assert cost.ddp_buckets([2**20] * 27) == [2**20, 25 * 2**20, 2**20]
    """
    if first_bucket_bytes is None:
        first_bucket_bytes = 2**20 if bucket_bytes is None else bucket_bytes
    if bucket_bytes is None:
        bucket_bytes = 25 * 2**20
    buckets, filled = [], 0
    for size in reversed(parameter_bytes):
        filled += size
        if filled >= (bucket_bytes if buckets else first_bucket_bytes):
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


class LocalRound(NamedTuple):
    """What a round of local steps costs.

    Attributes:
        seconds: of the whole round.
        compute_seconds: of its steps alone.
        loss_seconds: of the global losses, one message after each step.
        average_seconds: of the average of the weights at its end.
        bytes: how many bytes a rank sends in it.
    """

    seconds: float
    compute_seconds: float
    loss_seconds: float
    average_seconds: float
    bytes: float


@takes(FITS)
def local_round(
    n_ranks: int, n_steps: int, compute_seconds: float, weight_bytes: float, link: Link, loss_bytes: float = 56
) -> LocalRound:
    """A round of ``ddl.LocalSGD`` or ``ddl.DiLoCo``: local steps, each with its global loss, then one average.

    seconds = n_steps (compute_seconds + R(loss_bytes)) + R(8) + R(weight_bytes), where R is
    :func:`all_reduce_ring`; the 8 bytes are what a rank has counted. Source: Douillard et al., "DiLoCo: Distributed
    Low-Communication Training of Language Models", arXiv:2311.08105 (2023), algorithm 1, with the messages of this
    package. Leaves out that the loss is reduced during the backward pass, stragglers, and the outer optimizer's time.

    Args:
        n_ranks: the dp ranks.
        n_steps: optimizer steps per round, H; with 1, about the time of all-reduce without overlap.
        compute_seconds: of a step on a rank.
        weight_bytes: of the weights that a rank trains.
        link: the network between neighbours.
        loss_bytes: that each step reduces: 56 without pp, and 16 more for each further pp rank.

    Returns:
        LocalRound: seconds and bytes.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            gigabit = cost.Link(latency=0.02, bandwidth=125e6)              # between two cities
            each, rare = (cost.local_round(2, steps, 0.5, 4e9, gigabit) for steps in (1, 500))
            assert 32 < each.seconds < 33 and 0.5 < rare.seconds / 500 < 0.7
    """
    losses, counted, average = (all_reduce_ring(n_ranks, n, link) for n in (loss_bytes, 8, weight_bytes))
    compute, loss, end = n_steps * compute_seconds, n_steps * losses.seconds, counted.seconds + average.seconds
    sent = n_steps * losses.bytes[0] + counted.bytes[0] + average.bytes[0]
    return LocalRound(compute + loss + end, compute, loss, end, sent)


class ScaledStep(NamedTuple):
    """A data-parallel step at one size of the world.

    Attributes:
        n_ranks: the world.
        batch_size: rows over all ranks.
        seconds: the whole step.
        communication_seconds: the communication that does not overlap with backward.
        share: the same as a share of the step.
        efficiency: rows per second and rank, relative to training on one rank.
    """

    n_ranks: int
    batch_size: int
    seconds: float
    communication_seconds: float
    share: float
    efficiency: float


# ResNet-50 on ImageNet, 32 images a GPU, as in the lecture of Kazuhiro Yamasaki (NVIDIA, 2019, in Japanese): 8K on
# 256 GPUs, 32K on 1024. Sources:
RESNET50_P100 = {
    "batch_per_rank": 32,  # the lecture; Goyal et al. 2017, section 5.1
    "gradient_bytes": 100e6,  # 25 million parameters of 4 bytes: Goyal et al. 2017, section 4.3
    "forward_seconds": 0.060,  # ASSUMED: half of backward
    "backward_seconds": 0.120,  # on one P100: Goyal et al. 2017, section 4.3
    "overlap": 0.0,  # ASSUMED: no overlap with backward
    # 50 Gbit/s is what a server of 8 GPUs has (section 4.3); a ring leaves each server once. ASSUMED: 10 us a message.
    "link": Link(latency=10e-6, bandwidth=6.25e9),
}


@takes(FITS)
def data_parallel_step(
    n_ranks: int,
    gradient_bytes: float,
    link: Link,
    forward_seconds: float,
    backward_seconds: float,
    batch_per_rank: int = 1,
    overlap: float = 0.0,
) -> ScaledStep:
    """A data-parallel step with a ring all-reduce, at a fixed batch size per rank (weak scaling).

    communication = max(0, ring - overlap * backward). Source: :func:`all_reduce_ring`; ``RESNET50_P100`` reproduces
    the figures of Kazuhiro Yamasaki's lecture (NVIDIA, 2019: a fifth of the time in communication on 1024 GPUs); its
    comments say which numbers are from a paper and which are assumed. Assumes one flat ring: real clusters reduce
    inside a machine first.

    Args:
        n_ranks: size of the world.
        gradient_bytes: size of all gradients.
        link: the network between neighbours.
        forward_seconds: forward of one rank's batch.
        backward_seconds: backward of one rank's batch.
        batch_per_rank: rows per rank. Default: 1.
        overlap: share of backward that can overlap with communication, 0 to 1. Default: 0.

    Returns:
        ScaledStep: batch size, seconds, share of communication, efficiency.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            steps = [cost.data_parallel_step(n, **cost.RESNET50_P100) for n in (256, 1024)]
            assert [step.batch_size for step in steps] == [8192, 32768]
            assert steps[1].share > 0.2 > steps[0].share
    """
    compute = forward_seconds + backward_seconds
    ring = all_reduce_ring(n_ranks, gradient_bytes, link).seconds
    exposed = max(0.0, ring - overlap * backward_seconds)
    seconds = compute + exposed
    shares = (exposed / seconds, compute / seconds) if seconds else (0.0, 1.0)
    return ScaledStep(n_ranks, n_ranks * batch_per_rank, seconds, exposed, *shares)


# ----------------------------------------------------------------------------------------- large batches


@takes(FITS, momentum=Fits("a number of at least 0, and below 1", number(0, math.nextafter(1, 0)).read))
def noise_scale(learning_rate: float, batch_size: int, n_samples: int, momentum: float = 0.0) -> float:
    """The noise scale of SGD: g = learning_rate / (1 - momentum) (N / B - 1).

    Its unit is that of the learning rate. A step without momentum is a step along the gradient of the whole set plus
    noise, whose covariance is learning_rate / N * g times that of one sample's gradient. For B much below N, g is
    learning_rate N / (B (1 - momentum)): doubling the batch size has the effect of halving the learning rate.
    Source: Smith and Le, "A Bayesian perspective on generalization and stochastic gradient descent", ICLR 2018, the
    section on stochastic differential equations (without momentum); Smith, Kindermans, Ying, Le, "Don't decay the
    learning rate, increase the batch size", ICLR 2018, the section on the effective learning rate (with it). The
    sections are named after summaries. Assumes small steps (SGD as a stochastic differential equation) and
    independent samples; says nothing about the first, noise-free phase.

    Args:
        learning_rate: of SGD.
        batch_size: rows per step, over all ranks.
        n_samples: rows in the training set.
        momentum: of SGD, at least 0 and below 1. Default: 0.

    Returns:
        float: g.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            g = cost.noise_scale(learning_rate=0.1, batch_size=100, n_samples=1000, momentum=0.9)
            assert abs(g - 9.0) < 1e-12
    """
    check("n_samples", n_samples, number(batch_size))
    return learning_rate / (1 - momentum) * (n_samples / batch_size - 1)


@takes(FITS, new_learning_rate=POSITIVE)
def batch_size_of_same_noise(batch_size: int, learning_rate: float, new_learning_rate: float, n_samples: int) -> float:
    """The batch size that has, at a new learning rate, the noise scale of the old batch size and learning rate.

    B' = N / (1 + learning_rate / new_learning_rate (N / B - 1)), which is :func:`noise_scale` solved for B at the
    same momentum. With ``new_learning_rate`` ten times larger B' is nearly ten times B. To replace a learning rate
    decay by a larger batch, pass the decayed rate as ``learning_rate`` and the undecayed one as
    ``new_learning_rate``. Source: the algebra; that equal noise gives an equal training curve: Smith, Kindermans,
    Ying, Le, ICLR 2018, on simulated annealing. Assumes what :func:`noise_scale` assumes, a rate at which training is
    stable, and enough steps after the change for the momentum buffer to adapt.

    Args:
        batch_size: B.
        learning_rate: the rate that goes with B.
        new_learning_rate: the rate to find the batch size for.
        n_samples: rows in the training set, N.

    Returns:
        float: B', not rounded.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            # Decay the rate from 0.1 to 0.02 at batch size 64, or keep 0.1 and increase the batch size to:
            assert round(cost.batch_size_of_same_noise(64, 0.02, 0.1, n_samples=60_000)) == 319
    """
    check("n_samples", n_samples, number(batch_size))
    return n_samples / (1 + learning_rate / new_learning_rate * (n_samples / batch_size - 1))


# -------------------------------------------------------------------------------------- sharded states


class ZeroMemory(NamedTuple):
    """Bytes on each rank.

    Attributes:
        weights: the parameters in the precision of compute.
        gradients: the gradients.
        optimizer: the optimizer states, with the parameters in full precision if it keeps them.
        total: the sum.
    """

    weights: float
    gradients: float
    optimizer: float
    total: float


@takes(FITS, stage=one_of(*range(4)))
def zero_memory(
    n_parameters: float,
    n_ranks: int,
    stage: int,
    weight_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> ZeroMemory:
    """Model states on each rank: ZeRO stage 1 shards the optimizer states, 2 also the gradients, 3 also the weights.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    sections 3.1 and 5, figure 1 and table 1: (2 + 2 + K) bytes a parameter, K = 12 for Adam in mixed precision
    (weights, momentum and variance of 4 bytes each). Excludes activations, buffers, fragmentation and, in stage 3, the
    layer that is currently gathered.

    Args:
        n_parameters: of the whole model.
        n_ranks: ranks that share the states.
        stage: 0 (plain data parallel) to 3 (FSDP's full sharding).
        weight_bytes: bytes per parameter in compute. Default: 2; 4 in float32, 8 in float64.
        gradient_bytes: bytes of its gradient. Default: 2.
        optimizer_bytes: K, bytes of its optimizer states. Default: 12; in float32 plain SGD 0, with momentum 4, Adam 8.

    Returns:
        ZeroMemory: bytes.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            gigabytes = [cost.zero_memory(7.5e9, 64, stage).total / 1e9 for stage in range(4)]
            assert [round(x, 1) for x in gigabytes] == [120.0, 31.4, 16.6, 1.9]      # figure 1 of the paper
    """
    sizes = [optimizer_bytes, gradient_bytes, weight_bytes]  # in the order in which they are sharded
    held = [n_parameters * size / (n_ranks if stage > place else 1) for place, size in enumerate(sizes)]
    optimizer, gradients, weights = held
    return ZeroMemory(weights, gradients, optimizer, weights + gradients + optimizer)


class ShardedStep(NamedTuple):
    """What a rank sends and holds in one optimizer step of FSDP2.

    Attributes:
        gathered: bytes that the rank sends to gather weights.
        scattered: bytes that it sends to add and shard gradients.
        reduced: bytes that it sends to add its shard of the gradients over replicas.
        between: bytes of the weights that it holds between forward and backward.
    """

    gathered: float
    scattered: float
    reduced: float
    between: float


@takes(FITS, n_shards=_RANKS, n_replicas=_RANKS, accumulation=WHOLE, reshard_after_forward=FLAG)
def sharded_step(
    n_bytes: float, n_shards: int, n_replicas: int = 1, accumulation: int = 1, reshard_after_forward: bool = True
) -> ShardedStep:
    """What a rank sends and holds in a step with ``shard=True`` or ``dp_shard=``, if rings carry out the collectives.

    With ``reshard_after_forward`` weights are gathered for each forward and each backward pass, else once for all
    passes of the step. Gradients are scattered once, after the last pass, and a shard of them is added over replicas.

    Source: of the passes, Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC 2020, section 7.2.2; of the ring, :func:`ring_pass`. Compared with counted bytes of ``ddl.auto_model`` on gloo,
    where the layers are of a size that the ranks divide: torch pads others.

    Args:
        n_bytes: of all weights in the precision of compute; gradients are counted as large.
        n_shards: dp, or dp_shard.
        n_replicas: dp_replicate. Default: 1.
        accumulation: batches in a step. Default: 1.
        reshard_after_forward: as in ``ddl.auto_model``. Default: True.

    Returns:
        ShardedStep: bytes.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            thrifty = cost.sharded_step(100, 4, accumulation=4)
            quick = cost.sharded_step(100, 4, accumulation=4, reshard_after_forward=False)
            assert (thrifty.gathered, quick.gathered) == (8 * 75, 75) and thrifty.scattered == 75
            assert (thrifty.between, quick.between) == (25, 100)
    """
    one = n_bytes * (n_shards - 1) / n_shards
    gathers = 2 * accumulation if reshard_after_forward else 1
    reduced = 2 * n_bytes / n_shards * (n_replicas - 1) / n_replicas
    return ShardedStep(gathers * one, one, reduced, n_bytes / n_shards if reshard_after_forward else n_bytes)


# ---------------------------------------------------------------------------------------- pipelines


@takes(FITS)
def pipeline_bubble(n_ranks: int, n_microbatches: int, n_chunks: int = 1) -> float:
    """The share of a pipeline step in which a rank is idle: (p - 1) / (v m + p - 1).

    For GPipe and 1F1B v is 1; interleaved 1F1B gives each rank v chunks of layers. Source: Huang et al., "GPipe",
    NeurIPS 2019, section 2.3; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, sections 2.2.1 and 2.2.2, whose (p - 1) / (v m) is the same idle time as a share of the
    *busy* time ("ideal" there). Assumes equal stages, free transfers, and for v > 1 that m is a multiple of p.

    Args:
        n_ranks: p, ranks of the pipeline.
        n_microbatches: m.
        n_chunks: v, stages on each rank. Default: 1.

    Returns:
        float: idle time / step time, from 0 to 1.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            assert cost.pipeline_bubble(4, 8) == 3 / 11
            assert cost.pipeline_bubble(4, 8, n_chunks=2) == 3 / 19
    """
    return (n_ranks - 1) / (n_chunks * n_microbatches + n_ranks - 1)


@takes(
    FITS, schedule=one_of("1f1b", "zb-h1", "zb-h2", "zb-v"),
    **dict.fromkeys(("forward", "backward_input", "backward_weight"), AMOUNT),
)  # fmt: skip
def zero_bubble_seconds(
    n_ranks: int, forward: float, backward_input: float, backward_weight: float, schedule: str = "zb-h1"
) -> float:
    """Idle seconds per rank and step with backward split into its input and its weight part.

    1F1B (p-1)(F + B + W); ZB-H1 (p-1)(B + max(0, F - W)), with the memory of 1F1B; ZB-H2 (p-1)(F + B - 2W), with up to
    twice that memory; ZB-V none where F = B = W, with the memory of 1F1B. Counts the idle time of the first rank
    between its first and its last pass; up to the end of the step it is the same under 1F1B, at least (p-1) F under
    ZB-H1, and (p-1) F under ZB-V. ``simulate`` has no ZB-H2. Source: Qi, Wan, Huang, Lin, "Zero Bubble Pipeline
    Parallelism", ICLR 2024 (arXiv 2401.10241), table 2 (1F1B, ZB-H1 and ZB-H2); ZB-V in section 6 of the arXiv version.
    Table 2 has (p-1)(F + B - W) for ZB-H1, which is the same where W is no longer than F; for a longer W, which leaves
    the first rank to wait for B, the formula is ours, counted by ``simulate``. Assumes enough microbatches (the paper
    says so of ZB-H2; at least 2p - 1 is our reading), and free transfers.

    Args:
        n_ranks: p, ranks of the pipeline.
        forward: F, seconds of a microbatch on one stage.
        backward_input: B, the gradients of the inputs.
        backward_weight: W, the gradients of the weights.
        schedule: "1f1b", "zb-h1" (default), "zb-h2" or "zb-v" (two stages a rank).

    Returns:
        float: seconds.

    Raises:
        ValueError: for an unknown schedule, for "zb-v" where the three times differ, and for "zb-h2" where W is longer
            than F or B: no order that reaches the formula is known to us.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            idle = [cost.zero_bubble_seconds(4, 1, 1, 1, name) for name in ("1f1b", "zb-h1", "zb-h2", "zb-v")]
            assert idle == [9, 3, 0, 0]
            assert cost.zero_bubble_seconds(4, 0.5, 1, 1) == 3     # W longer than F: it cannot fill more than F leaves
    """
    f, b, w = forward, backward_input, backward_weight
    if schedule == "zb-h2" and w > min(f, b):
        raise ValueError(
            f"backward_weight should be at most forward and backward_input for zb-h2, but given {w}, {f} and {b}"
        )
    if schedule == "zb-v" and not f == b == w:
        raise ValueError(f"zb-v has a closed form only where the three times are equal, but given {f}, {b}, {w}")
    idle = {"1f1b": f + b + w, "zb-h1": b + max(0, f - w), "zb-h2": max(0, f + b - 2 * w), "zb-v": 0}
    return (n_ranks - 1) * idle[schedule]


_PEAKS = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


@takes(FITS, schedule=one_of(*_PEAKS))
def pipeline_peak_activations(
    schedule: str, n_ranks: int, n_microbatches: int, rank: int = 0, n_chunks: int = 1
) -> int:
    """The peak number of (microbatch, stage) pairs whose activations one rank holds.

    GPipe and looped BFS v m; 1F1B min(m, p - r); interleaved 1F1B min(v m, 2 (p - r - 1) + (v - 1) p + 1), each of a
    stage that is 1 / v of the rank's layers; with split backward passes equally many on every rank: interleaved zero
    bubble (ZB-H1 with v = 1) v p, ZB-V 2 p, DualPipeV 2 p + 1. Source: Narayanan et al. 2021, sections 2.2.1 and 2.2.2;
    Korthikanti et al. 2022, section 4.2.3, which gives the first rank's: 1 + (p - 1) / (p v) times 1F1B's; Qi et al.
    2023, table 2 (ZB-H1); looped BFS and the other split ones are counted by ``simulate``. Assumes that every stage
    keeps the same amount per microbatch, from its forward until the end of its (weight) backward pass, without
    recomputation; passes in the order of ``simulate``; and for interleaved schedules an m that is a multiple of p.

    Args:
        schedule: "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv" or "dualpipev".
        n_ranks: p, ranks of the pipeline.
        n_microbatches: m.
        rank: r, the pipeline rank. Default: 0, which holds the most.
        n_chunks: v, stages on each rank. Default: 1; zbv and dualpipev have 2.

    Returns:
        int: microbatches times stages.

    Raises:
        ValueError: for an unknown schedule, a rank not in 0 to p - 1, and numbers without a closed form: interleaved
            schedules with v > 1 if m is not a multiple of p, zbv with m below 2 p - 1, dualpipev with m below 2 p.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            peaks = [cost.pipeline_peak_activations("1f1b", 4, 8, rank) for rank in range(4)]
            assert peaks == [4, 3, 2, 1]
    """
    if rank >= n_ranks:
        raise ValueError(f"rank should be from 0 to {n_ranks - 1}, but given {rank}")
    if schedule.startswith("interleaved") and n_chunks > 1 and n_microbatches % n_ranks:
        raise ValueError(
            f"n_microbatches should be a multiple of n_ranks={n_ranks} for {schedule}, but given {n_microbatches}"
        )
    least = {"zbv": 2 * n_ranks - 1, "dualpipev": 2 * n_ranks}.get(schedule, 1)
    if n_microbatches < least:
        raise ValueError(f"n_microbatches should be at least {least} for {schedule}, but given {n_microbatches}")
    below, every = n_ranks - rank - 1, n_chunks * n_microbatches
    peaks = {
        "gpipe": every,
        "looped_bfs": every,
        "1f1b": min(n_microbatches, below + 1),
        "interleaved_1f1b": min(every, 2 * below + (n_chunks - 1) * n_ranks + 1),
        "interleaved_zero_bubble": min(every, n_chunks * n_ranks),
        "zbv": 2 * n_ranks,
        "dualpipev": 2 * n_ranks + 1,
    }
    return peaks[schedule]


# ------------------------------------------------------------------------------------- context parallel


class ForwardBackward(NamedTuple):
    """What a layer's attention sends over the ranks that share its sequences.

    Attributes:
        forward: seconds, and messages and bytes sent by each rank, of the forward pass.
        backward: the same of the backward pass.
    """

    forward: Collective
    backward: Collective


@takes(FITS)
def ring_attention(
    n_ranks: int,
    batch_size: int,
    sequence: int,
    kv_hidden: int,
    link: Link,
    value_bytes: float = 2,
    gradient_value_bytes: float = 4,
) -> ForwardBackward:
    """What ``ddl.ring_attention`` sends: keys and values visit each rank, and in backward once more, with gradients.

    With N = 2 b T h_kv numbers in the keys and values of full rows, a message has N / P of them. Forward: P - 1
    messages, :func:`ring_pass` of N values. Backward: these again, and P messages of gradients, which go a hop further
    to come home. Source: Liu, Zaharia and Abbeel, "Ring Attention", arXiv:2310.01889 (2023), section 3, with this
    package's messages. The queries do not travel. Leaves out that messages go while blocks are computed, and documents.

    Args:
        n_ranks: P, the cp ranks.
        batch_size: b, the rows of a dp rank.
        sequence: T, tokens of a full row.
        kv_hidden: h_kv, numbers of a token's keys: key heads × width, on this tp rank.
        link: the network between neighbours.
        value_bytes: bytes of a key's number. Default: 2.
        gradient_value_bytes: bytes of its gradient's: 4, or 8 for float64. Default: 4.

    Returns:
        ForwardBackward: seconds, messages and bytes of both passes.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            ring = cost.ring_attention(4, 1, 100, kv_hidden=8, link=cost.Link(0, 1))
            assert ring.forward.bytes[0] == 3 * 2 * 25 * 8 * 2
            assert ring.backward.bytes[0] == ring.forward.bytes[0] + 4 * 2 * 25 * 8 * 4
    """
    numbers = 2 * batch_size * sequence * kv_hidden
    keys = ring_pass(n_ranks, numbers * value_bytes, link)
    hops = n_ranks if n_ranks > 1 else 0
    size = numbers * gradient_value_bytes / n_ranks
    backward = Collective(
        keys.seconds + hops * link.seconds(size),
        [keys.messages[0] + hops] * n_ranks,
        [keys.bytes[0] + (numbers * gradient_value_bytes if hops else 0)] * n_ranks,
    )
    return ForwardBackward(keys, backward)


@takes(FITS)
def ulysses_attention(
    n_ranks: int, batch_size: int, sequence: int, hidden: int, kv_hidden: int, link: Link, value_bytes: float = 2
) -> ForwardBackward:
    """What ``ddl.ulysses_attention`` sends: four all-to-alls, of queries, keys, values and outputs, and four backward.

    Each rank has 1 / P of each tensor, and sends 1 / P of its part to each other rank: (P - 1) / P^2 b T (2 h + 2 h_kv)
    numbers in 4 (P - 1) messages, in each pass. Source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509 (2023),
    section 3.2, with grouped heads. It needs a key head on each rank. Leaves out documents.

    Args:
        n_ranks: P, the cp ranks.
        batch_size: b, the rows of a dp rank.
        sequence: T, tokens of a full row.
        hidden: h, numbers of a token's queries: heads × width, on this tp rank.
        kv_hidden: h_kv, numbers of a token's keys: key heads × width, on this tp rank.
        link: the network between any two ranks.
        value_bytes: bytes of a number, and of its gradient. Default: 2.

    Returns:
        ForwardBackward: seconds, messages and bytes of both passes.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            link = cost.Link(0, 1)
            ring = cost.ring_attention(4, 1, 100, kv_hidden=8, link=link)
            ulysses = cost.ulysses_attention(4, 1, 100, hidden=8, kv_hidden=8, link=link)
            assert ring.forward.bytes[0] / ulysses.forward.bytes[0] == 4 / (1 + 1)      # P / (g + 1)
    """
    others, tokens = n_ranks - 1, batch_size * sequence * value_bytes
    sent = _ring_bytes(n_ranks, tokens * (2 * hidden + 2 * kv_hidden)) / n_ranks
    seconds = 4 * others * link.latency + sent / link.bandwidth
    one = Collective(seconds, [4 * others] * n_ranks, [sent] * n_ranks)
    return ForwardBackward(one, one)


# ------------------------------------------------------------------------------------- transformers


@takes(FITS)
def tensor_parallel_bytes(batch_size: int, sequence: int, hidden: int, n_ranks: int, value_bytes: float = 2) -> float:
    """Bytes that each tensor-parallel rank sends for one transformer layer, forward and backward.

    Four ring all-reduces of the activations: attention and MLP have one each in forward and in backward. Sequence
    parallel replaces each by a reduce-scatter and an all-gather, with the same bytes. Source: Shoeybi et al.,
    "Megatron-LM", 2019, section 3 and figure 4; Korthikanti et al. 2022, section 4.2.2.

    Args:
        batch_size: rows of a microbatch.
        sequence: tokens of a row.
        hidden: the model's width.
        n_ranks: ranks that share a layer.
        value_bytes: bytes of an activation. Default: 2.

    Returns:
        float: bytes sent by one rank.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            assert cost.tensor_parallel_bytes(1, 10, 10, n_ranks=2, value_bytes=4) == 4 * 400
    """
    return 4 * 2 * _ring_bytes(n_ranks, batch_size * sequence * hidden * value_bytes)


@takes(FITS)
def transformer_parameters(hidden: int, layers: int, vocabulary: int, sequence: int) -> float:
    """Parameters of a GPT: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)).

    Source: Narayanan et al. 2021, equation 2. Counts biases, layer norms except the last, an MLP of width 4 h, and
    one embedding, which the output layer shares.

    Args:
        hidden: h, the model's width.
        layers: l.
        vocabulary: V.
        sequence: s, learned positions.

    Returns:
        float: parameters, a whole number.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            assert round(cost.transformer_parameters(12288, 96, 51200, 2048) / 1e9) == 175     # GPT-3
    """
    h, l, v, s = hidden, layers, vocabulary, sequence  # noqa: E741 - the paper's letters
    return 12 * l * h * h + 13 * l * h + (v + s) * h


@takes(FITS)
def transformer_flops(
    batch_size: int, sequence: int, hidden: int, layers: int, vocabulary: int, recompute: bool = False
) -> float:
    """Floating-point operations of a GPT's training step, forward and backward.

    72 B s l h^2 (1 + s / (6 h) + V / (12 l h)); with full recomputation of activations
    96 B s l h^2 (1 + s / (6 h) + V / (16 l h)). Source: Narayanan et al. 2021, section 5.1, equation 3 (with
    recomputation; the other is the same without the second forward). Counts matrix products only, a multiply and an
    add as two operations, and causal attention in full.

    Args:
        batch_size: B, rows.
        sequence: s, tokens of a row.
        hidden: h, the model's width.
        layers: l.
        vocabulary: V.
        recompute: whether forward is recomputed in backward. Default: False.

    Returns:
        float: operations.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            flops = cost.transformer_flops(1536, 2048, 12288, 96, 51200, recompute=True)
            assert round(flops / 1e18, 1) == 4.5                                 # GPT-3's batch, 1024 GPUs
    """
    b, s, h, l, v = batch_size, sequence, hidden, layers, vocabulary  # noqa: E741 - the paper's letters
    layer = 24 * b * s * h * h + 4 * b * s * s * h  # forward: the weights' products, then the attention's own
    return (4 if recompute else 3) * l * layer + 6 * b * s * h * v


RECOMPUTE = ("none", "selective", "full")  # of a layer's activations, in backward


@takes(FITS, hidden=POSITIVE, sequence_parallel=FLAG, recompute=one_of(*RECOMPUTE))
def activation_bytes(
    batch_size: int,
    sequence: int,
    hidden: int,
    heads: int,
    n_ranks: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    value_bytes: float = 2,
    mask_bytes: float = 1,
) -> float:
    """Bytes of activations that one transformer layer keeps for backward, on each tensor-parallel rank.

    s b h (34 + 5 a s / h) on one rank; with tensor parallel s b h (10 + 24 / t + 5 a s / (h t)), with sequence
    parallel 1 / t of the whole; selective recomputation drops the 5 a s / h, full recomputation keeps 2 s b h, the
    input of the layer, of which sequence parallel leaves each rank 1 / t, too.
    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023 (arXiv
    2205.05198), equation 1 and table 2. Assumes an MLP of width 4 h, attention that keeps its s x s matrices
    (FlashAttention does not: use "selective"), and that sequence parallel gathers again in backward, as Megatron-LM
    does; torch's DTensor keeps the gathered tensors, 2 (1 - 1 / t) s b h more numbers.

    Args:
        batch_size: b, rows of a microbatch.
        sequence: s, tokens of a row.
        hidden: h, the model's width.
        heads: a.
        n_ranks: t, ranks that share a layer. Default: 1.
        sequence_parallel: whether norms and dropout are sharded over the sequence. Default: False.
        recompute: "none" (default), "selective" (attention's core) or "full" (the layer; its input is kept).
        value_bytes: bytes per number. Default: 2, as in the paper; 4 in float32.
        mask_bytes: bytes per element of a dropout mask. Default: 1, as on a GPU; on a CPU torch keeps the mask in the
            dtype of the activations, so ``value_bytes``; 0 without dropout.

    Returns:
        float: bytes.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            gpt3 = dict(batch_size=1, sequence=2048, hidden=12288, heads=96)
            whole = cost.activation_bytes(**gpt3)
            kept = cost.activation_bytes(**gpt3, recompute="selective")
            assert round(1 - kept / whole, 2) == 0.7                            # "70 %" in the paper, section 5
    """
    sbh = sequence * batch_size * hidden
    if recompute == "full":
        return value_bytes * sbh / (n_ranks if sequence_parallel else 1)
    # What tensor parallel replicates: the inputs of norms, attention and MLP, and two masks.
    whole = (4 * value_bytes + 2 * mask_bytes) / (n_ranks if sequence_parallel else 1)
    scores = 0 if recompute == "selective" else (2 * value_bytes + mask_bytes) * heads * sequence / hidden
    return sbh * (whole + 12 * value_bytes / n_ranks + scores / n_ranks)


# ------------------------------------------------------------------------------------------- failures


@takes(FITS, order=one_of("young", "daly"))
def checkpoint_interval(save: float, mean_time: float, order: str = "young") -> float:
    """The time of work between two checkpoints with which the least time is lost.

    Young: sqrt(2 S M). Daly: sqrt(2 S M) (1 + sqrt(S / (2 M)) / 3 + S / (18 M)) - S for S below 2 M, else M. Both are
    in the unit of the arguments. Sources, formulas from memory: J. W. Young, "A first order approximation to the
    optimum checkpoint interval", Communications of the ACM 17 (9), 1974; J. T. Daly, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006. ``lab.simulate`` and
    :func:`goodput` agree with them. Assumes failures at random times, independent of each other, and a save that stops
    the work.

    Args:
        save: S, time that a checkpoint takes.
        mean_time: M, mean time between two failures of the whole run: that of one node divided by their number.
        order: "young" (default), for S much below M, or "daly".

    Returns:
        float: time of work from the end of one save to the beginning of the next.

    Raises:
        ValueError: if ``order`` is another one.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            hours = 54 * 24 / 419                       # Llama 3: 419 failures in 54 days
            assert round(60 * cost.checkpoint_interval(save=1 / 60, mean_time=hours)) == 19     # minutes
    """
    first = math.sqrt(2 * save * mean_time)
    if order == "young":
        return first
    if save >= 2 * mean_time:
        return mean_time
    return first * (1 + math.sqrt(save / (2 * mean_time)) / 3 + save / (18 * mean_time)) - save


@takes(FITS)
def goodput(interval: float, save: float, restart: float, mean_time: float) -> float:
    """The share of all time that is work that counts, with a checkpoint after each ``interval`` of work.

    tau / (M exp(R / M) (exp((tau + S) / M) - 1)). Derivation: an interval and its save, tau + S, succeed with
    probability exp(-(tau + S) / M); else the time until the failure is lost, and a restart follows, which may fail,
    too. The mean time until both have succeeded is M exp(R / M) (exp((tau + S) / M) - 1); it is Daly's complete cost
    function (2006, as in :func:`checkpoint_interval`). Assumes exponential times between failures, also during saves
    and restarts.

    Args:
        interval: tau, work between two checkpoints.
        save: S, time that a checkpoint takes.
        restart: R, time from a failure until work goes on.
        mean_time: M, mean time between failures of the whole run, in the same unit.

    Returns:
        float: from 0 to 1.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab import cost

            share = cost.goodput(interval=20, save=1, restart=5, mean_time=186)          # minutes
            assert round(share, 2) == 0.88
    """
    if not interval or not mean_time or max(restart, interval + save) / mean_time > 700:  # exp has no larger numbers
        return 0.0
    per_interval = mean_time * math.exp(restart / mean_time) * math.expm1((interval + save) / mean_time)
    return interval / per_interval
