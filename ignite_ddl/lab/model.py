"""A transformer as numbers: its parameters, operations and activations, and how it is read from a real model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ignite_ddl.arguments import AMOUNT, COUNT, FLAG, one_of, or_none, shown, takes, whole
from ignite_ddl.lab.cost import WHOLE

if TYPE_CHECKING:
    from torch import nn

__all__ = ["KERNELS", "RECOMPUTE", "Model"]

KERNELS = ("fused", "eager", "compiled")
RECOMPUTE = ("none", "selective", "pointwise", "full")  # the later, the less is kept
_ANY = whole(0, floats=True)
# Fields of transformers' configs that mean the same, and what else their model types say.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_width": ("head_dim",),
    "mlp_width": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts"),
    "chosen": ("num_experts_per_tok",),
    "expert_width": ("moe_intermediate_size",),
    "shared_width": ("shared_expert_intermediate_size",),
}
_GATED = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "olmo",
    "olmo2",
)  # fmt: skip


@takes(
    **dict.fromkeys(("layers", "width", "heads", "vocabulary", "sequence"), WHOLE),
    **dict.fromkeys(("weight_bytes", "gradient_bytes", "optimizer_bytes", "value_bytes", "mask_bytes"), AMOUNT),
    **dict.fromkeys(("kv_heads", "head_width", "mlp_width", "expert_width"), or_none(WHOLE)),
    **dict.fromkeys(("positions", "expert_layers"), or_none(_ANY)),
    **dict.fromkeys(("experts", "chosen", "shared_width"), _ANY), kernels=one_of(*KERNELS), loss_bytes=or_none(AMOUNT),
    **dict.fromkeys(("tied", "sequence_parallel", "gated", "bias"), FLAG),
)  # fmt: skip
@dataclass(frozen=True)
class Model:
    """A transformer, and the numbers in which it is trained. By default a GPT; fields after the bytes make others.

    Args:
        layers: l, transformer layers.
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
        kv_heads: heads of keys and values (grouped queries). Default None: as many as ``heads``.
        head_width: of a head. Default None: ``width`` / ``heads``.
        mlp_width: of the MLP between its products. Default None: 4 h.
        gated: whether the MLP has a third matrix, whose output gates the first's. Default: False.
        bias: whether products and norms have biases. Default: True; without, a norm has h parameters.
        positions: learned positions. Default None: one a token of the row; 0 for rotary ones.
        experts: MLPs of a layer with experts, each of three matrices if ``gated``. Default: 0, no experts.
        chosen: experts that a token passes. Default: 0.
        expert_width: of an expert. Default None: that of the MLP.
        shared_width: of all experts together that every token passes. Default: 0.
        expert_layers: layers with experts; the others have the MLP. Default None: all.
        kernels: "fused" (default), as Megatron's between the products; "eager", one of torch's after the other, which
            keeps one more tensor of a gated MLP; or "compiled" by torch.compile, which keeps what "fused" does (looked
            at with torch 2.13, ``aot_eager_decomp_partition``, a block of Llama's).
        loss_bytes: of a logit in the loss, and of its gradient there. Default None: those of an activation; 4 where
            logits are made float32 first.

    Examples:
        .. code-block:: python

            from ignite_ddl.lab.plan import Model

            gpt3 = Model(layers=96, width=12288, heads=96, vocabulary=51200, sequence=2048)
            assert round(gpt3.parameters / 1e9) == 175
            llama = Model(32, 4096, 32, 128256, 8192, False, kv_heads=8, mlp_width=14336, gated=True, bias=False)
            assert round(llama.parameters / 1e9) == 8
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
    kv_heads: int | None = None
    head_width: int | None = None
    mlp_width: int | None = None
    gated: bool = False
    bias: bool = True
    positions: int | None = None
    experts: int = 0
    chosen: int = 0
    expert_width: int | None = None
    shared_width: int = 0
    expert_layers: int | None = None
    kernels: str = "fused"
    loss_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"heads should divide width={self.width}, but given {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads should divide heads={self.heads}, but given {self.kv_heads}")
        if not min(1, self.experts) <= self.chosen <= self.experts:
            raise ValueError(f"chosen should be from 1 to experts={self.experts}, but given {self.chosen}")
        if self.expert_layers is not None and self.expert_layers > self.layers:
            raise ValueError(f"expert_layers should be at most layers={self.layers}, but given {self.expert_layers}")

    @classmethod
    @takes(sequence=WHOLE)
    def of(cls, module: nn.Module | Any, sequence: int, **given: Any) -> Model:
        """Describes a real model.

        Args:
            module: a model, built or on the meta device: one of Hugging Face's transformers (GPT-2, Llama, Mistral,
                Mixtral, OLMo, Qwen 2 and 3, also with experts, Gemma 1 to 3), or with an ``nn.Embedding``, equal
                blocks, and an attribute that counts the heads; or a config of such a transformer.
            sequence: tokens of a row.
            given: fields of :class:`Model` that are not to be read from the module. Bytes are by default those of its
                dtypes, of all weights in the mean, with Adam; weights without ``requires_grad`` have no gradients and
                no states, but work as if they had. Of a config those of :class:`Model`, without dropout.

        Returns:
            Model: whose number of parameters is a module's within 2 %, of transformers within 0.1 % (or, of a tiny one,
            but for norms and biases).

        Raises:
            ValueError: if a part cannot be found, or the numbers of parameters differ by more.

        Examples:
            .. code-block:: python

                from ignite_ddl.course import GPT
                from ignite_ddl.lab.plan import Model

                model = Model.of(GPT(80, length=16, width=32, n_heads=4, n_blocks=2), sequence=16)
                assert (model.layers, model.width, model.heads, model.weight_bytes) == (2, 32, 4, 4)
        """
        config = module if hasattr(module, "model_type") else getattr(module, "config", None)
        of_transformers = hasattr(config, "model_type")
        if config is module and of_transformers:
            return cls(sequence=sequence, **({"mask_bytes": 0} | _from_config(config) | given))
        from torch import nn

        if not isinstance(module, nn.Module):
            raise ValueError(f"module should be a module, or a config of transformers, but given {shown(module)}")

        counts, trained = Counter(), Counter()  # of numbers by their bytes
        for parameter in module.parameters():
            counts[parameter.element_size()] += parameter.numel()
            trained[parameter.element_size()] += parameter.numel() * parameter.requires_grad
        has = counts.total()
        size = max(counts, key=counts.get, default=4)  # of activations: that of most weights
        drops = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
        numbers = {
            "weight_bytes": _mean_bytes(counts, has),
            "gradient_bytes": _mean_bytes(trained, has),
            "optimizer_bytes": 2 * _mean_bytes(trained, has),
            "value_bytes": size,
            "mask_bytes": size * drops,
        }
        if of_transformers:
            within, model = 0.001, cls(sequence=sequence, **(numbers | _from_config(config) | given))
        else:
            read = numbers | _from_parts(module, given)
            either = (cls(sequence=sequence, **({"tied": tied} | read | given)) for tied in (True, False))
            within, model = 0.02, min(either, key=lambda one: abs(one.parameters - has))
        small = 8 * model.width * (model.layers + 1) * of_transformers  # norms and biases of some of the products
        if abs(model.parameters - has) > max(within * has, small):
            raise ValueError(
                f"module should be a {'transformer' if of_transformers else 'GPT, 12 · layers · width²'}, but has "
                f"{has:,} parameters where {model} has {model.parameters:,.0f}"
            )
        return model

    # ----------------------------------------------------------------------------------- widths, layers of experts

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.attention_width * (self.kv_heads or self.heads) // self.heads

    @property
    def n_positions(self) -> int:
        """Number of learned positions."""
        return self.sequence if self.positions is None else self.positions

    @property
    def share_of_experts(self) -> float:
        """The share of the layers that has experts instead of the MLP."""
        return (self.layers if self.expert_layers is None else self.expert_layers) / self.layers * (self.experts > 0)

    @property
    def matrices(self) -> int:
        """Number of matrices of an MLP."""
        return 3 if self.gated else 2

    def mlp_values(self) -> float:
        """Numbers between the products of the MLP for a token, of a mean layer."""
        mlp, share = self.mlp_width or 4 * self.width, self.share_of_experts
        return (1 - share) * mlp + share * (self.chosen * (self.expert_width or mlp) + self.shared_width)

    # ----------------------------------------------------------------------------------- parameters

    @property
    def parameters(self) -> float:
        """Parameters of the model; of a GPT equation 2 of Narayanan et al. 2021, which leaves out the last norm."""
        ends = (2 - self.tied) * self.vocabulary + self.n_positions
        shared, replicated, experts = self._of_a_layer()
        return self.layers * (shared + replicated + experts) + ends * self.width

    @property
    def active_parameters(self) -> float:
        """Those that a token passes: of the experts, only the chosen ones."""
        *_, experts = self._of_a_layer()
        return self.parameters - self.layers * experts * (1 - self.chosen / max(1, self.experts))

    def products(self) -> float:
        """Weights that multiply a token in a mean layer: without biases, norms and experts that are not chosen."""
        h, share = self.width, self.share_of_experts
        attention = 2 * h * (self.attention_width + self.kv_width)
        return attention + self.matrices * h * self.mlp_values() + share * h * self.experts  # the router's

    def _of_a_layer(self) -> tuple[float, float, float]:
        """Parameters of a mean layer: those that tp shares out, those on every tp rank, those of experts."""
        h, q, k = self.width, self.attention_width, self.kv_width
        mlp, share = self.mlp_width or 4 * h, self.share_of_experts
        n, bias = self.matrices, self.bias
        shared = 2 * h * (q + k) + bias * (q + 2 * k)
        shared += (1 - share) * (n * h * mlp + bias * (n - 1) * mlp) + share * n * h * self.shared_width
        replicated = 6 * h if bias else 2 * h
        return shared, replicated + share * h * self.experts, share * self.experts * n * h * (self.expert_width or mlp)

    @takes(pp=COUNT, tp=COUNT, layers=_ANY, ep=COUNT)
    def parameters_on(self, pp: int, tp: int, layers: int, ep: int = 1) -> float:
        """Parameters that a rank of the fuller of the first and the last stage holds.

        Norms and the biases of the two row-parallel products are replicated on every tp rank, all else is sharded;
        experts over ep, too. With pp, a tied embedding lies on both ends.
        """
        return sum(self._held(pp, tp, layers, ep))

    def _held(self, pp: int, tp: int, layers: int, ep: int) -> tuple[float, float]:
        """As :meth:`parameters_on`: those that every dp rank has a copy of, and experts."""
        h, norm = self.width, (2 if self.bias else 1) * self.width
        shared, replicated, experts = self._of_a_layer()
        split = layers * shared + -(-self.vocabulary // tp) * tp * h
        if pp == 1:
            split += (not self.tied) * self.vocabulary * h
        ends = max(self.n_positions * h, norm if pp > 1 else 0) + (norm if pp == 1 else 0)
        return split / tp + layers * replicated + ends, layers * experts / ep / tp

    # ----------------------------------------------------------------------------------- operations, activations

    @takes(batch=WHOLE)
    def flops(self, batch: int) -> float:
        """Operations of a step's forward and backward pass, causal attention in full.

        Matrix products alone, as in equation 3 of Narayanan et al. 2021 and as torch's counter counts them eager: 6 a
        weight and token, and 12 s times the width of the heads for attention's own two products.
        """
        layer = 6 * self.products() + 12 * self.sequence * self.attention_width
        return batch * self.sequence * (self.layers * layer + 6 * self.width * self.vocabulary)

    def activation_bytes(self, rows: int, tp: int = 1, cp: int = 1, recompute: str = "none") -> float:
        """Bytes that a mean layer keeps of a microbatch for backward, on each rank.

        Of a GPT equation 1 and table 2 of Korthikanti et al. 2022, as ``cost.activation_bytes``. For others the same
        count, tensor by tensor: what goes into norms, products, attention and the MLP's function. "pointwise" keeps
        what products and attention put out, and makes norms and the MLP's function again (``torch.utils.checkpoint``
        with a policy that saves ``mm`` and attention).

        Args:
            rows: b, of a microbatch.
            tp: ranks that share a layer. Default: 1.
            cp: ranks that share a row's tokens. Default: 1.
            recompute: one of ``RECOMPUTE``. Default: "none".

        Returns:
            float: bytes.
        """
        h, v, mask = self.width, self.value_bytes, self.mask_bytes
        tokens = rows * self.sequence / cp
        if recompute == "full":
            return tokens * h * v / (tp if self.sequence_parallel else 1)
        again = recompute == "pointwise"
        q, mlp = self.attention_width, self.mlp_values()
        between = 2 * h * v if again else 4 * h * v + 2 * h * mask
        # Of a gated MLP both outputs, their product, and eager the function's value; else one output and the value.
        kept = {True: 4 if self.kernels == "eager" else 3, False: 2}[self.gated]
        inside = kept if not again else 2 if self.gated else 1
        # Experts: their tokens are copied in, and out.
        moved = self.share_of_experts * self.chosen * 2 * h
        parts = (2 * q + 2 * self.kv_width + inside * mlp + moved) * v
        if recompute == "none":
            parts += (2 * v + mask) * self.heads * self.sequence
        return tokens * (between / (tp if self.sequence_parallel else 1) + parts / tp)


def _from_config(config: Any) -> dict[str, Any]:
    """Fields of a config of transformers; those that say what is the default anyway stay None."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = config.model_type
    if kind not in ("gpt2", *_GATED):
        raise ValueError(
            f"module should be of a known model type, gpt2 or {', '.join(_GATED)}, but is a {kind}: describe it by "
            "Model(...)"
        )
    read: dict[str, Any] = {}
    for field, names in _NAMES.items():
        found = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
        if found:
            read[field] = found[0]
    read |= {"tied": bool(config.tie_word_embeddings), "gated": kind in _GATED, "bias": kind == "gpt2"}
    read["positions"] = config.n_positions if kind == "gpt2" else 0
    if read.get("experts"):
        layers = range(read["layers"])
        dense, step = set(getattr(config, "mlp_only_layers", None) or ()), getattr(config, "decoder_sparse_step", 1)
        read["expert_layers"] = sum(n not in dense and (n + 1) % step == 0 for n in layers)
    else:
        for field in ("experts", "chosen", "expert_width", "shared_width"):
            read.pop(field, None)
    return read


def _from_parts(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """What the parts of another model say: an embedding, equal blocks, a number of heads."""
    from torch import nn

    parts = list(module.modules())
    tables = [part for part in parts if isinstance(part, nn.Embedding)]
    names = ("n_heads", "num_heads", "n_head", "num_attention_heads")
    heads = [getattr(part, name) for part in parts for name in names if hasattr(part, name)]
    blocks = max(map(_equal_children, parts), key=lambda group: sum(map(_size, group)))
    found = {"an nn.Embedding": tables, "equal blocks": blocks, "a number of heads": heads or "heads" in given}
    if lacks := [name for name, part in found.items() if not part]:
        raise ValueError(f"module should have {' and '.join(lacks)}, but has none: describe it by Model(...)")
    vocabulary, width = max(tables, key=lambda one: one.num_embeddings).weight.shape
    return {"layers": len(blocks), "width": width, "heads": heads[0] if heads else None, "vocabulary": vocabulary}


def _mean_bytes(counts: Counter, n: int) -> float:
    total = sum(size * count for size, count in counts.items())
    return total // n if n and total % n == 0 else total / max(1, n)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _equal_children(module: nn.Module) -> list:
    """The largest group of children whose parameters have the same shapes."""
    groups: dict[tuple, list] = {}
    for child in module.children():
        groups.setdefault(tuple(p.shape for p in child.parameters()), []).append(child)
    groups.pop((), None)
    return max(groups.values(), key=len, default=[])
