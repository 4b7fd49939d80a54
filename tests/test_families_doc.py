"""The loop of docs/families.md runs as it is written."""

import re
from pathlib import Path

import torch
from dense import relative_error
from tiny_families import FAMILIES, TEXT_DIM, TEXT_LEN, noise, window_mask

DOC = (Path(__file__).parents[1] / "docs" / "families.md").read_text()


def test_the_loop_generates_and_its_commits_equal_the_stock_model() -> None:
    """Its last commit forward gives what the stock model gives for those frames under the banded mask."""
    family = FAMILIES["ltx"]
    transformer, committed = family.make(), []
    (code,) = re.findall(r"<!-- tested -->\n```python\n(.*?)```", DOC, re.DOTALL)
    names = {
        "transformer": transformer, "prompt_embeds": noise(1, TEXT_LEN, TEXT_DIM), "num_chunks": 5,
        "prompt_mask": torch.tensor([[1, 1, 1, 0, 0]]), "height": 4, "width": 6, "channels": 4,
        "dtype": torch.float32, "device": "cpu",
    }  # fmt: skip
    hook = transformer.register_forward_hook(lambda module, args, out: committed.append(out[0]))
    torch.manual_seed(0)
    exec(code, names)
    hook.remove()
    video = torch.cat(names["video"], dim=2)
    assert video.shape == (1, 4, 15, 4, 6) and bool(video.isfinite().all())
    assert len(committed) == 5 * 4
    twin = family.masked_copy(transformer, window_mask([3] * 5, 1, 6, family.tokens))
    stock = family.run(twin, video, 0)
    # The loop's angles are exact, the stock model's rounded to float32.
    assert relative_error(committed[-1], stock[:, -3 * family.tokens :]) < 1e-3


def test_the_table_has_every_model() -> None:
    for family in FAMILIES.values():
        name = f"`{family.model.__name__}`"
        (row,) = [line for line in DOC.splitlines() if line.startswith("|") and name in line]
        assert f"| {family.graphs} |" in row
