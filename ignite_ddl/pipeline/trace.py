"""Layers for a model that is not sequential, such as a U-Net: by torch's tracing front end for pipelines."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import operator
import os
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten

from ignite_ddl.arguments import MODULE, NAMES, Fits, first_line, takes
from ignite_ddl.checks.kept_state import states_kept
from ignite_ddl.checks.traceless import evaluating, without_trace
from ignite_ddl.pipeline.cut import modules_of
from ignite_ddl.structure import n_rows

BEFORE = Fits(
    'a list of names of modules, or "auto"',
    lambda before: before if isinstance(before, str) and before == "auto" else NAMES.read(before),
)


@takes(model=MODULE, before=BEFORE)
def trace_layers(model: nn.Module, x: Any, before: Sequence[str] | str) -> nn.Sequential:
    """Cuts any model that ``torch.export`` can trace into layers that ``ddl.auto_model`` can pipeline.

    The model's operations are recorded by ``torch.distributed.pipelining``, once in training and once in evaluation
    mode. What a later layer needs of an earlier one, such as a skip connection or the input's mask, travels through the
    layers between. Parameters and buffers are those of the model, tied ones too; a parameter that the model does not
    use is in the first layer. Their names get the number of the layer in front: "1.decoder.weight".

    What Python decides while the model is traced stays as it is: a choice by a random number of Python's, a flag that
    is changed later. A choice by values of tensors is refused. The number of rows may differ later, all other sizes
    stay those of ``x``: pad to one length. On a GPU, trace there.

    Outputs and gradients of the layers are compared with those of the model, in both modes. What acts in backward only
    is not recorded, and refused: an ``autograd.Function`` whose backward pass is not the derivative (gradient
    reversal, a straight-through estimator), a hook that ``forward`` registers on a tensor, a module's backward hook,
    saved tensors that are kept with fewer digits. ``detach()``, ``torch.no_grad()``, ``torch.utils.checkpoint`` with
    ``use_reentrant=False`` and operators of ``torch.library.custom_op`` are recorded. A forward hook is recorded too:
    what it returns is computed in each pass, but it is not called again.

    Args:
        model: the model, called with one argument.
        x: an input with at least two rows: tensors with a row for each sample, in any structure.
        before: names of modules, each called once, in the order of their calls: a layer begins with the call of each.
            "auto" takes the plan that a model of transformers brings along, its ``base_model_pp_plan``: a layer for
            each block, one for what is before the blocks, and one each for the last norm and the head.

    Returns:
        nn.Sequential: the layers, ``len(before) + 1``; also the full model, in one process and on any mesh without tp.

    Raises:
        ValueError: if the model cannot be traced, or not as it trains, ``x`` has fewer than two rows, or the model does
            not call the modules of ``before`` once each, in this order.

    Examples:
        .. code-block:: python

            import torch
            import ignite_ddl as ddl

            class Skips(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.down, self.middle, self.up = (torch.nn.Linear(4, 4) for _ in range(3))

                def forward(self, x):
                    skip = self.down(x).relu()
                    return self.up(skip + self.middle(skip).relu())

            model, x = Skips(), torch.ones(2, 4)
            layers = ddl.trace_layers(model, x, before=["middle", "up"])
            assert len(layers) == 3 and torch.equal(layers(x), model(x))
            ddl.check_model(layers, pp=3)
    """
    leaves = tree_leaves(x)
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes) or shapes[0][0] < 2:
        raise ValueError(
            f"x should hold tensors with a row for each of at least two samples, but given shapes {shapes}"
        )
    if before == "auto":
        before = _block_names(model)
    modules_of(model, before, "before")
    for at, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _not_recorded(type(model).__name__, f"a backward hook of {repr(at) if at else 'the model'}")
    with evaluating([model]), states_kept([model]):  # at its end each module is in its mode again
        traces = {training: _Trace(model.train(training), x, before) for training in (True, False)}
    layers = [TracedLayer({mode: trace.parts[i] for mode, trace in traces.items()}) for i in range(len(before) + 1)]
    _distribute_tensors(model, layers)
    layers[0]._takes = _row_shapes(leaves)
    _check_same(model, traced := nn.Sequential(*layers), x)
    return traced.train(model.training)


def _distribute_tensors(model: nn.Module, layers: list[TracedLayer]) -> None:
    """Gives each layer the parameters and buffers that it uses, and the first one those that none does."""
    known, kept = dict(_tensors_of(model)), model.state_dict()
    used = {id(known[name]) for layer in layers for name in layer._uses}
    unused = [name for name, tensor in known.items() if name in kept and id(tensor) not in used]
    for i, layer in enumerate(layers):
        for name in [*layer._uses, *(unused if i == 0 else ())]:
            _register(layer, model, name, known[name], name in kept)


def _not_recorded(name: str, what: str) -> ValueError:
    return ValueError(
        f"{name} does in backward what torch.export does not record ({what}), so that layers would train otherwise: "
        "write it with detach(), as x + (x.sign() - x).detach() for the sign of x with the gradient of x, or as a "
        "torch.library.custom_op with register_autograd, or make the model an nn.Sequential with a layer that does it"
    )


class _Watch(TorchFunctionMode):
    """Refuses a hook that a forward pass registers on a tensor, and finds rows that hooks of modules have kept."""

    def __init__(self, model: nn.Module, x: Any) -> None:
        super().__init__()
        self.name, self.n_rows = type(model).__name__, n_rows(x)
        self.hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        self.rows: list[weakref.ref] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and not isinstance(args[0], nn.Parameter):
            raise _not_recorded(self.name, "a hook of a tensor")
        result = func(*args, **(kwargs or {}))
        made = self.hooked and isinstance(result, torch.Tensor) and not any(result is given for given in args)
        if made and result.ndim and len(result) == self.n_rows:
            self.rows.append(weakref.ref(result))
        return result

    def check(self) -> None:
        """After the pass, when what it returned is no longer held."""
        if self.rows:
            gc.collect()
        if any(ref() is not None for ref in self.rows):
            raise ValueError(
                f"a forward hook of {self.name} keeps what it sees, but the layers of ddl.trace_layers do not call it: "
                "let forward return what it keeps; or, if it keeps another tensor that happens to have as many rows as "
                f"x ({self.n_rows}), such as a weight, give an x with another number of rows"
            )


def _check_same(model: nn.Module, layers: nn.Sequential, x: Any) -> None:
    """Raises a ValueError unless the layers compute what the model does, and its gradients, in both modes."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = [p.grad for p in parameters]
    try:
        with evaluating([model]), evaluating([layers]):  # at its end each module is in its mode again
            for training in (True, False):
                for p in parameters:
                    p.grad = None
                _check_same_in_a_mode(model.train(training), layers.train(training), x, parameters)
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


def _check_same_in_a_mode(model: nn.Module, layers: nn.Sequential, x: Any, parameters: list[nn.Parameter]) -> None:
    name = type(model).__name__
    watch = _Watch(model, x)
    expected, functions, sizes = _passes(model, x, parameters, 1.0, watch)
    try:
        found, recorded, differences = _passes(layers, x, parameters, -1.0, contextlib.nullcontext())
        same = all(
            torch.allclose(*pair, rtol=1e-3, atol=1e-5, equal_nan=True) if torch.is_tensor(pair[0]) else True
            for pair in zip(expected, found, strict=True)
        )
    except Exception as error:
        raise ValueError(
            f"the layers that torch.export makes of {name} do not run ({first_line(error)}): make it an nn.Sequential "
            "instead"
        ) from error
    if not same:
        raise ValueError(
            f"the layers that torch.export makes of {name} give other numbers than the model for x: make it an "
            "nn.Sequential instead"
        )
    for p, size, difference in zip(parameters, sizes, differences, strict=True):
        if difference > torch.finfo(p.dtype).eps ** 0.5 * max(size, 0.01 * max(sizes)):
            names = " and ".join(sorted(function.__name__ for function in functions - recorded))
            names = names.replace("CheckpointFunction", "torch.utils.checkpoint with use_reentrant=True")
            raise _not_recorded(name, names or "a backward pass of its own, such as by an autograd.Function")


def _passes(
    module: nn.Module, x: Any, parameters: list[nn.Parameter], sign: float, watch: Any
) -> tuple[list[Any], set[type], list[float]]:
    """What a module gives, its autograd.Functions, and the largest gradients, to which those of its outputs are added.

    Weights are changed a little, so that one that begins with zeros does not hide what is behind it, and gradients of
    outputs are large, so that a clip acts.
    """
    with without_trace([module]), torch.enable_grad():
        with torch.no_grad():
            for p in parameters:
                p.add_(0.01 * torch.randn_like(p))
        x = tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, x)
        with watch:
            outputs = tree_leaves(module(x))
        ends = [leaf for leaf in outputs if torch.is_tensor(leaf) and leaf.requires_grad]
        functions = _functions(ends)
        torch.autograd.backward(ends, [sign * 100 * torch.randn_like(end) for end in ends])
        found = [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in outputs]
        del outputs, ends
        if isinstance(watch, _Watch):
            watch.check()  # before what hooks have kept in the model is put back
    grads = [None if p.grad is None or not p.numel() else p.grad.to_dense() for p in parameters]
    return found, functions, [0.0 if grad is None else float(grad.abs().nan_to_num().max()) for grad in grads]


