"""Where a pipeline comes from: diffusers folders and hub ids, other pipelines, published checkpoints."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from typing import Any, Self

import diffusers
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from ..checkpoints import load_ar_checkpoint
from ..recipes import Recipe, load_recipe
from .loading import check_model_folder, resolve_model

_CAUSAL_WAN = re.compile(r"(?=.*wan)(?=.*(?:causal|autoregressive)).*transformer", re.IGNORECASE)
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token", "variant")


class PretrainedLoading:
    """The pipeline's ways to come into being; mixed in before ``DiffusionPipeline``."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        recipe: str | Mapping[str, Any] | Recipe | None = None,
        ar_checkpoint: str | os.PathLike[str] | None = None,
        ar_lora: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a diffusers folder or hub id of a Wan model, or a built-in model by name (``"tiny"``, no network).

        A folder whose transformer is of a causal Wan class that diffusers lacks is loaded as ``WanTransformer3DModel``,
        if every weight fits.

        Args:
            pretrained_model_name_or_path: folder, hub id or ``"tiny"``.
            recipe: replaces the saved recipe.
            ar_checkpoint: original-layout weights (.pt, .safetensors) to load over the transformer; see
                ``load_ar_checkpoint``.
            ar_lora: LoRA file that belongs to ``ar_checkpoint``, merged into it (LongLive).
            **kwargs: as in ``DiffusionPipeline.from_pretrained`` (``dtype=``, components, ...).

        Raises:
            OSError: the folder is incomplete; the message says what is missing.
            ValueError: unknown recipe, or a checkpoint that does not fit; nothing is half loaded.
        """
        if ar_lora is not None and ar_checkpoint is None:
            raise ValueError(
                "`ar_lora` is merged into `ar_checkpoint`, and none was given. On a folder that has its weights, use "
                "pipe.load_lora_weights(ar_lora_state_dict(path))."
            )
        path = resolve_model(pretrained_model_name_or_path)
        check_model_folder(path, given=kwargs)
        if recipe is not None:
            kwargs["recipe"] = load_recipe(recipe).to_dict()
        unknown = _unknown_transformer(cls, path, kwargs)
        given = {**kwargs, "transformer": None} if unknown else kwargs
        pipe = super().from_pretrained(path, **given)  # type: ignore[misc]
        if unknown:
            is_given = "transformer" in kwargs
            pipe.register_modules(
                transformer=kwargs["transformer"] if is_given else _load_as_wan(path, unknown, kwargs)
            )
        if ar_checkpoint is not None:
            load_ar_checkpoint(pipe.transformer, ar_checkpoint, lora=ar_lora)
        return pipe

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        """A pipeline over the components of another one, shared and as they are.

        diffusers casts them to float32 where no dtype is given, the other pipeline's too; here they keep their dtype.

        Args:
            pipeline: a Wan pipeline, or one of this class, whose recipe is taken over.
            **kwargs: components and ``recipe`` to replace; with ``dtype=`` or ``custom_pipeline=`` it is diffusers' own
                ``from_pipe``.

        Raises:
            TypeError: an unknown argument.
        """
        if {"dtype", "torch_dtype", "custom_pipeline"} & kwargs.keys():
            return super().from_pipe(pipeline, **kwargs)  # type: ignore[misc]
        names = set(inspect.signature(cls.__init__).parameters) - {"self"}
        unknown = sorted(kwargs.keys() - names)
        if unknown:
            raise TypeError(f"from_pipe() got unexpected arguments {unknown}; known: {sorted(names)}, dtype.")
        found: dict[str, Any] = {name: pipeline.components.get(name) for name in names - {"recipe"}}
        found["recipe"] = pipeline.config.get("recipe")
        return cls(**found | kwargs)


def _unknown_transformer(cls: Any, path: str, given: Mapping[str, Any]) -> str | None:
    """The transformer's class where diffusers lacks it, and either one is given or the name is that of a causal Wan model.

    Raises:
        ValueError: another unknown class, or arguments that only a known one can take.
    """
    hub = {name: value for name, value in given.items() if name in _HUB_ARGUMENTS and name != "variant"}
    entry = cls.load_config(path, **hub).get("transformer")
    name = entry[1] if isinstance(entry, (list, tuple)) and entry[0] == "diffusers" else None
    if isinstance(name, str) and name.startswith("AnyFlow") and "transformer" not in given:
        raise ValueError(
            f"{path!r} holds an {name}, whose forward takes a second timestep: it is not sampled chunk by chunk here. "
            "diffusers' own AnyFlowFARPipeline and AnyFlowPipeline run it."
        )
    if not isinstance(name, str) or hasattr(diffusers, name):
        return None
    if "transformer" in given:
        return name
    if _CAUSAL_WAN.fullmatch(name.removesuffix("3DModel").removesuffix("Model")) is None:
        raise ValueError(
            f"{path!r} names the transformer class {name!r}, which diffusers {diffusers.__version__} does not have: known "
            "classes load, and causal Wan classes by their weights; give a transformer of your own with transformer=."
        )
    for argument in ("device_map", "quantization_config"):
        if given.get(argument) is not None:
            raise ValueError(
                f"{path!r} names the unknown transformer class {name!r}, which does not go with {argument}=: save the "
                "pipeline with save_pretrained first, and load that folder."
            )
    return name


def _load_as_wan(path: str, class_name: str, kwargs: Mapping[str, Any]) -> WanTransformer3DModel:
    options = {name: value for name, value in kwargs.items() if name in _HUB_ARGUMENTS}
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if isinstance(dtype, Mapping):
        dtype = dtype.get("transformer", dtype.get("default"))
    if dtype is not None:
        options["torch_dtype"] = dtype
    try:
        transformer, found = WanTransformer3DModel.from_pretrained(
            path, subfolder="transformer", output_loading_info=True, ignore_mismatched_sizes=False, **options
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the transformer of {path!r} ({class_name}) is no stock Wan transformer: {error}") from error
    missing, unexpected = found["missing_keys"], found["unexpected_keys"]
    if missing or unexpected:
        raise ValueError(
            f"the transformer of {path!r} ({class_name}) is no stock Wan transformer: {len(missing)} weights are missing "
            f"(first: {sorted(missing)[:3]}), {len(unexpected)} are unexpected (first: {sorted(unexpected)[:3]}). Models "
            "with layers of their own are not supported."
        )
    return transformer
