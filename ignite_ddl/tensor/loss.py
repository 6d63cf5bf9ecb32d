"""Cross entropy of logits that are sharded by vocabulary over tp ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from ignite_ddl.arguments import INTEGER, SHARE, TENSOR, Fits, one_of, takes
from ignite_ddl.structure import local_tensor

REDUCTION = Fits('"mean", "sum" or "none"', one_of("mean", "sum", "none").read)


@takes(
    logits=TENSOR, target=TENSOR, ignore_index=INTEGER, reduction=REDUCTION, weight=TENSOR, label_smoothing=SHARE
)  # fmt: skip
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy``, also of logits that are sharded by vocabulary over tp ranks, without gathering them.

    Cut logits come from a head with ``Column(use_local_output=False)``. Three numbers per row are reduced over tp: the
    largest logit, the sum of exponentials, and the logit of the target (Shoeybi et al. 2019, "Megatron-LM", section 3).
    The backward pass needs no communication. It is torch's ``loss_parallel``, but the gradient is computed in the
    forward pass, so that ``backward()`` may be called anywhere, once; there is no second derivative. Half-precision
    logits are converted to float32. Full logits are passed to ``F.cross_entropy``.

    Args:
        logits: scores of shape (N, C) or (N, C, ...); a DTensor sharded along the classes, or a plain tensor.
        target: class indices of shape (N,) or (N, ...), the same on all tp peers.
        ignore_index: the target to ignore, default -100.
        reduction: "mean" (default), "sum" or "none".
        weight: a weight for each class. For full logits only.
        label_smoothing: default 0.0. For full logits only.

    Returns:
        Tensor: the loss, a plain tensor that is the same on all tp peers; float32 for sharded logits in half precision.

    Raises:
        ValueError: if logits are sharded, but not along the classes; if ``target``, ``weight`` or ``label_smoothing``
            is not supported for sharded logits; or if ``target`` has another shape. Nothing is sent then.

    Examples:
        .. code-block:: python

            import ignite.distributed as idist
            import torch
            import ignite_ddl as ddl

            def losses(local_rank):
                torch.manual_seed(0)
                head = ddl.auto_model(torch.nn.Linear(4, 65), {"": ddl.Column(use_local_output=False)})
                x, target = torch.randn(8, 4).to(idist.device()), torch.randint(65, (8,)).to(idist.device())
                return ddl.cross_entropy(head(x), target).item()

            with ddl.Parallel(backend="gloo", nproc_per_node=2, tp=2) as parallel:
                assert all(abs(loss - losses(0)) < 1e-6 for loss in parallel.run(losses))
    """
    if not isinstance(logits, DTensor) or all(placement.is_replicate() for placement in logits.placements):
        logits = local_tensor(logits)
        options = {"ignore_index": ignore_index, "reduction": reduction, "weight": weight}
        return F.cross_entropy(logits, target, **options, label_smoothing=label_smoothing)
    classes = 1 if logits.ndim > 1 else 0
    if logits.device_mesh.ndim > 1 or not logits.placements[0].is_shard(classes):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} should be cut along dim {classes}, the classes, but are cut "
            f"as {logits.placements}; of (N, T, C) take logits.flatten(0, 1) and target.flatten()"
        )
    for wrong, name, fits, given in (
        (label_smoothing, "label_smoothing", "0", label_smoothing),
        (weight is not None, "weight", "None", "class weights"),
        (target.is_floating_point(), "target", "class indices", f"{target.dtype} probabilities"),
    ):
        if wrong:
            raise ValueError(
                f"{name} should be {fits} for logits that are cut by vocabulary, but given {given}: gather the logits "
                "by Column(output_layouts=Replicate())"
            )
    rows = logits.shape[:classes] + logits.shape[classes + 1 :]
    if target.shape != rows:
        raise ValueError(
            f"target should be of shape {tuple(rows)} for logits of shape {tuple(logits.shape)}, but is of "
            f"{tuple(target.shape)}"
        )
    if target.device.type == "cpu":  # elsewhere the check would wait for the device
        outside = target[((target < 0) | (target >= logits.shape[classes])) & (target != ignore_index)]
        if len(outside):
            raise ValueError(f"target should be below the {logits.shape[classes]} classes, but has {int(outside[0])}")
    options = {"ignore_index": ignore_index, "reduction": reduction}
    return _ShardedCrossEntropy.apply(logits.to_local(), logits._spec, target, options)


class _ShardedCrossEntropy(torch.autograd.Function):
    """Computes the gradient in forward: torch's ``loss_parallel`` would have to enclose the backward pass too."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Any, target: torch.Tensor, options: dict) -> torch.Tensor:
        # In float32: the loss is scaled later, and small gradients should not be rounded to zero before that.
        precise = local.detach().to(torch.promote_types(local.dtype, torch.float32))
        logits = DTensor.from_local(
            *(precise, spec.device_mesh, spec.placements), run_check=False, shape=spec.shape, stride=spec.stride
        )
        logits.requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad(), loss_parallel():
            loss = F.cross_entropy(logits, target, **options)
            if ctx.needs_input_grad[0]:
                # Rows are independent, so the gradient of the sum is right for "none" too.
                ctx.save_for_backward(torch.autograd.grad(loss.sum(), logits)[0].to_local())
        ctx.dtype = local.dtype
        return loss.detach().to_local()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if torch.is_grad_enabled():  # by create_graph=True
            raise RuntimeError(
                "the cross entropy of logits that are cut by vocabulary cannot be differentiated twice "
                "(create_graph=True): gather the logits by Column(output_layouts=Replicate())"
            )
        (gradient,), (grad_output,) = ctx.saved_tensors, grad_outputs
        if grad_output.ndim:
            grad_output = grad_output.unsqueeze(1)
        return (gradient * grad_output).to(ctx.dtype), None, None, None
