"""A handler for samples and tokens per second, and the share of the devices' peak that is used."""

from __future__ import annotations

import time
from collections import deque

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from torch.utils._pytree import tree_leaves

from ignite_ddl.arguments import ENGINE, POSITIVE, takes, whole
from ignite_ddl.loader_pass import Pass
from ignite_ddl.mesh import get_mesh
from ignite_ddl.structure import n_rows


class Throughput:
    """Samples and tokens per second of the whole mesh, and model FLOPs utilization (MFU), as metrics of a trainer.

    After each iteration, ``engine.state.metrics`` has "samples/s" and, where inputs are token ids, "tokens/s", over
    the last ``window`` iterations with all that lies between them: data, handlers, saving. With ``flops`` and
    ``peak_flops`` it has "mfu",

        flops of one sample × samples/s ÷ (peak_flops × devices),

    where recomputed activations do not count as work (Chowdhery et al. 2022, "PaLM", appendix B).

    Args:
        flops: floating-point operations of the model for one sample, forward and backward, such as
            ``lab.cost.transformer_flops(...)`` of a batch of one. Default None: no MFU.
        peak_flops: operations per second of one device at its best, in the dtype of the training. Default: None.
        window: iterations to average over, after the first one, which sets up. Default: 20.

    Raises:
        ValueError: if only one of ``flops`` and ``peak_flops`` is given, or one of the arguments is not positive.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            tokens = torch.randint(10, (12, 8))                    # 12 sequences of 8 tokens
            layers = torch.nn.Embedding(10, 4), torch.nn.Flatten(), torch.nn.Linear(32, 10)
            model = ddl.auto_model(torch.nn.Sequential(*layers))
            loader = ddl.auto_dataloader(torch.utils.data.TensorDataset(tokens, tokens[:, 0]), batch_size=4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer = ddl.create_supervised_trainer(model, optimizer, torch.nn.functional.cross_entropy)
            ddl.Throughput(flops=6 * 360, peak_flops=1e12).attach(trainer)
            metrics = trainer.run(loader, max_epochs=2).metrics
            assert abs(metrics["tokens/s"] / metrics["samples/s"] - 8) < 1e-6
            assert 0 < metrics["mfu"] < 1
    """

    @takes(flops=POSITIVE, peak_flops=POSITIVE, window=whole(most=10**6))
    def __init__(self, flops: float | None = None, peak_flops: float | None = None, window: int = 20) -> None:
        if (flops is None) != (peak_flops is None):
            raise ValueError(f"flops and peak_flops go together, but given {flops!r} and {peak_flops!r}")
        self.flops, self.peak_flops = flops, peak_flops
        # Of the last iterations: when each ended, its samples, its tokens.
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=window + 1)

    @takes(engine=ENGINE)
    def attach(self, engine: Engine) -> Throughput:
        """Measures the runs of a trainer.

        Args:
            engine: of ``ddl.create_supervised_trainer``, or a ``ddl.MeshEngine``.

        Returns:
            Throughput: itself.
        """
        engine.add_event_handler(Events.STARTED, lambda: self._ends.clear())
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._measure)
        return self

    def _measure(self, engine: Engine) -> None:
        batch, mesh = engine.state.batch, get_mesh()
        batches = engine._dataloader_iter
        samples = batches.rows[1] if isinstance(batches, Pass) else n_rows(batch) * mesh.dp_size
        shares = 1 if getattr(batches, "in_full", False) else mesh.cp_size
        first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
        is_ids = first is not None and first.ndim == 2 and not first.is_floating_point()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._ends.append((time.perf_counter(), samples, samples * first.shape[1] * shares if is_ids else 0))
        seconds = self._ends[-1][0] - self._ends[0][0]
        if len(self._ends) < 2:
            return
        counted = list(self._ends)[1:]
        metrics = engine.state.metrics
        metrics["samples/s"] = sum(end[1] for end in counted) / seconds
        if is_ids:
            metrics["tokens/s"] = sum(end[2] for end in counted) / seconds
        if self.flops is not None:
            metrics["mfu"] = metrics["samples/s"] * self.flops / (self.peak_flops * idist.get_world_size())
