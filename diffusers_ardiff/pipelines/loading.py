"""Where a pipeline comes from: the built-in model, or a folder that has to be complete."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

BUILT_IN_MODELS = ("tiny",)
REQUIRED_PARTS = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")


def resolve_model(name_or_path: str | os.PathLike[str]) -> str:
    """Path of a built-in model by its name; anything else is returned as it is.

    A folder of the same name in the working directory is reached as ``./tiny``.
    """
    if name_or_path in BUILT_IN_MODELS:
        return str(resources.files("diffusers_ardiff") / "builtin" / str(name_or_path))
    return os.fspath(name_or_path)


def check_model_folder(path: str, given: Mapping[str, Any]) -> None:
    """Raise OSError where a local folder is no complete diffusers model; hub ids are left to diffusers.

    The message says what is missing. Components in ``given`` need no files.
    """
    folder = Path(path)
    looks_local = folder.exists() or folder.is_absolute() or path.startswith((".", "~"))
    if not looks_local:
        return
    if not folder.is_dir():
        raise OSError(
            f"{path!r} is not a folder. Give a diffusers folder, a hub id, or a built-in model {list(BUILT_IN_MODELS)}; "
            "an original checkpoint file goes into ar_checkpoint=, on top of a base folder."
        )
    index_file = folder / "model_index.json"
    if not index_file.is_file():
        raise OSError(
            f"{path!r} is no diffusers folder: model_index.json is missing. A Wan folder has model_index.json and "
            f"{', '.join(f'{part}/' for part in REQUIRED_PARTS)}."
        )
    listed = _read_index(index_file)
    absent = [part for part in REQUIRED_PARTS if part not in listed and part not in given]
    empty = [
        part
        for part in REQUIRED_PARTS
        if part in listed and part not in given and listed[part] != [None, None] and not any((folder / part).glob("*"))
    ]
    faults = [f"model_index.json does not list {', '.join(absent)}"] if absent else []
    faults += [f"no files in {', '.join(f'{part}/' for part in empty)}"] if empty else []
    if faults:
        raise OSError(f"{path!r} is incomplete: {'; '.join(faults)}.")


def _read_index(index_file: Path) -> dict[str, Any]:
    try:
        listed = json.loads(index_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"'{index_file}': model_index.json is no JSON object ({error}).") from error
    if not isinstance(listed, dict):
        raise OSError(f"'{index_file}': model_index.json is no JSON object but a {type(listed).__name__}.")
    return listed


def fetch_base(name_or_path: str | os.PathLike[str]) -> str:
    """A folder with everything of a Wan model but its transformer's weights: built-in, local, or fetched from the hub."""
    path = resolve_model(name_or_path)
    is_hub_id = not os.path.isabs(path) and not os.path.exists(path) and path.count("/") == 1 and path[0] not in ".~"
    if not is_hub_id:
        return path
    from huggingface_hub import snapshot_download

    unneeded = [f"transformer*/*.{kind}" for kind in ("safetensors", "bin", "pt", "index.json")]
    return snapshot_download(path, ignore_patterns=[*unneeded, "*.md", "assets/*", "examples/*"])
