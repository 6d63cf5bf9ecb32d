"""Delays DDP's all-reduces, in the background, to the time of a ring on a given link.

Between ranks of one machine a gradient of some kilobytes arrives too fast to see whether it overlaps with backward.
With the delay the overlap is visible; the chapter says that the delay is artificial.
"""

import time  # without postponed annotations, because DDP inspects those of its hook
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ignite_ddl.lab import cost
from ignite_ddl.lab.record import Record

__all__ = ["SlowLine"]


class SlowLine:
    """Averages DDP's buckets one after the other, each in the time of a ring on the link.

    The buckets are all-reduced; then the line is kept busy until the ring's time has passed. The rank continues to
    compute meanwhile, as with a network card.

    Args:
        link: A :class:`ignite_ddl.lab.cost.Link`; the ring's seconds are those of ``cost.all_reduce_ring``.

    Attributes:
        records: One :class:`~ignite_ddl.lab.record.Record` of kind "communication" for each bucket, "bucket 0" first,
            by ``time.perf_counter``.

    Example:
        .. code-block:: python

            import ignite_ddl as ddl
            from ignite_ddl.lab import cost
            import torch
            from ignite_ddl.course import SlowLine
            from torch.nn.parallel import DistributedDataParallel

            def step(local_rank):
                replica = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
                line = SlowLine(cost.Link(latency=0.05, bandwidth=1e9))
                replica.register_comm_hook(line, SlowLine.average)
                replica(torch.full((1, 4), float(local_rank))).sum().backward()
                return replica.module.weight.grad.tolist(), line.records[0].seconds

            with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                for gradient, seconds in parallel.run(step):
                    assert gradient == [[0.5] * 4]
                    assert seconds >= 0.1                       # two messages, 50 ms each
    """

    def __init__(self, link: cost.Link) -> None:
        self.link = link
        self.records: list[Record] = []
        self._carrier = ThreadPoolExecutor(1)  # one line: a bucket waits for the bucket before it

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: ``replica.register_comm_hook(line, SlowLine.average)``.

        Args:
            bucket: DDP's bucket.

        Returns:
            torch.futures.Future: done when the ring would be; its value is the bucket's mean over the ranks.
        """
        gradient, name = bucket.buffer(), f"bucket {bucket.index()}"
        n_ranks, done = dist.get_world_size(), torch.futures.Future()
        seconds = cost.all_reduce_ring(n_ranks, gradient.nbytes, self.link).seconds
        # Called here, not in the line's thread: all ranks must call their collectives in the same order.
        summed = dist.all_reduce(gradient.div_(n_ranks), async_op=True).get_future()

        def carry() -> None:
            start = time.perf_counter()
            summed.wait()
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
            self.records.append(Record(dist.get_rank(), "communication", name, start, time.perf_counter()))
            done.set_result(gradient)

        self._carrier.submit(carry)
        return done
