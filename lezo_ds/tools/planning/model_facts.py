"""What a plan needs to know of a model: the sizes of its parameters, module by module; no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lezo_ds.config import PeftConfig
from lezo_ds.model.adapters import make_adapter
from lezo_ds.model.blocks import find_blocks, largest_module
from lezo_ds.sharding.checkpoint_files import DTYPES, build_on_meta

ModuleKind = Literal["embedding", "block", "head", "other"]


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter.

    Attributes:
        key: the same for a parameter that is used twice (a tied embedding).
        numel: number of elements.
        is_vector: of one dimension; it is perturbed in float32.
        trained: whether it is perturbed and updated.
    """

    key: int
    numel: int
    is_vector: bool
    trained: bool


@dataclass(frozen=True)
class ModuleFacts:
    """One module in the order they run; most own no parameters.

    Attributes:
        kind: where it is.
        parameters: those it owns itself.
    """

    kind: ModuleKind
    parameters: tuple[ParameterFacts, ...]

    @property
    def numel(self) -> int:
        """Number of elements of its own parameters."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class ModelFacts:
    """A model, with the adapter that is trained on it if there is one.

    Attributes:
        name: of its class.
        blocks_path: where its blocks are.
        num_blocks: transformer blocks.
        modules: all of them, in about the order they run; the head is last.
        largest_module: elements of the largest block, or of a larger module outside of them.
        hidden_size: width of the hidden states.
        widest: of the outputs of a block's linear modules, the largest width.
        num_widest: how many of a block's linear modules are that wide (2 for a gated feed-forward layer).
        cached_width: elements of a token's keys and values in a block.
        vocabulary_size: number of logits of a token.
        max_length: longest input the model has positions for; None for no limit.
        itemsize: bytes of a weight.
        starts_with_a_pass: what is trained starts from a forward pass: a prefix does.
    """

    name: str
    blocks_path: str
    num_blocks: int
    modules: tuple[ModuleFacts, ...]
    largest_module: int
    hidden_size: int
    widest: int
    num_widest: int
    cached_width: int
    vocabulary_size: int
    max_length: int | None
    itemsize: int
    starts_with_a_pass: bool

    @property
    def parameters(self) -> tuple[ParameterFacts, ...]:
        """Every parameter once."""
        return tuple({p.key: p for module in self.modules for p in module.parameters}.values())

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_trained(self) -> int:
        """Number of elements that are trained."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    @property
    def num_in_blocks(self) -> int:
        """Number of elements inside the transformer blocks."""
        return sum(module.numel for module in self.modules if module.kind == "block")

    @property
    def num_trained_in_blocks(self) -> int:
        """Number of elements inside the transformer blocks that are trained."""
        own = [p for module in self.modules if module.kind == "block" for p in module.parameters]
        return sum(parameter.numel for parameter in own if parameter.trained)


def model_facts(config: Any, dtype: str, peft: PeftConfig | None = None) -> ModelFacts:  # noqa: ANN401
    """Build a model without memory and return its facts.

    Args:
        config: of transformers, one of a causal language model.
        dtype: of its weights: "fp32", "bf16" or "fp16".
        peft: the adapter that is trained; None for all weights.

    Raises:
        UserError: not a causal language model, or without transformer blocks, or the adapter does not fit.
    """
    model: Any = build_on_meta(config, DTYPES[dtype])
    layout = find_blocks(model)
    adapter = make_adapter(peft)
    if adapter is not None:
        adapter.attach(model, layout)
    head = model.get_output_embeddings()
    blocks = model.get_submodule(layout.path)
    in_blocks = set(blocks.modules())
    run = [m for m in model.modules() if m is not head and not isinstance(m, nn.ModuleList)]
    modules = run + ([head] if head else [])
    keys = {parameter: key for key, parameter in enumerate(model.parameters())}
    widths = [_output_width(module) for module in blocks[0].modules()]
    text = config.get_text_config()
    return ModelFacts(
        name=type(model).__name__,
        blocks_path=layout.path,
        num_blocks=layout.num_blocks,
        modules=tuple(ModuleFacts(_kind(m, in_blocks, head), _parameter_facts(m, keys)) for m in modules),
        largest_module=largest_module(model, layout),
        hidden_size=text.hidden_size,
        widest=max(widths),
        num_widest=widths.count(max(widths)),
        cached_width=_cached_width(text),
        vocabulary_size=text.vocab_size,
        max_length=getattr(text, "max_position_embeddings", None),
        itemsize=DTYPES[dtype].itemsize,
        starts_with_a_pass=peft is not None and peft.kind == "prefix",
    )


def _parameter_facts(module: nn.Module, keys: Mapping[nn.Parameter, int]) -> tuple[ParameterFacts, ...]:
    own = module.parameters(recurse=False)
    return tuple(ParameterFacts(keys[p], p.numel(), p.dim() == 1, p.requires_grad) for p in own)


def _kind(module: nn.Module, in_blocks: set[nn.Module], head: nn.Module | None) -> ModuleKind:
    if module is head:
        return "head"
    if module in in_blocks:
        return "block"
    return "embedding" if type(module).forward is nn.Embedding.forward else "other"


def _cached_width(config: Any) -> int:  # noqa: ANN401
    num_heads: int = getattr(config, "num_attention_heads", None) or 1
    head_width: int = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_cached: int = getattr(config, "num_key_value_heads", None) or num_heads
    return 2 * num_cached * head_width


def _output_width(module: nn.Module) -> int:
    own = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 1]
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 2]
    if not weights:
        return 0
    return own[0].numel() if own else weights[0].shape[0]
