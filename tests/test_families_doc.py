"""The loop of docs/families.md runs as it is written."""

import re
from pathlib import Path

import torch
from dense import relative_error
from diffusers import SkyReelsV2Transformer3DModel, WanTransformer3DModel
from test_wan_animate import FAMILY as ANIMATE
from tiny_families import FAMILIES, TEXT_DIM, TEXT_LEN, noise, window_mask

IN_PIPELINE = (WanTransformer3DModel, SkyReelsV2Transformer3DModel)
"""Run in test_pipeline.py and test_families.py; the others are refused there."""

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


def rows(text: str) -> list[list[str]]:
    """Model, attach, parity, compile, pipeline: the cells of each row of the table that has them."""
    lines = [
        line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\|.*`\w+3DModel`.*\| yes \|", line)
    ]
    return [cells[next(n for n, cell in enumerate(cells) if "3DModel`" in cell) :][:5] for cells in lines]


def test_the_table_has_every_model() -> None:
    """Its cells are those of the tests that every family goes through; only a pipeline may be a loop."""
    found = {re.search(r"`(\w+)`", cells[0])[1]: cells[1:] for cells in rows(DOC)}
    families = [*FAMILIES.values(), ANIMATE]
    assert set(found) == {family.model.__name__ for family in families}
    for family in families:
        attach, parity, graphs, pipeline = found[family.model.__name__]
        aside = "picture" if family is ANIMATE else "text" if family.text else ""
        assert (attach, graphs) == ("yes", str(family.graphs))
        assert parity == (f"yes, {aside} to {aside}" if aside else "yes")
        assert pipeline == ("yes" if family.model in IN_PIPELINE else "loop")


def test_the_readme_has_the_same_table() -> None:
    """It had a list of names in the place of the table."""
    assert rows((Path(__file__).parents[1] / "README.md").read_text()) == rows(DOC)
