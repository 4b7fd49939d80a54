"""What a family of transformers must say so that its self-attention can run over the paged cache.

An adapter is one ``TransformerFamily`` in a file of its own, registered once. It is found by the attributes that a
transformer has, never by its class name, so models built alike share an adapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..cache import KVShape, TextKV
from ..rope import Rotary
from .base import HostSettings, PagedSelfAttnProcessor

RopeFunction = Callable[[Sequence[Sequence[int]], int, int, torch.device | str], Rotary]
"""(frame positions of each row, patch rows, patch columns, device) -> cos, sin of the tokens, frame by frame."""


@dataclass(frozen=True, kw_only=True)
class TransformerGeometry:
    """What the cache needs to know of a transformer, read from its modules and config, never assumed.

    ``patch_size`` is (frames, height, width). Where a patch spans several latent frames, what this package calls a
    latent frame (of a chunk, a window, a position) is one patch in time.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: tuple[int, int, int]

    def tokens_per_frame(self, latent_height: int, latent_width: int) -> int:
        """C, tokens of one latent frame.

        Raises:
            ValueError: the latent size is no multiple of the patch.
        """
        _, patch_height, patch_width = self.patch_size
        if latent_height % patch_height or latent_width % patch_width:
            raise ValueError(
                f"latent frames of {latent_height}x{latent_width} can't be cut into patches of "
                f"{patch_height}x{patch_width}; use multiples of the patch."
            )
        return (latent_height // patch_height) * (latent_width // patch_width)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """Shape of keys and values stored in ``dtype``."""
        return KVShape(
            num_layers=self.num_layers, num_heads=self.num_heads, head_dim=self.head_dim, itemsize=dtype.itemsize
        )


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A list of blocks whose self-attention goes through the cache.

    Attributes:
        blocks: attribute of the transformer.
        self_attn: attribute of a block; ``cross_attn`` too, where the family caches text keys and values.
        parts: what each of these modules must have.
        optional: models of the family may lack the list.
    """

    blocks: str
    self_attn: str
    cross_attn: str | None = None
    parts: tuple[str, ...] = ()
    optional: bool = False


class Layer(NamedTuple):
    """One layer of the cache: a self-attention module, and the cross-attention beside it where text is cached."""

    self_attn: Any
    cross_attn: Any | None


class TransformerFamily:
    """Base of the adapters. A new one sets the class attributes and defines ``make_self_processor``, ``patch_size``,
    ``make_rope``; the rest has defaults.

    Attributes:
        name: for messages and tables.
        parts: attributes that a transformer of the family has; dots reach inside.
        absent: attributes that tell a similar family apart: having one of them is not being of this family.
        stacks: where self-attention is. The layers of the cache are the blocks of the first, then of the next.
        rope_module: attribute of the transformer whose module is replaced by one that returns the bound angles; None:
            the processors are handed the angles, and those of the host are not read while a forward is bound.
        checks_calls: whether ``check_call`` looks at every call of the transformer while a forward is bound.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    absent: ClassVar[tuple[str, ...]] = ()
    stacks: ClassVar[tuple[Stack, ...]]
    rope_module: ClassVar[str | None] = None
    checks_calls: ClassVar[bool] = False

    def missing(self, transformer: Any) -> list[str]:
        """Parts that a transformer lacks to be of this family; empty: it is. Only the first bad block is listed."""
        missing = [path for path in self.parts if not _has_part(transformer, path)]
        missing += [f"no {path}" for path in self.absent if find_part(transformer, path) is not None]
        for stack in self.stacks:
            blocks = getattr(transformer, stack.blocks, None)
            if blocks is None or len(blocks) == 0:
                missing += [] if stack.optional or stack.blocks in missing else [stack.blocks]
                continue
            found = (_missing_in_block(stack, index, block) for index, block in enumerate(blocks))
            missing += next((parts for parts in found if parts), [])
        return missing

    def refusals(self, transformer: Any) -> list[str]:
        """Why a transformer of this family can't be right chunk by chunk, a phrase each; empty: it can."""
        return []

    def blocks(self, transformer: Any) -> list[Any]:
        """All blocks with self-attention, in the order of the cache's layers."""
        return [block for stack in self.stacks for block in getattr(transformer, stack.blocks, None) or []]

    def layers(self, transformer: Any) -> list[Layer]:
        """The attention modules of each layer of the cache; None where a block lacks one."""
        return [
            Layer(getattr(block, stack.self_attn, None), stack.cross_attn and getattr(block, stack.cross_attn, None))
            for stack in self.stacks
            for block in getattr(transformer, stack.blocks, None) or []
        ]

    def geometry(self, transformer: Any) -> TransformerGeometry:
        """Layers, heads, head size and patch of a transformer."""
        layers = self.layers(transformer)
        num_heads, head_dim = self.heads(layers[0].self_attn)
        return TransformerGeometry(
            num_layers=len(layers), num_heads=num_heads, head_dim=head_dim, patch_size=self.patch_size(transformer)
        )

    def heads(self, attn: Any) -> tuple[int, int]:
        """Number and size of the heads of a self-attention module."""
        return attn.heads, attn.to_k.out_features // attn.heads

    def patch_size(self, transformer: Any) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latents."""
        raise NotImplementedError

    def make_self_processor(self, attn: Any) -> PagedSelfAttnProcessor:
        """A processor for a self-attention module, around the one that it has now."""
        raise NotImplementedError

    def make_cross_processor(self, attn: Any) -> HostSettings:
        """A processor for a cross-attention module, around the one that it has now; only where stacks name them."""
        raise NotImplementedError

    def make_rope(self, transformer: Any, *args: Any, **kwargs: Any) -> RopeFunction:
        """Angles of tokens at absolute frames, as this transformer rotates. Families take options by keyword: what their
        host takes per call, such as frames a second.
        """
        raise NotImplementedError

    def compute_text_kv(
        self, transformer: Any, prompt_embeds: torch.Tensor, image_embeds: torch.Tensor | None
    ) -> TextKV:
        """Text K/V of all layers, where the family caches them.

        Raises:
            NotImplementedError: the host computes them in every forward.
        """
        raise NotImplementedError(
            f"{self.name} transformers compute the keys and values of the text in every forward; bind a forward without "
            "text, and give the transformer the prompt as usual."
        )

    def sharding_refusals(self, transformer: Any) -> list[str]:
        """Why tokens and heads can't be dealt out to several ranks, a phrase each; empty: they can."""
        return [f"no adapter says where the tokens of {self.name} transformers are cut and joined"]

    def fused_write_refusals(self, attn: Any, num_heads: int, head_dim: int) -> list[str]:
        """Why the fused kernel can't normalise and rotate for this module, a phrase each; empty: it can."""
        return [f"{self.name} layers normalise and rotate in torch"]

    def register_hooks(self, transformer: Any, bound: Callable[[], Any]) -> list[Any]:
        """Hooks that the transformer has while it is attached; returns their handles.

        Args:
            transformer: a model of the family.
            bound: gives the forward context that is bound, None where none is.
        """
        if not self.checks_calls:
            return []
        signature = inspect.signature(type(transformer).forward)

        def check(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            context = bound()
            if context is not None:
                self.check_call(transformer, signature.bind_partial(module, *args, **kwargs).arguments, context)

        return [transformer.register_forward_pre_hook(check, with_kwargs=True)]

    def check_call(self, transformer: Any, call: Mapping[str, Any], context: Any) -> None:
        """Look at the arguments of a call while a forward context is bound.

        Raises:
            ValueError: with these arguments the result would be wrong.
        """


_families: dict[str, TransformerFamily] = {}


def register_family(family: TransformerFamily) -> TransformerFamily:
    """Let ``attach_paged_attention`` find a family; returns it.

    Raises:
        ValueError: another family has that name.
    """
    known = _families.setdefault(family.name, family)
    if known is not family:
        raise ValueError(f"a family named {family.name!r} is registered already; give the new one another name.")
    return family


def unregister_family(name: str) -> None:
    """Forget a family; unknown names do nothing."""
    _families.pop(name, None)


def list_families() -> list[TransformerFamily]:
    """All registered families."""
    return list(_families.values())


def find_family(transformer: Any) -> TransformerFamily:
    """The family that a transformer is built like.

    Raises:
        TypeError: it is of none, and the message lists what is missing for each, the closest first; it is of several;
            or it is of one that refuses it, and the message says why.
    """
    model = type(transformer).__name__
    missing = {family: family.missing(transformer) for family in _families.values()}
    fitting = [family for family, parts in missing.items() if not parts]
    if not fitting:
        closest = sorted(missing, key=lambda family: len(missing[family]))
        lacks = "; ".join(f"{family.name}: {missing[family]}" for family in closest)
        raise TypeError(
            f"{model} is built like no transformer that paged attention knows. Missing for each family: {lacks}. "
            "docs/families.md lists supported models and says how to write an adapter."
        )
    if len(fitting) > 1:
        names = [family.name for family in fitting]
        raise TypeError(
            f"{model} fits several families, {names}; give one of them an ``absent`` part to tell it apart."
        )
    reasons = fitting[0].refusals(transformer)
    if reasons:
        raise TypeError(f"{model} ({fitting[0].name}) can't be run chunk by chunk: " + "; ".join(reasons) + ".")
    return fitting[0]


def find_part(root: Any, path: str) -> Any:
    """The attribute at a dotted path; None where it is missing or None."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root


def _has_part(root: Any, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    return hasattr(find_part(root, parent) if parent else root, name)


def _missing_in_block(stack: Stack, index: int, block: Any) -> list[str]:
    names = (stack.self_attn,) if stack.cross_attn is None else (stack.self_attn, stack.cross_attn)
    paths = [f"{name}.{part}" for name in names for part in stack.parts]
    return [f"{stack.blocks}.{index}.{path}" for path in paths if find_part(block, path) is None]
