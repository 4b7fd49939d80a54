"""What kind of packed weights a file holds, in words; files of plain weights are none of these."""

import re
from collections.abc import Mapping
from typing import Any

import torch

_PACKED_NAME = re.compile(
    r"(?:^|[._])(?:scale|scale_inv|scale_2|scale_weight|scale_input|scaled_fp8|packed|amax|extra_state)$"
)


def refuse_packed(weights: Mapping[str, Any]) -> None:
    """Raise ValueError where weights are stored for the kernels of another library, and say which kind they are.

    Recognised by dtypes of one byte and by the names of scales and module states beside the weights.
    """
    found = {
        str(name): value.dtype if isinstance(value, torch.Tensor) else None
        for name, value in weights.items()
        if _PACKED_NAME.search(str(name)) or (isinstance(value, torch.Tensor) and value.dtype.itemsize == 1)
    }
    if not found:
        return
    name, dtype = next(iter(found.items()))
    kind = "an entry of a packed format" if dtype is None else str(dtype).removeprefix("torch.")
    raise ValueError(
        f"it holds quantized weights packed for other kernels ({_describe(found)}; '{name}' is {kind}): allowed are "
        "float32, float16 and bfloat16 weights; use the unquantized file of the model."
    )


def _describe(found: Mapping[str, torch.dtype | None]) -> str:
    dtypes = {dtype for dtype in found.values() if dtype is not None}
    has_float8 = any(str(dtype).startswith("torch.float8") for dtype in dtypes)
    if any(name.endswith("_extra_state") for name in found):
        return "states of TransformerEngine modules, which keep fp8 or nvfp4 weights with their scales"
    if torch.uint8 in dtypes:
        return "nvfp4: two 4-bit numbers in each byte, with a scale for each group of them"
    if has_float8:
        return "fp8: 8-bit floating-point weights, with scales beside them"
    if torch.int8 in dtypes:
        return "int8 weights, with scales beside them"
    return "fp8, nvfp4 or int8 weights, with scales beside them"
