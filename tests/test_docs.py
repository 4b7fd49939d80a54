"""Every Python block of the README and the docs runs, but for those that say what they need: a GPU, or a download."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import runpy
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, TEXT_DIM, TEXT_LEN
from tiny_wan import HEIGHT, WIDTH, latents_of, text_of, tiny_transformer

from diffusers_ardiff import ARDiffusionPipeline, StreamBatch
from diffusers_ardiff.processors import family

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = ("download", "gpu", "processes")
NOT_RUN = {
    "README.md": [["download", "gpu"]],
    "checkpoints.md": [["download"], ["download"]],
    "decoding.md": [["gpu"], ["download"]],
    "recipes.md": [["download"]],
    "several_gpus.md": [["processes"]],  # run by test_jobs.py
    "speed.md": [["gpu"], ["gpu"]],
}
"""Blocks that are not run here, by page, in order."""

BLOCK = re.compile(
    r"(?:<!-- needs: (?P<needs>[\w, ]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    code: str
    line: int
    needs: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            code=match["code"],
            line=text[: match.start("code")].count("\n"),
            needs=tuple(part.strip() for part in (match["needs"] or "").split(",") if part.strip()),
        )
        for match in BLOCK.finditer(text)
    ]


def run(block: Block, page: Path, names: dict[str, Any]) -> None:
    tree = ast.parse("\n" * block.line + block.code)
    code = compile(tree, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


def names_of(page: str) -> dict[str, Any]:
    """What a page says it takes as given."""
    make = {
        "attach.md": attach_names,
        "decoding.md": shown_names,
        "families.md": family_names,
        "live.md": live_names,
        "sessions.md": session_names,
    }
    return make.get(page, lambda: {"show": lambda frames: None})()


def tiny_pipe() -> ARDiffusionPipeline:
    pipe = ARDiffusionPipeline.from_pretrained("tiny")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def shown_names() -> dict[str, Any]:
    return {"pipe": tiny_pipe(), "prompt": "a red circle moving right", "show": lambda frames: None}


def attach_names() -> dict[str, Any]:
    """A tiny transformer; the page's latents are 60 x 104, here each chunk is what the page's numbers say."""
    latents = torch.nn.functional.interpolate(latents_of(3)[0], size=(60, 104))[None]
    assert (HEIGHT, WIDTH) != (60, 104)
    return {
        "transformer": tiny_transformer(),
        "prompt_embeds": text_of(),
        "num_chunks": 2,
        "your_denoising_steps": lambda: [(latents, torch.full((1,), 900.0)), (latents, torch.full((1,), 500.0))],
        "clean_latents": latents,
        "zero_timestep": torch.zeros(1),
        "max_frames": 12,
        "n": 192,
    }


def family_names() -> dict[str, Any]:
    """A tiny LTX transformer and what its loop needs."""
    return {
        "transformer": FAMILIES["ltx"].make(),
        "prompt_embeds": torch.randn(1, TEXT_LEN, TEXT_DIM),
        "prompt_mask": torch.ones(1, TEXT_LEN, dtype=torch.long),
        **{"num_chunks": 2, "height": 4, "width": 6, "channels": 4, "dtype": torch.float32, "device": "cpu"},
    }


def live_names() -> dict[str, Any]:
    class Websocket:
        sent = 0

        async def send(self, data: Any) -> None:
            Websocket.sent += 1
            assert data.shape[2:] == (64, 64, 3)

    def show_all(stream: Any) -> None:
        with stream:
            for _ in range(2):
                next(stream)

    return {
        "pipe": tiny_pipe(),
        "threading": threading,
        "show_all": show_all,
        "camera_plane": lambda controls: torch.zeros(()),
        "websocket": Websocket(),
        "encode": lambda frames: frames,
    }


def session_names() -> dict[str, Any]:
    return {
        "pipe": tiny_pipe(),
        "seed": torch.Generator().manual_seed(0),
        "another_seed": torch.Generator().manual_seed(1),
        "StreamBatch": StreamBatch,
        "num_chunks": 2,
        "show": lambda stream, frames: None,
        "user_typed_something": True,
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after the other in one namespace, in an empty folder."""
    runnable = [block for block in blocks(page) if not block.needs]
    if not runnable:
        assert blocks(page) == [] or page.name in NOT_RUN
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(family, "_families", dict(family._families))  # a page registers one of its own
    names = names_of(page.name)
    before = set(threading.enumerate())
    for block in runnable:
        if page.name == "sessions.md" and "session.snapshot()" in block.code:
            names["session"] = names["stream"].rollout.sessions[0]
            names["other"].close()
        if page.name == "attach.md" and "full_attn_spans" in block.code:
            names |= masked_names(names)
        run(block, page, names)
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon:
                thread.join()


def masked_names(names: dict[str, Any]) -> dict[str, Any]:
    """Branches with room for the page's forwards, where nothing has been committed."""
    manager_type, geometry_type = names["KVManager"], names["RingGeometry"]
    tokens = names["tokens"]
    geometry = geometry_type(sink_tokens=0, window_tokens=9 * tokens, page_size=16)
    shape = names["paged"].geometry.kv_shape(torch.float32)
    manager = manager_type(geometry, shape, dtype=torch.float32, device="cpu", max_sessions=3)
    branch, first, second = (manager.open_session().branch() for _ in range(3))
    with names["PagedForwardContext"]([second], num_tokens=128) as forward:  # its span lies after 128 tokens
        forward.mark_written()
    forward.mark_committed()
    return {"branch": branch, "first": first, "second": second}


def test_blocks_that_are_not_run_are_these() -> None:
    found = {page.name: [list(block.needs) for block in blocks(page) if block.needs] for page in PAGES}
    assert {name: needs for name, needs in found.items() if needs} == NOT_RUN
    assert all(need in NEEDS for needs in NOT_RUN.values() for block in needs for need in block)


def test_blocks_that_are_not_run_are_at_least_python() -> None:
    for page in PAGES:
        for block in blocks(page):
            ast.parse(block.code)


def links(page: Path) -> Iterator[str]:
    yield from re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_and_scripts_named_in_the_docs_exist(page: Path) -> None:
    named = re.findall(r"\b((?:tests|scripts)/[\w/]+\.py)", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(links(ROOT / "README.md"))
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in linked] == []


def test_api_page_is_up_to_date(capsys: pytest.CaptureFixture) -> None:
    assert runpy.run_path(str(ROOT / "scripts" / "write_api_docs.py"))["main"](["--check"]) == 0, (
        capsys.readouterr().out
    )


def test_api_page_has_all_public_names() -> None:
    import diffusers_ardiff

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = [name for name in diffusers_ardiff.__all__ if name != "HUB_SHIM"]
    assert [name for name in names if not re.search(rf"^### {name}\b", page, re.MULTILINE)] == []
    assert "Not documented." not in page
