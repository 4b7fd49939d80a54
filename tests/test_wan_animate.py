"""Wan-Animate over the paged cache, against the stock model: a reference picture, poses and faces beside the video."""

from typing import Any

import pytest
import torch
from dense import relative_error
from diffusers import WanAnimateTransformer3DModel
from tiny_families import HEIGHT, TEXT_DIM, TEXT_LEN, WIDTH, Family, FamilyRun, noise, times, window_mask

from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.processors import attach_paged_attention

CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 12, "latent_channels": 4, "in_channels": 12, "out_channels": 4,
    "text_dim": TEXT_DIM, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "image_dim": 4, "added_kv_proj_dim": None,
    "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2,
}  # fmt: skip
TOKENS = HEIGHT // 2 * (WIDTH // 2)
TOTAL = 21  # pixel frames of pictures and faces are those of the longest video


def call(transformer: Any, latents: torch.Tensor, first: int, timestep: float, *, faces: slice | None = None) -> Any:
    """Frames [first, first + n) of the video behind the picture, with their poses and faces; the picture is dropped."""
    frames, begin = latents.shape[2], 4 * max(first - 2, 0)
    face = noise(1, 3, 4 * TOTAL - 3, 16, 16, seed=5)[:, :, faces or slice(begin, 4 * (first + frames - 1) + 1)]
    pose = noise(1, 4, TOTAL, HEIGHT, WIDTH, seed=6)[:, :, first : first + frames]
    whole = torch.cat([noise(1, 12, 1, HEIGHT, WIDTH, seed=8), latents], dim=2)
    with torch.no_grad():
        return transformer(
            whole, times(timestep), noise(1, TEXT_LEN, TEXT_DIM), pose_hidden_states=pose, face_pixel_values=face,
            return_dict=False,
        )[0][:, :, 1:]  # fmt: skip


FAMILY = Family(model=WanAnimateTransformer3DModel, config=CONFIG, call=call, text=TOKENS, text_first=True)


def forward(run: FamilyRun, latents: torch.Tensor, timestep: float, *, commit: bool = True, **kwargs: Any) -> Any:
    first, frames = run.branch.committed_tokens // TOKENS, latents.shape[2]
    rotary = run.rope([list(range(first, first + frames))], HEIGHT // 2, WIDTH // 2, "cpu")
    context = PagedForwardContext([run.branch], num_tokens=frames * TOKENS, num_extra=TOKENS)
    with context, run.paged.bind(context, rotary):
        out = call(run.transformer, latents, first, timestep, **kwargs)
    if commit:
        context.mark_committed()
    return out


@pytest.fixture
def transformer() -> Any:
    return FAMILY.make()


@pytest.mark.parametrize(
    ("chunk", "sink", "window", "total"), [(1, 0, 9, 9), (3, 0, 9, 9), (1, 1, 3, 10), (3, 0, 3, 9), (3, 3, 6, 21)]
)
def test_chunks_equal_one_masked_forward(transformer: Any, chunk: int, sink: int, window: int, total: int) -> None:
    """On both sides the picture sees itself only; it was a frame of the video, and faces began anew with each chunk."""
    latents, run, outs = noise(1, 12, total, HEIGHT, WIDTH, seed=7), FamilyRun(FAMILY, transformer, sink, window), []
    for start in range(0, total, chunk):
        forward(run, noise(1, 12, chunk, HEIGHT, WIDTH, seed=start), 900, commit=False)
        outs.append(forward(run, latents[:, :, start : start + chunk], 500))
    run.paged.detach()
    out = torch.cat(outs, dim=2)
    mask = window_mask([chunk] * (total // chunk), sink, window, TOKENS)
    assert relative_error(out, call(FAMILY.masked_copy(transformer, mask), latents, 0, 500)) < 1e-5
    assert relative_error(out, call(transformer, latents, 0, 500)) > 1e-3


def test_unbound_and_detached_equal_stock_bit_by_bit(transformer: Any) -> None:
    latents = noise(1, 12, 3, HEIGHT, WIDTH, seed=7)
    found = [attn.processor for attn in FAMILY.attns(transformer)]
    expected = call(transformer, latents, 0, 500)
    with attach_paged_attention(transformer) as paged:
        assert paged.family.name == "wan-animate"
        assert torch.equal(call(transformer, latents, 0, 500), expected)
    assert torch.equal(call(transformer, latents, 0, 500), expected)
    assert all(a is attn.processor for a, attn in zip(found, FAMILY.attns(transformer), strict=True))
    assert not transformer._forward_pre_hooks and not transformer.face_encoder._forward_hooks


def test_faces_must_reach_back(transformer: Any) -> None:
    """Convolutions that begin with the chunk give other faces than those of the whole video."""
    run = FamilyRun(FAMILY, transformer, 0, 6)
    for chunk in range(2):
        forward(run, noise(1, 12, 3, HEIGHT, WIDTH, seed=chunk), 500)
    with pytest.raises(ValueError, match=r"pixel frames \[16, 33\).*got 9 frames"):
        forward(run, noise(1, 12, 3, HEIGHT, WIDTH), 500, faces=slice(24, 33))
    assert run.branch.commit() == 0


def test_the_picture_must_be_announced(transformer: Any) -> None:
    """Its rows were committed as a frame of the video."""
    run = FamilyRun(FAMILY, transformer, 0, 6)
    context = PagedForwardContext([run.branch], num_tokens=4 * TOKENS)
    rotary = run.rope([range(3)], HEIGHT // 2, WIDTH // 2, "cpu")
    with pytest.raises(ValueError, match=r"num_tokens=18 and num_extra=6\."), context, run.paged.bind(context, rotary):
        call(transformer, noise(1, 12, 3, HEIGHT, WIDTH), 0, 500)


def test_one_graph_for_all_layers() -> None:
    from counting import CountingBackend, op_calls

    torch._dynamo.reset()
    run, counting = FamilyRun(FAMILY, FAMILY.make(num_layers=4), 1, 3), CountingBackend("eager")
    for block in run.transformer.blocks:
        block.compile(fullgraph=True, backend=counting)
    for chunk in range(6):
        with torch._dynamo.config.patch(error_on_recompile=chunk > 0):
            forward(run, noise(1, 12, 1, HEIGHT, WIDTH, seed=chunk), 500)
    assert [op_calls(graph) for graph in counting.graphs] == [1]
    torch._dynamo.reset()
