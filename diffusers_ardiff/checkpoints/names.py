"""Weight names: training wrappers off, original Wan layout to diffusers layout.

Names in diffusers layout pass through unchanged, so both layouts take the same path. The one name that exists in
both with another meaning is resolved by content: only the cross-attention norm has weights, and it is `norm3` in the
original layout and `norm2` in diffusers.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

Layout = Literal["original", "diffusers"]

_WRAPPER_PARTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_LEADING_PARTS = frozenset({"model", "generator", "diffusion_model"})

_ATTENTION_LEAVES = {
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "o": "to_out.0",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
    "k_img": "add_k_proj",
    "v_img": "add_v_proj",
    "norm_k_img": "norm_added_k",
}
_BLOCK_NAMES = {
    **{f"self_attn.{original}": f"attn1.{ours}" for original, ours in _ATTENTION_LEAVES.items()},
    **{f"cross_attn.{original}": f"attn2.{ours}" for original, ours in _ATTENTION_LEAVES.items()},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}
_TOP_NAMES = {
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_BLOCK_PATTERN = re.compile(r"(blocks\.\d+\.)(.+)")


def strip_wrappers(name: str) -> str:
    """Remove what FSDP, activation checkpointing, compile and training wrappers put into a weight name.

    `model._fsdp_wrapped_module.blocks.0._orig_mod.ffn.0.bias` becomes `blocks.0.ffn.0.bias`.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPER_PARTS]
    while len(parts) > 1 and parts[0] in _LEADING_PARTS:
        parts = parts[1:]
    return ".".join(parts)


def to_diffusers_name(name: str) -> str:
    """The diffusers name of one weight; a name that is not in the original layout is returned as it is.

    The table is the one of diffusers' conversion script for Wan. `blocks.0.self_attn.o.bias` becomes
    `blocks.0.attn1.to_out.0.bias`.
    """
    match = _BLOCK_PATTERN.fullmatch(name)
    prefix, rest, table = (match[1], match[2], _BLOCK_NAMES) if match else ("", name, _TOP_NAMES)
    if rest in table:
        return prefix + table[rest]
    module, dot, leaf = rest.rpartition(".")
    return f"{prefix}{table.get(module, module)}{dot}{leaf}"


def map_names(names: Iterable[str]) -> tuple[dict[str, str], Layout]:
    """Map names in a file to diffusers names, one to one.

    Returns:
        The mapping {name in the file: diffusers name}, and the layout: "original" if any name had to be translated.

    Raises:
        ValueError: two names in the file stand for the same weight.
    """
    bare = {name: strip_wrappers(name) for name in names}
    mapped = {name: to_diffusers_name(stripped) for name, stripped in bare.items()}
    doubles = [ours for ours, count in Counter(mapped.values()).items() if count > 1]
    if doubles:
        same = [name for name, ours in mapped.items() if ours == doubles[0]]
        raise ValueError(
            f"{len(doubles)} weights occur more than once under different names, for example {same}: allowed is one "
            "tensor a weight; save a single copy of the model into the file."
        )
    translated = any(bare[name] != ours for name, ours in mapped.items())
    return mapped, "original" if translated else "diffusers"
