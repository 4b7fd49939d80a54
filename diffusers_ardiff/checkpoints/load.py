"""Load the weights of an autoregressive checkpoint into a stock diffusers transformer, all or nothing."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from .files import read_checkpoint
from .lora import LoraPair, check_lora_fits, read_lora
from .names import Layout, map_names, strip_wrappers
from .packed import refuse_packed
from .sizes import SIZE_WEIGHTS, check_same_size, infer_transformer_config

_WRAPPERS_EMA_FIRST = ("generator_ema", "generator", "model", "state_dict")
_WRAPPERS_RAW_FIRST = ("generator", "generator_ema", "model", "state_dict")
_LORA_WRAPPER = "generator_lora"
_LORA_NAME = re.compile(r"(?:^|[._])lora_(?:A|B|up|down)(?:\.|$)")


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """What was loaded.

    Attributes:
        num_tensors: weights written into the transformer.
        wrapper_key: entry of the file that held them, for example "generator_ema"; None: the file itself.
        layout: naming in the file, "original" (Wan) or "diffusers".
        config: constructor arguments of the transformer, inferred from the file.
    """

    num_tensors: int
    wrapper_key: str | None
    layout: Layout
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MatchedWeights:
    """A file's weights under diffusers names, one for each of a transformer's, all of the right shapes.

    Attributes:
        state: memory-mapped tensors as the file has them.
        lora: what a LoRA file adds to some of them.
        report: what was found.
    """

    state: Mapping[str, torch.Tensor]
    lora: Mapping[str, LoraPair]
    report: CheckpointReport

    def weight(self, name: str) -> torch.Tensor:
        """One weight as the file has it, or in float32 with its LoRA added."""
        if name not in self.lora:
            return self.state[name]
        return self.state[name].float() + self.lora[name].delta()


def load_ar_checkpoint(
    transformer: WanTransformer3DModel,
    path: str | os.PathLike[str],
    *,
    use_ema: bool = True,
    lora: str | os.PathLike[str] | None = None,
) -> CheckpointReport:
    """Load an original-layout or diffusers-layout checkpoint into a transformer, in place.

    Every parameter keeps its dtype and device. Nothing is written unless each name in the file maps to one
    parameter, each parameter gets a value and each shape fits. The file is memory-mapped and copied tensor by
    tensor, so no second copy of the model is built. Load before LoRA adapters and before offload hooks.

    Args:
        transformer: a transformer of the same size, for example from the matching Wan diffusers folder.
        path: a `.pt`, `.pth`, `.bin` (tensors only, no pickled code) or `.safetensors` file, or a folder with one
            safetensors file or an index and its shards. Weights may lie under `generator_ema`, `generator`, `model`
            or `state_dict`, and names may carry FSDP, checkpointing and compile prefixes.
        use_ema: prefer `generator_ema` over `generator` where a file has both; False turns the order round.
            `CheckpointReport.wrapper_key` says which one was used.
        lora: a LoRA file of the same model, added to the weights for good (LongLive); see `read_lora`.

    Raises:
        FileNotFoundError: no such file, or a shard is missing.
        ValueError: the file can not be read without running code, is a LoRA or a packed fp8/nvfp4 file, has missing,
            unexpected or doubled names, or another size; the LoRA does not fit; or the transformer can not be written.
    """
    content = read_checkpoint(Path(path))
    try:
        targets = _writable_weights(transformer)
    except ValueError as error:
        raise ValueError(f"checkpoint '{os.fspath(path)}' was not loaded: {error}") from error
    matched = match_checkpoint(transformer, targets, path, content=content, use_ema=use_ema, lora=lora)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(matched.weight(name))
    return matched.report


def match_checkpoint(
    transformer: WanTransformer3DModel,
    targets: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    content: Mapping[str, Any] | None = None,
    use_ema: bool = True,
    lora: str | os.PathLike[str] | None = None,
) -> MatchedWeights:
    """Find a file's tensor for each of a transformer's weights, without copying any; see `load_ar_checkpoint`.

    Args:
        transformer: of the same size; may be on the meta device.
        targets: its weights by diffusers name; only names and shapes are read.
        content: what was read from `path` already.

    Raises:
        FileNotFoundError, ValueError: as `load_ar_checkpoint`.
    """
    content = read_checkpoint(Path(path)) if content is None else content
    try:
        wrapper_key, weights = unwrap_weights(content, use_ema)
        state, layout = _named_weights(transformer, weights)
        head_dim = int(transformer.config["attention_head_dim"])
        _check_sizes(state, targets, head_dim)
        _check_names(state, targets)
        _check_shapes(state, targets)
        config = infer_transformer_config(state, attention_head_dim=head_dim)
        pairs = {} if lora is None else read_lora(lora)
        check_lora_fits(pairs, targets)
    except ValueError as error:
        raise ValueError(f"checkpoint '{os.fspath(path)}' was not loaded: {error}") from error
    report = CheckpointReport(num_tensors=len(targets), wrapper_key=wrapper_key, layout=layout, config=config)
    return MatchedWeights(state=state, lora=pairs, report=report)


def _writable_weights(transformer: WanTransformer3DModel) -> dict[str, torch.Tensor]:
    weights = {strip_wrappers(name): tensor for name, tensor in transformer.state_dict().items()}
    if any(".base_layer." in name for name in weights):
        raise ValueError("the transformer carries LoRA adapters: load the checkpoint first and the LoRA after it.")
    for name, tensor in weights.items():
        if not _is_plain(tensor) or not tensor.is_floating_point():
            raise ValueError(
                f"'{name}' of the transformer is {type(tensor).__name__} {tensor.dtype} on {tensor.device}: allowed are "
                "plain floating-point tensors that hold data; load before quantization, sharding and offload."
            )
    return weights


def unwrap_weights(content: Mapping[str, Any], use_ema: bool) -> tuple[str | None, Mapping[str, torch.Tensor]]:
    """The wrapper key and the weights under it; ValueError for LoRA, packed and other entries."""
    order = _WRAPPERS_EMA_FIRST if use_ema else _WRAPPERS_RAW_FIRST
    key = next((key for key in order if isinstance(content.get(key), Mapping) and content[key]), None)
    weights = content if key is None else content[key]
    _refuse_lora(weights)
    refuse_packed(weights)
    others = [name for name, value in weights.items() if not isinstance(name, str) or not _is_plain(value)]
    if others:
        raise ValueError(
            f"{len(others)} entries of {key or 'the file'} are not plain tensors, for example {others[:5]}: allowed are "
            f"weights only, flat or under one of {list(order)}; save the state dict of the model there."
        )
    return key, weights


def _refuse_lora(weights: Mapping[str, Any]) -> None:
    is_lora = _LORA_WRAPPER in weights or any(_LORA_NAME.search(str(name)) for name in weights)
    if is_lora and not any(str(name).endswith(SIZE_WEIGHTS[0]) for name in weights):
        raise ValueError(
            "it is a LoRA file, which holds no base weights: load it with pipe.load_lora_weights on top of a base "
            "checkpoint."
        )


def _named_weights(
    transformer: WanTransformer3DModel, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], Layout]:
    names, layout = map_names(weights)
    ignored = transformer._keys_to_ignore_on_load_unexpected or []
    state = {
        names[name]: tensor
        for name, tensor in weights.items()
        if not any(re.search(pattern, names[name]) for pattern in ignored)
    }
    return state, layout


def _check_sizes(state: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], head_dim: int) -> None:
    # Another size would drown in hundreds of missing names and wrong shapes, so it is told before them.
    if all(name in state for name in SIZE_WEIGHTS):
        base_config = infer_transformer_config(targets, attention_head_dim=head_dim)
        check_same_size(infer_transformer_config(state, attention_head_dim=head_dim), base_config)


def _check_names(state: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    missing = [name for name in targets if name not in state]
    unexpected = [name for name in state if name not in targets]
    if missing or unexpected:
        raise ValueError(
            f"{len(missing)} weights are missing from it (first: {missing[:5]}), {len(unexpected)} are unexpected "
            f"(first: {unexpected[:5]}): allowed is exactly one tensor for each of the transformer's {len(targets)}; "
            "use a checkpoint of this architecture."
        )


def _check_shapes(state: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    wrong = [
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} instead of {tuple(targets[name].shape)}"
        for name, tensor in state.items()
        if tensor.shape != targets[name].shape or not tensor.is_floating_point()
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} weights do not fit (first: {wrong[:5]}): allowed are floating-point tensors of the base's "
            "shapes; use a base folder of the same architecture."
        )


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    # Sharded, quantized and sparse tensors can fail halfway through the copy, and meta tensors swallow it.
    if not isinstance(value, torch.Tensor) or type(value.data) is not torch.Tensor:
        return False
    return value.layout is torch.strided and not value.is_meta
