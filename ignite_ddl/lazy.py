"""Models that do not fit on one rank: layers that are created one at a time, and models without weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn

from ignite_ddl.arguments import a, takes
from ignite_ddl.mesh import Mesh
from ignite_ddl.structure import local_tensor

P = ParamSpec("P")


def _makes_layers(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


@takes(factory=a("a class of layers or a function that makes one", _makes_layers))
def lazy(factory: Callable[P, nn.Module], *args: P.args, **kwargs: P.kwargs) -> Lazy:
    """A layer that ``ddl.auto_model`` creates, for models that do not fit on one rank.

    Every rank creates every layer, one at a time, from rank 0's random stream, and keeps its part. So the weights are
    those of one process, and memory holds at most the rank's shard and one layer. Under pp, a rank keeps the layers of
    its stages; ``tensor_plan`` and ``shard=True`` are applied to a layer before the next one is created. On a serial
    run, the layers are created in full.

    Random weights should come from torch's CPU stream; initialise, freeze or load weights in the factory.
    ``model.double()``, ``.to(dtype)``, ``.requires_grad_()`` and ``.eval()`` are applied to the layer later. Weights
    cannot be tied across lazy layers.

    Args:
        factory: a module class, or a function that returns a module.
        args: positional arguments of ``factory``.
        kwargs: keyword arguments of ``factory``.

    Returns:
        Lazy: the placeholder.

    Raises:
        ValueError: if ``factory`` is not callable.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            def weights_held(local_rank):
                torch.manual_seed(0)
                model = torch.nn.Sequential(*[ddl.lazy(torch.nn.Linear, 8, 8, bias=False) for _ in range(4)])
                model = ddl.auto_model(model)
                return {name: weight.tolist() for name, weight in model.named_parameters()}

            with ddl.Parallel(backend="gloo", nproc_per_node=2, pp=2) as parallel:
                first, second = parallel.run(weights_held)

            torch.manual_seed(0)
            eager = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(4)])
            assert list(first) == ["0.weight", "1.weight"] and list(second) == ["2.weight", "3.weight"]
            assert second["3.weight"] == eager[3].weight.tolist()
    """
    return Lazy(factory, args, kwargs)


class Lazy(nn.Module):
    """The placeholder of a layer that is created later. Made by :func:`lazy`."""

    def __init__(self, factory: Callable[..., nn.Module], args: tuple, kwargs: dict) -> None:
        super().__init__()
        self.recipe = factory, args, kwargs
        self.converted: list[Callable] = []  # by .double(), .to(...)
        self.trainable: bool | None = None  # by .requires_grad_(...)

    def build(self) -> nn.Module:
        """Creates the layer with its weights."""
        layer = self._make()
        for convert in self.converted:
            layer._apply(convert)
        return layer

    def on_meta(self) -> nn.Module:
        """The layer on the meta device: shapes only, leaving the random stream unchanged."""
        with torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    layer = self._make()
            except (NotImplementedError, RuntimeError):  # the factory reads values, which need the CPU
                layer = self._make()
            layer.to("meta")
        for convert in self.converted:
            with contextlib.suppress(NotImplementedError):  # tensors cannot move from the meta device
                layer._apply(convert)
        return layer

    def _make(self) -> nn.Module:
        factory, args, kwargs = self.recipe
        layer = factory(*args, **kwargs)
        if not isinstance(layer, nn.Module):
            raise ValueError(f"factory should return a layer, but {factory!r} returned {type(layer).__name__}")
        if self.trainable is not None:
            layer.requires_grad_(self.trainable)
        return layer.train(self.training) if self.training != layer.training else layer

    def _apply(self, fn: Callable, recurse: bool = True) -> Lazy:
        self.converted.append(fn)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Lazy:
        self.trainable = requires_grad
        return self

    def apply(self, fn: Callable) -> Lazy:
        raise RuntimeError("a lazy layer has no weights yet: apply the function in its factory")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a lazy layer has not been made yet: pass the model to ddl.auto_model first")

    def extra_repr(self) -> str:
        factory, args, kwargs = self.recipe
        given = [repr(arg) for arg in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
        return ", ".join([getattr(factory, "__name__", repr(factory)), *given])


class LazyLayers:
    """The lazy layers of a model, in the order in which one process would create them.

    Args:
        model: any model, also without lazy layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lazies = [m for m in model.modules() if isinstance(m, Lazy) and m is not model]

    @contextlib.contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Replaces each lazy layer by the layer on the meta device inside the ``with`` block."""
        on_meta = [lazy.on_meta() for lazy in self.lazies]
        for lazy, layer in zip(self.lazies, on_meta, strict=True):
            replace_module(self.model, lazy, layer)
        try:
            yield
        finally:
            for lazy, layer in zip(self.lazies, on_meta, strict=True):
                replace_module(self.model, layer, lazy)

    def make(self, mesh: Mesh, is_held: Callable[[str], bool]) -> Iterator[list[str]]:
        """Creates the layers one by one, with the same weights on all ranks, and inserts those that this rank holds.

        Args:
            mesh: the mesh.
            is_held: whether this rank holds the layer with a given name.

        Yields:
            list: the names of a layer that this rank holds, before the next layer is created.
        """
        if not self.lazies:
            return
        with _rank_0_stream(mesh):
            for lazy in self.lazies:
                names = [name for name, m in self.model.named_modules(remove_duplicate=False) if m is lazy]
                layer = lazy.build()
                if any(is_held(name) for name in names):
                    replace_module(self.model, lazy, layer)
                    yield names
                del layer  # before the next one is created


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces ``old`` by ``new`` everywhere in ``root``."""
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


