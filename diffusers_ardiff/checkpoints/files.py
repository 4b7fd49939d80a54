"""Reading checkpoint files: tensors memory-mapped, never any pickled code."""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
SAFETENSORS_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """Read a `.pt`, `.pth`, `.bin` or `.safetensors` file, or a folder of safetensors shards.

    Tensors are memory-mapped: their bytes are read when they are copied, and unused ones never.

    Raises:
        FileNotFoundError: no such file or folder, or a shard is missing.
        ValueError: another kind of file, pickled code in it, or a damaged file.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint '{path}' does not exist: give the path of a file or of a folder.")
    if path.suffix == SAFETENSORS_SUFFIX:
        return _read_safetensors(path)
    if path.suffix in TORCH_SUFFIXES:
        return _read_torch(path)
    raise ValueError(
        f"checkpoint '{path}' ends in '{path.suffix}': allowed are {[*TORCH_SUFFIXES, SAFETENSORS_SUFFIX]} or a folder "
        "of safetensors; give one of these."
    )


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"'{found[1]}'" if found else "an object that is not a tensor"
        if found and found[1].endswith("BytesIO"):
            what += ", the kind of entry in which TransformerEngine keeps packed fp8 or nvfp4 weights"
        raise ValueError(
            f"checkpoint '{path}' needs pickled code ({what}) to be read: only tensors and plain containers are "
            "allowed, because unpickling runs whatever the file says. Where you trust it, load it once with "
            "weights_only=False and save its tensors with safetensors.torch.save_file."
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(
            f"checkpoint '{path}' can not be read: allowed is a whole file in torch.save's zip format (the default "
            "since PyTorch 1.6). Download it again if it is cut short or a git-lfs pointer, or save it again with "
            "torch.save if it is older."
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(
            f"checkpoint '{path}' holds a {type(content).__name__}: allowed is a dict of tensors; save "
            "model.state_dict()."
        )
    return content


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path, device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint '{path}' can not be read as safetensors ({error}): download it again if it is cut short or a "
            "git-lfs pointer."
        ) from error


def _read_folder(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for shard in _shards(folder):
        tensors = _read_safetensors(shard)
        doubles = sorted(state.keys() & tensors.keys())
        if doubles:
            raise ValueError(
                f"checkpoint folder '{folder}': {len(doubles)} weights are in more than one shard, for example "
                f"{doubles[:5]}; download the folder again."
            )
        state.update(tensors)
    return state


def _shards(folder: Path) -> list[Path]:
    indexes = sorted(folder.glob(f"*{_INDEX_SUFFIX}"))
    files = indexes or sorted(folder.glob(f"*{SAFETENSORS_SUFFIX}"))
    if len(files) != 1:
        raise ValueError(
            f"checkpoint folder '{folder}' holds {[file.name for file in files]}: allowed is one '*{_INDEX_SUFFIX}' "
            f"with its shards or one '*{SAFETENSORS_SUFFIX}' file; give the path of the file itself, or of the "
            "'transformer' folder inside a pipeline folder."
        )
    return _indexed_shards(indexes[0]) if indexes else files


def _indexed_shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{index}' is not a safetensors index (no 'weight_map'): download it again.") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"'{index}' names shards outside its folder: {outside[:5]}; allowed are plain file names.")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"'{index}' names {len(absent)} missing shards, for example {absent[:5]}: download them."
        )
    return [index.parent / name for name in names]