def _functions(outputs: list[torch.Tensor]) -> set[type]:
    """The classes of autograd.Function in a graph."""
    nodes = dict.fromkeys(output.grad_fn for output in outputs)
    todo = list(nodes)
    while todo:
        before = [node for node, _ in getattr(todo.pop(), "next_functions", ()) if node not in nodes]
        nodes |= dict.fromkeys(before)
        todo += before
    return {node._forward_cls for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction)}


class _Part:
    """The operations of one layer in one mode, and the names of the values around it."""

    def __init__(
        self,
        graph: nn.Module,
        uses: dict[str, str],
        arguments: list[Any],
        gives: dict[str, int | None],
        passes: list[str],
    ) -> None:
        self.graph, self.arguments, self.gives, self.passes = graph, arguments, gives, passes
        self.uses = uses  # names of tensors there, to those in the model
        self.inputs: list[str] | None = None  # of the first layer
        self.outputs: tuple[Any, TreeSpec] | None = None  # of the last layer

    def __deepcopy__(self, memo: Any) -> _Part:
        return self  # it has no state: weights and buffers are the layer's

    def __reduce__(self) -> Any:
        raise ValueError(
            "layers from ddl.trace_layers cannot be pickled, since torch's graphs cannot: call ddl.trace_layers in the "
            "function that ranks run, and save a state_dict"
        )

    def __call__(self, values: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        if self.inputs is not None:
            values = dict(zip(self.inputs, tree_leaves(values), strict=True))
        arguments = [values[a.name] if isinstance(a, torch.fx.Node) else a for a in self.arguments]
        weights = {name: tensors[of_model] for name, of_model in self.uses.items()}
        result = torch.func.functional_call(self.graph, weights, tuple(arguments))
        known = dict(values)
        for name, place in self.gives.items():
            known[name] = result if place is None else result[place]
        if self.outputs is None:
            return {name: known[name] for name in self.passes}
        nodes, spec = self.outputs
        return tree_unflatten([known[n.name] if isinstance(n, torch.fx.Node) else n for n in nodes], spec)


class _Trace:
    """A model's operations in one mode, in parts."""

    def __init__(self, model: nn.Module, x: Any, before: Sequence[str]) -> None:
        from torch.distributed.pipelining import Pipe, pipe_split  # a slow import

        calls: list[str] = []

        def cut(name: str) -> Any:
            def hook(*_: Any) -> None:
                calls.append(name)
                pipe_split()

            return hook

        hooks = [model.get_submodule(name).register_forward_pre_hook(cut(name), prepend=True) for name in before]
        hooks.append(model.register_forward_hook(_as_views))
        try:
            program = _exported(model, x)
        finally:
            for hook in hooks:
                hook.remove()
        if calls != list(before):
            raise ValueError(
                f"before should list modules that the model calls once each, in their order, but of {list(before)} it "
                f"called {calls}"
            )
        _inline_no_grad(program.graph_module)
        try:
            graph = Pipe._from_traced(model, program).split_gm
        except Exception as error:
            raise ValueError(
                f"torch cannot cut what torch.export has traced of {type(model).__name__} ({first_line(error)}), such "
                "as code inside torch.autocast(enabled=False): leave that out for the trace, or make it an "
                "nn.Sequential instead"
            ) from error
        self.parts = _parts(graph, program.call_spec.out_spec, model)
        if len(self.parts) != len(calls) + 1:
            raise ValueError(
                f"before should leave each of its {len(calls) + 1} layers something to compute, but with "
                f"{list(before)} {len(calls) + 1 - len(self.parts)} would have nothing: leave out the module with "
                "which forward begins, one that computes nothing, and of those that begin at the same place all but one"
            )


def _exported(model: nn.Module, x: Any) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=1)
    dims = tree_map(lambda leaf: {0: rows} if isinstance(leaf, torch.Tensor) else None, x)
    lines: list[str] = []
    try:
        with _guards_noted(lines):
            return torch.export.export(model, (x,), dynamic_shapes=(dims,))
    except Exception as error:
        name, given = type(model).__name__, str(error)
        where = "".join(list(dict.fromkeys(lines))[-2:])
        if "specialized it to be a constant" in given:
            why = (
                f"its forward takes the number of rows of x for a fixed one{where}: write x.shape[0] in "
                "place of len(x) or int(x.shape[0]), -1 in a view, and no loop over rows"
            )
        elif "generated guard" in given:
            why = (
                f"its forward, or an operation in it, computes otherwise for other numbers of rows{where}: "
                'leave that out (torch.cdist: pass compute_mode="use_mm_for_euclid_dist")'
            )
        else:
            why = (
                "its forward depends on values of tensors or on the number of rows, or does what export does not know "
                f"({first_line(error)}{_line_of_the_model(traceback.extract_tb(error.__traceback__))}): make it an "
                "nn.Sequential instead"
            )
        raise ValueError(f"torch.export cannot trace {name}, since {why}") from error


