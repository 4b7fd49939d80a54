"""Krea's context whose first frame is encoded from pixels again, against a dense rollout over the stock VAE's own calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import relative_error
from session_runs import SHUFFLES
from test_context_modes import KREA as KEPT
from test_context_modes import NEW, DenseKrea, follow, stream_of, take
from tiny_components import (
    QUICK,
    RECIPE,
    failing,
    make_pipeline,
    random_embeds,
    record_forwards,
    seed,
)

from diffusers_ardiff import ARDiffusionPipeline, CacheOptions, StreamBatch
from diffusers_ardiff.cache import OutOfPagesError
from diffusers_ardiff.pipelines.first_frame import FirstFrame
from diffusers_ardiff.recipes import load_recipe

KREA = KEPT.replace(encode_first_frame=True)


class DenseEncodedKrea(DenseKrea):
    """After two blocks, the oldest of the last nine pixel frames takes the first frame's place, encoded alone."""

    def __init__(self, pipe: ARDiffusionPipeline, given: torch.Tensor | None = None) -> None:
        super().__init__(pipe, given)
        self.vae = pipe.vae
        self.mean, self.std = (
            torch.tensor(self.vae.config[name])[None, :, None, None, None] for name in ("latents_mean", "latents_std")
        )

    @torch.no_grad()
    def first_frame(self, tail: int) -> torch.Tensor:
        if self.frames.shape[2] <= 3:
            return super().first_frame(tail)
        pixels = self.vae.decode(self.frames * self.std + self.mean).sample
        oldest = pixels[:, :, -9:][:, :, :1]
        return (self.vae.encode(oldest).latent_dist.mode() - self.mean) / self.std


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
class TestAsDense:
    def test_blocks(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None) -> None:
        dense = DenseEncodedKrea(pipe)
        with stream_of(pipe, KREA, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            follow(stream, dense, 6)

    @pytest.mark.parametrize("num_given", [1, 2, 4, 6])
    def test_given_frames(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None, num_given: int) -> None:
        given = torch.randn(1, 16, num_given, 4, 6, generator=seed(9))
        dense = DenseEncodedKrea(pipe, given)
        with stream_of(pipe, KREA, context_latents=given, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            take(stream, -(-num_given // 3))
            follow(stream, dense, 3)

    def test_recache(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None) -> None:
        dense = DenseEncodedKrea(pipe)
        with stream_of(pipe, KREA, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            follow(stream, dense, 3)
            dense.video.text = NEW
            stream.update(prompt_embeds=NEW, mode="recache")
            follow(stream, dense, 2)


def test_it_is_another_video_from_the_third_block_on(pipe: ARDiffusionPipeline) -> None:
    """Until then the first frame is the true one; afterwards the two must differ, or the tests above would show nothing."""
    with stream_of(pipe, KREA) as stream, stream_of(pipe, KEPT) as kept:
        encoded, plain = take(stream, 4), take(kept, 4)
    assert [torch.equal(a, b) for a, b in zip(encoded, plain, strict=True)] == [True, True, False, False]
    assert relative_error(encoded[2], plain[2]) > 1e-3


def test_it_is_what_the_recipe_does_by_itself() -> None:
    assert load_recipe("krea").encode_first_frame


def test_the_same_latents_whatever_is_handed_out(pipe: ARDiffusionPipeline) -> None:
    """Frames are decoded for latents too, those beyond what was asked for included."""
    call = {"prompt_embeds": NEW, "recipe": KREA, "num_frames": 46}
    with pipe.stream(**call, generator=seed(0), output_type="pt") as stream:
        chunks = list(stream)
    assert sum(chunk.frames.shape[1] for chunk in chunks) == 46
    latents = pipe(**call, generator=seed(0), output_type="latent").frames
    assert torch.equal(latents, torch.cat([chunk.latents for chunk in chunks], dim=2)[:, :, :13])


class TestSessions:
    def test_fork_offload_and_reset(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, KREA) as single:
            expected = take(single, 6)
        pool = pipe.create_cache(recipe=KREA, num_videos=2)
        stream = stream_of(pipe, KREA, cache=pool)
        take(stream, 3)
        child = stream.fork()
        # Other frames: what the child makes must not reach its parent.
        child.switch_prompt(prompt_embeds=NEW)
        take(child, 2)
        stream.offload()
        assert stream.rollout.first_frame._latents is None
        stream.onload()
        assert all(torch.equal(a, b) for a, b in zip(take(stream, 3), expected[3:], strict=True))
        stream.reset()
        assert stream.rollout.first_frame.num_bytes == 0
        assert all(torch.equal(a, b) for a, b in zip(take(stream, 6), expected, strict=True))
        child.close()
        stream.close()
        assert stream.rollout.first_frame.num_bytes == 0
        pool.check_integrity()

    def test_a_fork_makes_its_parents_video(self, pipe: ARDiffusionPipeline) -> None:
        pool = pipe.create_cache(recipe=KREA, num_videos=2)
        stream = stream_of(pipe, KREA, cache=pool)
        take(stream, 3)
        with stream.fork() as child:
            for _ in range(3):
                assert torch.equal(next(child).latents, next(stream).latents)

    def test_a_reset_decoder(self, pipe: ARDiffusionPipeline) -> None:
        """The decoder begins with a frame from the past, which was handed out before and is not counted again."""
        with stream_of(pipe, KREA) as stream:
            take(stream, 3)
            stream.reset(keep=("history", "text"))
            take(stream, 2)
            assert stream.rollout.first_frame._pixels.shape == (1, 3, 9, 32, 48)

    @pytest.mark.parametrize("part", ["encoder", "block"])
    def test_a_context_that_fails(self, pipe: ARDiffusionPipeline, part: str) -> None:
        """Nothing is emptied before the frame is encoded; the same context comes again."""
        with stream_of(pipe, KREA) as single:
            expected = take(single, 5)
        stream = stream_of(pipe, KREA)
        take(stream, 3)
        module = pipe.vae.encoder if part == "encoder" else pipe.transformer.blocks[1]
        with failing(module, OSError("gone")), pytest.raises(OSError, match="gone"):
            stream.rollout.commit_held()
        assert all(torch.equal(a, b) for a, b in zip(take(stream, 2), expected[3:], strict=True))

    def test_together(self, pipe: ARDiffusionPipeline) -> None:
        pool = pipe.create_cache(recipe=KREA, num_videos=2)
        first, second = (stream_of(pipe, KREA, cache=pool) for _ in range(2))
        expected = take(stream_of(pipe, KREA), 5)
        take(first, 2)
        batch = StreamBatch([first, second])
        for number in range(3):
            left, right = batch.step()
            assert relative_error(left.latents, expected[number + 2]) < 1e-4
            assert relative_error(right.latents, expected[number]) < 1e-4

    def test_several_videos(self, pipe: ARDiffusionPipeline) -> None:
        call = {"recipe": KREA, "num_frames": 45, "output_type": "latent"}
        texts = random_embeds(5, rows=2)
        both = pipe(prompt_embeds=texts, generator=[seed(1), seed(2)], **call).frames
        for row in range(2):
            single = pipe(prompt_embeds=texts[row : row + 1], generator=seed(row + 1), **call)
            assert relative_error(both[row], single.frames[0]) < 1e-4

    def test_controls_are_those_of_the_frame_shown(self, pipe: ARDiffusionPipeline) -> None:
        seen = []
        call = {"control_hook": lambda inputs: seen.append(inputs) or {}, "controls": "a"}
        with stream_of(pipe, KREA, **call) as stream:
            for name in "bcd":
                next(stream)
                stream.update(controls=name)
            seen.clear()
            next(stream)
        # Its pixels are the last ones of latent frame 6.
        assert (seen[0].frame_controls, seen[0].start_latent_frame) == (("c", "c", "c"), 0)

    def test_encoded_once_a_chunk(self, pipe: ARDiffusionPipeline) -> None:
        calls = []
        handle = pipe.vae.encoder.register_forward_hook(lambda *_: calls.append(None))
        with record_forwards(pipe.transformer) as seen, stream_of(pipe, KREA, num_frames=57) as stream:
            take(stream, 5)
        handle.remove()
        assert len(calls) == 3 and len(seen) == 5 * 5 + 4


def test_memory_is_in_the_plan(pipe: ARDiffusionPipeline) -> None:
    """Nine pixel frames, and the decoder, whatever is handed out."""
    for decode in (True, False):
        plan = pipe.plan_memory(recipe=KREA, decode=decode)
        assert plan.vae_state_bytes == pipe.plan_memory(recipe=KEPT).vae_state_bytes + 9 * 3 * 32 * 48 * 4
    with stream_of(pipe, KREA) as stream:
        take(stream, 3)
        held = stream.rollout.first_frame.num_bytes + stream.vae_state_bytes
        assert held == plan.vae_state_bytes


class TestRefusals:
    def test_without_a_vae(self) -> None:
        pipe = make_pipeline(QUICK, vae=None)
        with pytest.raises(ValueError, match=r"'krea' encodes decoded frames .* has no VAE.*encode_first_frame=False"):
            stream_of(pipe, KREA)
        with stream_of(pipe, KREA, encode_first_frame=False) as stream:
            take(stream, 4)

    def test_overlapped_decoding(self) -> None:
        pipe = make_pipeline(QUICK)
        pipe.set_decoder(overlap=True)
        with pytest.raises(ValueError, match=r"overlap=True\) decodes beside the next chunk"):
            pipe.plan_memory(recipe=KREA)

    def test_a_full_pool_says_so(self, pipe: ARDiffusionPipeline) -> None:
        """A rollout that finds no room closes itself before it is whole."""
        pool = pipe.create_cache(recipe=KREA)
        first = stream_of(pipe, KREA, cache=pool)
        with pytest.raises(OutOfPagesError):
            stream_of(pipe, KREA, cache=pool)
        take(first, 3)

    def test_frames_that_nobody_decoded(self, pipe: ARDiffusionPipeline) -> None:
        first = FirstFrame(pipe.vae, KREA)
        with pytest.raises(RuntimeError, match="oldest of 9 decoded frames, and 0 were decoded"):
            first.latents()

    @pytest.mark.parametrize(
        "change", [{"context_mode": "commit"}, {"num_sink_frames": 0}, {"num_sink_frames": 2, "rope_limit_frames": 7}]
    )
    def test_recipes(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="encode_first_frame = True: allowed with context_mode = 'recompute'"):
            KREA.replace(**change)
        with pytest.raises(ValueError, match="encode_first_frame = 1: allowed are True and False"):
            RECIPE.replace(encode_first_frame=1)
