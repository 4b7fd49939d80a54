"""The definition of correct: float32 softmax over each row's explicit list of keys. Runs anywhere, slowly."""

from __future__ import annotations

import torch

from ...cache.float8 import FLOAT8, take_rows
from ...context import LaunchPlan, PagedLayerInputs
from ..keys import gather_slots
from ..registry import AttentionBackend, register_backend


def attend(query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, softmax_scale: float) -> torch.Tensor:
    """Attend row by row: query (R, L, H, D) over what it sees of the first ``seq_len`` storage indices of its row."""
    visible = None if plan.mask is None else plan.mask.dense(query.device)
    outputs = []
    for index, row in enumerate(plan.rows):
        slots = gather_slots(inputs.block_table[index : index + 1], plan.page_size, row.seq_len)[0]
        keys, values = (take_rows(pool, slots).float() for pool in inputs[:2])
        scores = torch.einsum("lhd,nhd->hln", query[index].float(), keys) * softmax_scale
        if visible is not None:
            scores = scores.masked_fill(~visible[index, :, : row.seq_len], float("-inf"))
        outputs.append(torch.einsum("hln,nhd->lhd", scores.softmax(dim=-1), values))
    return torch.stack(outputs).to(query.dtype)


BACKEND = register_backend(
    AttentionBackend(
        name="reference",
        attend=attend,
        rank=1000,
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16, FLOAT8}),
        on_hip=True,
        masks=True,
    )
)