@contextlib.contextmanager
def _rank_0_stream(mesh: Mesh) -> Iterator[None]:
    """Draws from rank 0's random stream; a rank with another state gets its own state back afterwards."""
    if mesh.world_size == 1:
        yield
        return
    state = torch.get_rng_state()
    common = state.clone().to(idist.device())
    dist.broadcast(common, src=0)
    torch.set_rng_state(common.cpu())
    yield
    if not torch.equal(common.cpu(), state):
        torch.set_rng_state(state)


# ------------------------------------------------------------------------------------------- without weights

_IS_NEW = "_is_new"  # on a parameter that materialize has made


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Models that are made inside have no weights yet: they take no memory until ``ddl.import_weights`` loads them.

    Their parameters are on the meta device, and what initialises them does nothing. Buffers, which a file of weights
    may lack, are made as usual. Then ``ddl.auto_model`` cuts the model, and ``ddl.import_weights`` makes the part of
    each rank: no rank holds more than its part and one tensor, on a mesh with pp, tp or ``shard=True``.

    Examples:
        .. code-block:: python

            import tempfile
            import torch
            import ignite_ddl as ddl

            def weights_held(local_rank, folder):
                with ddl.empty_weights():
                    model = torch.nn.Linear(8, 6)
                model = ddl.auto_model(model, shard=True)
                ddl.import_weights(model, folder)
                return model.weight.to_local().numel(), ddl.full_state_dict(model)["weight"]

            trained = torch.nn.Linear(8, 6)
            with tempfile.TemporaryDirectory() as folder:
                ddl.export_weights(trained, folder)
                with ddl.Parallel(backend="gloo", nproc_per_node=2) as parallel:
                    (held, weight), _ = parallel.run(weights_held, folder)
            assert held == 24 and torch.equal(weight, trained.weight)
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or parameter.is_meta:
            return
        try:
            _swap(parameter, type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))
        except RuntimeError as error:
            raise ValueError(
                f"inside ddl.empty_weights(), {name!r} of a {type(module).__name__} should be registered before "
                "anything computes with it and keeps the result, or refers to it weakly: register it first, or make "
                "the model outside of ddl.empty_weights()"
            ) from error

    nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _swap(parameter: nn.Parameter, made: nn.Parameter) -> None:
    """Gives a parameter the values of one that was made for it: it stays the same object, with attributes and hooks."""
    vars(made).update(vars(parameter))
    torch.utils.swap_tensors(parameter, made)
    for hooks in "_backward_hooks", "_post_accumulate_grad_hooks":  # which autograd has left to the other
        setattr(parameter, hooks, getattr(parameter, hooks))


def materialize(model: nn.Module) -> None:
    """Gives memory on this rank, filled with NaN, to parameters on the meta device; they stay the same objects.

    Raises:
        ValueError: if a buffer is on the meta device: no file of weights need have it.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"model should have values in its buffers, but {name!r} is on the meta device: make the model inside "
                'ddl.empty_weights() instead of torch.device("meta"), or outside of both if the buffer is computed '
                "from weights, as spectral_norm's are"
            )
    recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase) and any(p.is_meta for p in m.parameters())]
    for module in recurrent:
        module._flat_weight_refs = []  # weak references, with which torch swaps no parameter
    for parameter in model.parameters():
        if parameter.is_meta:
            made = torch.empty_like(parameter, device=idist.device())
            with torch.no_grad():
                local_tensor(made).fill_(math.nan)
            made = nn.Parameter(made, requires_grad=parameter.requires_grad)
            _swap(parameter, made)
            setattr(parameter, _IS_NEW, True)
    for module in recurrent:
        module._init_flat_weights()


def without_values(model: nn.Module) -> str | None:
    """The name of a parameter that nothing has been loaded into since it was made without weights; None: all have."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return name
        if hasattr(parameter, _IS_NEW):
            local = local_tensor(parameter)
            if local.numel() and bool(local.isnan().all()):
                return name
            delattr(parameter, _IS_NEW)  # what is NaN later has become so
    return None
