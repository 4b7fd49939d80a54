"""LoRA files in the layout of autoregressive Wan trainings: PEFT names over original weight names, under `generator_lora`.

`blocks.0.self_attn.q.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank] change `blocks.0.attn1.to_q.weight`
by `alpha / rank * B @ A`. The two ways to use one:

    load_ar_checkpoint(transformer, "longlive_base.pt", lora="lora.pt")     # merged, one rounding, no peft needed
    pipe.load_lora_weights(ar_lora_state_dict("lora.pt"))                   # an adapter: scale, switch off, unload
"""

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .files import read_checkpoint
from .names import strip_wrappers, to_diffusers_name

_WRAPPERS = ("generator_lora", "generator_ema", "generator", "model", "state_dict")
_ENTRY = re.compile(r"(?P<module>.+)\.(?:lora_(?P<side>A|B|down|up)(?:\.[^.]+)??\.weight|(?P<alpha>alpha))")
_SIDES = {"A": "down", "down": "down", "B": "up", "up": "up"}


@dataclass(frozen=True, kw_only=True)
class LoraPair:
    """The change of one weight: `down` [rank, in], `up` [out, rank], `alpha`, at first as large as the rank."""

    down: torch.Tensor
    up: torch.Tensor
    alpha: float

    @property
    def scale(self) -> float:
        """alpha / rank, the factor of the product."""
        return self.alpha / self.down.shape[0]

    def delta(self) -> torch.Tensor:
        """[out, in] float32: what is added to the weight."""
        return self.scale * (self.up.float() @ self.down.float())


def read_lora(path: str | os.PathLike[str], *, alpha: float | None = None) -> dict[str, LoraPair]:
    """Read a LoRA file; keys are the diffusers names of the weights it changes.

    Args:
        path: a `.pt`, `.pth`, `.bin` or `.safetensors` file, tensors flat or under `generator_lora`.
        alpha: of the training, where the file does not say; None: the rank, which makes the factor 1 (LongLive).

    Raises:
        FileNotFoundError: no such file.
        ValueError: not readable, no LoRA, entries of another kind, or a pair with one side only.
    """
    content = read_checkpoint(Path(path))
    try:
        return _pair(_unwrap(content), alpha)
    except ValueError as error:
        raise ValueError(f"LoRA '{os.fspath(path)}' was not loaded: {error}") from error


def ar_lora_state_dict(path: str | os.PathLike[str], *, alpha: float | None = None) -> dict[str, torch.Tensor]:
    """A LoRA file as `pipe.load_lora_weights` takes it: `transformer.blocks.0.attn1.to_q.lora_A.weight` and so on.

    The factor alpha / rank is multiplied into the `lora_B` weights. Takes the arguments of `read_lora` and raises like it.
    """
    state = {}
    for name, pair in read_lora(path, alpha=alpha).items():
        module = f"transformer.{name.removesuffix('.weight')}"
        state[f"{module}.lora_A.weight"] = pair.down.contiguous()
        state[f"{module}.lora_B.weight"] = (pair.scale * pair.up).to(pair.up.dtype).contiguous()
    return state


def check_lora_fits(lora: Mapping[str, LoraPair], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless each pair changes one weight, of its shape."""
    unknown = [name for name in lora if name not in weights]
    wrong = [
        f"{name} {tuple(weights[name].shape)} by {(pair.up.shape[0], pair.down.shape[1])}"
        for name, pair in lora.items()
        if name in weights and tuple(weights[name].shape) != (pair.up.shape[0], pair.down.shape[1])
    ]
    if unknown or wrong:
        raise ValueError(
            f"the LoRA changes {len(unknown)} weights that the transformer lacks (first: {unknown[:3]}) and {len(wrong)} "
            f"of another shape (first: {wrong[:3]}); use the LoRA of this base model."
        )


def _unwrap(content: Mapping[str, Any]) -> Mapping[str, Any]:
    key = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
    return content if key is None else content[key]


def _pair(entries: Mapping[str, Any], alpha: float | None) -> dict[str, LoraPair]:
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, value in entries.items():
        match = _ENTRY.fullmatch(str(name))
        if match is None or not isinstance(value, torch.Tensor):
            raise ValueError(
                f"'{name}' is no part of a LoRA: allowed are tensors named *.lora_A.weight, *.lora_B.weight (or lora_down, "
                "lora_up) and *.alpha; a file of whole weights goes into ar_checkpoint."
            )
        side = "alpha" if match["alpha"] else _SIDES[match["side"]]
        found[_weight_name(match["module"])][side] = value
    if not found:
        raise ValueError("it holds no tensors: give a file with *.lora_A.weight and *.lora_B.weight.")
    single = [name for name, sides in found.items() if not {"down", "up"} <= sides.keys()]
    if single:
        raise ValueError(
            f"{len(single)} weights have one side of a pair only (first: {single[:3]}); get the whole file."
        )
    return {name: _make_pair(name, sides, alpha) for name, sides in found.items()}


def _make_pair(name: str, sides: Mapping[str, torch.Tensor], alpha: float | None) -> LoraPair:
    down, up = sides["down"], sides["up"]
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
        raise ValueError(
            f"the pair of '{name}' is {tuple(down.shape)} and {tuple(up.shape)}: allowed are [rank, in] and [out, rank]; "
            "only linear layers are supported."
        )
    if "alpha" in sides:
        alpha = float(sides["alpha"])
    return LoraPair(down=down, up=up, alpha=float(down.shape[0]) if alpha is None else alpha)


def _weight_name(module: str) -> str:
    bare = strip_wrappers(module.removeprefix("base_model.").removeprefix("transformer."))
    return to_diffusers_name(f"{bare}.weight")
