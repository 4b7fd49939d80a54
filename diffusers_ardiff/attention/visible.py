"""Attention over a part of what is stored: the visible keys are gathered into a pool of their own, in pages like any other.

So every backend serves it, unchanged. The copy costs about a tenth of the attention; forwards that see all that is
stored do not come here.
"""

from __future__ import annotations

from dataclasses import replace

from ..cache.float8 import take_rows
from ..launch import LaunchPlan
from ..layer_inputs import PagedLayerInputs


def visible_plan(plan: LaunchPlan) -> LaunchPlan:
    """The plan of the attention itself: over the visible keys, where some are hidden."""
    if plan.visible is None:
        return plan
    return replace(plan, rows=plan.visible.rows, staging=None, visible=None)


def gather_visible(inputs: PagedLayerInputs, plan: LaunchPlan) -> PagedLayerInputs:
    """One layer's inputs over the visible keys only, copied once the forward's own rows are written."""
    visible = plan.visible
    if visible is None:
        return inputs
    return inputs._replace(
        key_pool=take_rows(inputs.key_pool, visible.slots),
        value_pool=take_rows(inputs.value_pool, visible.slots),
        block_table=visible.block_table,
        seq_lens=visible.seq_lens,
    )