@contextlib.contextmanager
def _guards_noted(lines: list[str]) -> Iterator[None]:
    """Notes the line of the model at each moment when torch takes something for known about the number of rows."""
    told = getattr(ShapeEnv, "_log_guard", lambda *_, **__: None)  # its log is silent where logging is disabled

    def note(*args: Any, **kwargs: Any) -> None:
        lines.append(_line_of_the_model(traceback.extract_stack()))
        told(*args, **kwargs)

    ShapeEnv._log_guard = note
    try:
        yield
    finally:
        ShapeEnv._log_guard = told


def _line_of_the_model(frames: traceback.StackSummary) -> str:
    """The innermost line within our call of torch that is not of torch, to be appended to a sentence."""
    within = itertools.dropwhile(lambda frame: frame.filename != __file__, frames)
    others = (os.path.dirname(torch.__file__), contextlib.__file__, __file__)
    found = [frame for frame in within if not frame.filename.startswith(others)]
    return f' at "{found[-1].line}" ({os.path.basename(found[-1].filename)}:{found[-1].lineno})' if found else ""


def _inline_no_grad(graph: torch.fx.GraphModule) -> None:
    """Puts the operations of ``torch.no_grad()`` among the others, detached: torch cannot cut around a graph in one."""
    wrapped = torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in list(graph.graph.find_nodes(op="call_function", target=wrapped)):
        enabled, name, *arguments = node.args
        if enabled:
            continue
        inner = getattr(graph, name.target).graph
        with graph.graph.inserting_before(node):  # detached before, too: one that writes by out= takes no gradients
            given = [_detached(a, node) for a in arguments]
            values = dict(zip(inner.find_nodes(op="placeholder"), given, strict=True))
            for each in inner.nodes:
                if each.op not in ("placeholder", "output"):
                    values[each] = graph.graph.node_copy(each, values.__getitem__)
            results = [_detached(values[each], node) for each in inner.output_node().args[0]]
        for user in list(node.users):  # each picks one of the results
            user.replace_all_uses_with(results[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    graph.recompile()


def _detached(value: Any, where: torch.fx.Node) -> Any:
    if not isinstance(value, torch.fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    found = where.graph.call_function(torch.ops.aten.detach.default, (value,))
    found.meta = value.meta | {"nn_module_stack": where.meta["nn_module_stack"]}
    return found


def _as_views(model: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook, by which the last part gives what the model returns as it is, such as a weight."""
    own = {id(tensor) for _, tensor in _tensors_of(model)}
    return tree_map(lambda leaf: leaf.view_as(leaf) if id(leaf) in own else leaf, output)


def _parts(graph: torch.fx.GraphModule, out_spec: TreeSpec, model: nn.Module) -> list[_Part]:
    nodes = list(graph.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    inputs = [node.name for node in nodes if node.op == "placeholder"]
    [output] = [node.args[0] for node in nodes if node.op == "output"]
    tensors = dict(_tensors_of(model))
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    read = [{a.name for a in call.args if isinstance(a, torch.fx.Node)} for call in calls]
    read.append({a.name for a in tree_leaves(output) if isinstance(a, torch.fx.Node)})
    parts, known = [], dict.fromkeys(inputs)
    for i, call in enumerate(calls):
        picked = [user for user in call.users if user.target is operator.getitem]
        gives = {user.name: user.args[1] for user in picked} if picked else {call.name: None}
        known |= dict.fromkeys(gives)
        later = set().union(*read[i + 1 :])
        operations = getattr(graph, call.target)
        # A module that is called again has another name there; what the model does not have is a constant.
        known_as = [(name, name if name in tensors else names.get(id(t))) for name, t in _tensors_of(operations)]
        uses = {name: of_model for name, of_model in known_as if of_model is not None}
        for name, of_model in uses.items():  # it gets the layer's at each call, and keeps none
            empty, (prefix, _, last) = torch.empty_like(tensors[of_model], device="meta"), name.rpartition(".")
            kept = nn.Parameter(empty, False) if isinstance(tensors[of_model], nn.Parameter) else empty
            setattr(operations.get_submodule(prefix), last, kept)
        parts.append(_Part(operations, uses, list(call.args), gives, [n for n in known if n in later]))
    parts[0].inputs, parts[-1].outputs = inputs, (tree_leaves(output), out_spec)
    return parts


class TracedLayer(nn.Module):
    """A part of a traced model, with its parameters and buffers under their names in the model."""

    _takes: list[Any] | None = None  # of the first layer: shapes of a row and dtypes, and plain values

    def __init__(self, parts: dict[bool, _Part]) -> None:
        super().__init__()
        # Private names, since modules of the model are registered under theirs.
        self._parts = parts  # in a dict: the graphs' own parameters are not registered
        self._uses = list(dict.fromkeys(name for part in parts.values() for name in part.uses.values()))

    def forward(self, value: Any) -> Any:
        if self._takes is not None:
            _check_input(value, self._takes)
        return self._parts[self.training](value, dict(_tensors_of(self)))


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers with all their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _check_input(value: Any, takes: list[Any]) -> None:
    found = _row_shapes(tree_leaves(value))
    if found != takes:
        raise ValueError(
            f"the input of a model from ddl.trace_layers should have rows of {takes}, as when it was traced, but given "
            f"{found}: pad to one length, or trace again"
        )


def _row_shapes(leaves: Sequence[Any]) -> list[Any]:
    return [(tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _register(layer: nn.Module, model: nn.Module, name: str, tensor: torch.Tensor, persistent: bool) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        model = model._modules[parent]
        if parent not in layer._modules:
            layer.add_module(parent, _empty_module(model))
        layer = layer._modules[parent]
    if isinstance(tensor, nn.Parameter):
        layer.register_parameter(last, tensor)
    else:
        layer.register_buffer(last, tensor, persistent)


def _empty_module(module: nn.Module) -> nn.Module:
    """One without tensors; in place of BatchNorm one of its kind, by which the rules for its statistics know it."""
    if not isinstance(module, nn.modules.batchnorm._NormBase):
        return nn.Module()
    empty = copy.copy(module)
    empty._parameters, empty._buffers = dict.fromkeys(module._parameters), dict.fromkeys(module._buffers)
    empty._non_persistent_buffers_set = set()
    return empty


def _block_names(model: nn.Module) -> list[str]:
    """The modules of the model's own pipeline plan, each element of a list of them, without the first."""
    modules = dict(model.named_modules())
    for outer, module in modules.items():
        plan = getattr(module, "_pp_plan", None) or getattr(module, "base_model_pp_plan", None)
        if isinstance(plan, Mapping) and plan:
            within = [f"{outer}.{name}" if outer else name for name in plan]
            lists = [name for name in within if isinstance(modules.get(name), nn.ModuleList)]
            parts = [name for name in modules if name in within or name.rpartition(".")[0] in lists]
            return [name for name in parts if name not in lists][1:]
    raise ValueError(
        f'before="auto" takes the plan of the model, its base_model_pp_plan, but {type(model).__name__} has none: '
        "give names of modules"
    )
