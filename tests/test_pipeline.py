"""Whole calls of the pipeline on a tiny real model: frames, steps, noise, guidance, callbacks, failures in the middle."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dense import relative_error
from diffusers.callbacks import SDCFGCutoffCallback
from PIL import Image
from tiny_components import (
    PROMPT,
    QUICK,
    RECIPE,
    failing,
    host_state,
    latents_of,
    make_pipeline,
    make_transformer,
    random_embeds,
    record_forwards,
    record_pools,
    seed,
)

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.cache import KVManager
from diffusers_ardiff.pipelines.frames import generated_chunk_sizes
from diffusers_ardiff.pipelines.steps import NoiseSource
from diffusers_ardiff.pipelines.vae_stream import encode_video

STEPS = pytest.approx([1000.0, 937.5, 833.3333, 625.0], abs=1e-4)


@pytest.fixture(scope="module")
def pipe() -> ARDiffusionPipeline:
    return make_pipeline()


@pytest.fixture
def pools() -> Iterator[list[weakref.ref[KVManager]]]:
    with record_pools() as made:
        yield made


class TestFrames:
    def test_81_frames(self, pipe: ARDiffusionPipeline) -> None:
        with record_forwards(pipe.transformer) as forwards:
            video = pipe(PROMPT, num_frames=81, recipe=QUICK).frames
        assert video.shape == (1, 81, 32, 48, 3) and video.dtype == np.float32
        assert (video.min() >= 0, video.max() <= 1, np.isfinite(video).all()) == (True, True, True)
        assert len(forwards) == 7 * 2 + 6, "7 chunks of two steps, a commit between each two"
        assert {latents.shape[2] for latents in forwards.inputs} == {3}

    @pytest.mark.parametrize("num_frames", [1, 2, 49, 80, 82, 85])
    def test_any_number_of_frames(self, pipe: ARDiffusionPipeline, num_frames: int) -> None:
        """Asked for 80 frames, rollouts returned 81, 77 or a reshape error: 80 is no 1 + 4k, and no whole chunks."""
        video = pipe(PROMPT, num_frames=num_frames, recipe=QUICK, output_type="pt").frames
        assert video.shape == (1, num_frames, 3, 32, 48)

    @pytest.mark.parametrize(("num_frames", "num_latents"), [(1, 1), (2, 2), (5, 2), (80, 21), (81, 21), (82, 22)])
    def test_latents_of_any_number_of_frames(
        self, pipe: ARDiffusionPipeline, num_frames: int, num_latents: int
    ) -> None:
        assert latents_of(pipe, num_frames=num_frames).shape == (1, 16, num_latents, 4, 6)

    def test_shorter_videos_are_the_beginning_of_longer_ones(self, pipe: ARDiffusionPipeline) -> None:
        long = pipe(PROMPT, num_frames=33, recipe=QUICK, output_type="pt", generator=seed(0)).frames
        short = pipe(PROMPT, num_frames=26, recipe=QUICK, output_type="pt", generator=seed(0)).frames
        assert torch.equal(short, long[:, :26])

    @pytest.mark.parametrize("num_frames", [0, -4, 21.0, True, "21"])
    def test_numbers_that_are_no_frames(self, pipe: ARDiffusionPipeline, num_frames: object) -> None:
        with pytest.raises(ValueError, match="num_frames must be a whole number >= 1"):
            pipe(PROMPT, num_frames=num_frames)

    def test_recipe_default(self, pipe: ARDiffusionPipeline) -> None:
        assert pipe(PROMPT, recipe=QUICK, output_type="latent").frames.shape == (1, 16, 6, 4, 6)

    def test_chunks_of_20_frames_are_one_partition(self, pipe: ARDiffusionPipeline) -> None:
        """Mask and cache split 20 frames in chunks of 3 in two ways; here the loop runs what the one function says."""
        with pipe.stream(PROMPT, num_frames=77, recipe=QUICK, output_type="latent") as stream:
            sizes = [chunk.latents.shape[2] for chunk in stream]
        assert sizes == generated_chunk_sizes(QUICK, 0, 20) == [3] * 7

    def test_first_chunk_of_its_own_size(self, pipe: ARDiffusionPipeline) -> None:
        recipe = QUICK.replace(first_chunk_frames=1)
        with pipe.stream(PROMPT, num_frames=25, recipe=recipe, output_type="pt") as stream:
            chunks = list(stream)
        assert [chunk.num_latent_frames for chunk in chunks] == [1, 3, 3]
        assert [chunk.frames.shape[1] for chunk in chunks] == [1, 12, 12]

    def test_full_history_is_refused_before_any_forward(self, pipe: ARDiffusionPipeline) -> None:
        """Beyond a full history of 21 frames, a rollout died at chunk 8 on an empty write range."""
        recipe = QUICK.replace(num_sink_frames=0, num_window_frames=None, max_latent_frames=21)
        with (
            record_forwards(pipe.transformer) as forwards,
            pytest.raises(ValueError, match=r"24 latent frames take 24.*at most 21"),
        ):
            pipe(PROMPT, num_frames=93, recipe=recipe)
        assert len(forwards) == 0
        assert latents_of(pipe, num_frames=81, recipe=recipe).shape[2] == 21

    def test_endless_stream_over_full_history(self, pipe: ARDiffusionPipeline) -> None:
        recipe = QUICK.replace(num_sink_frames=0, num_window_frames=None, max_latent_frames=6)
        manager = pipe.create_cache(recipe=recipe)
        stream = pipe.stream(PROMPT, recipe=recipe, output_type="latent", cache=manager)
        assert [next(stream).start_latent_frame for _ in range(2)] == [0, 3]
        with pytest.raises(ValueError, match="full history of at most 6"):
            next(stream)
        assert stream.closed and manager.allocator.num_used == 0


class TestGivenFrames:
    """An image, a video or latents come first in the output and in the history."""

    @staticmethod
    def image() -> Image.Image:
        pixels = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def test_image_is_committed_alone(self, pipe: ARDiffusionPipeline) -> None:
        with record_forwards(pipe.transformer) as forwards:
            video = pipe(PROMPT, image=self.image(), num_frames=25, recipe=QUICK, output_type="pt").frames
        assert video.shape[1] == 25
        assert [latents.shape[2] for latents in forwards.inputs] == [1, 3, 3, 3, 3, 3]
        assert forwards.timesteps[0] == 0.0 and forwards.timesteps[3] == 0.0
        pixels = pipe.video_processor.preprocess(self.image(), height=32, width=48)[:, :, None]
        assert torch.equal(forwards.inputs[0], encode_video(pipe.vae, pixels))

    def test_image_as_tensor_gives_the_same_bits(self, pipe: ARDiffusionPipeline) -> None:
        tensor = torch.from_numpy(np.asarray(self.image()).copy()).permute(2, 0, 1).float()[None] / 255
        from_image, from_tensor = (latents_of(pipe, image=image) for image in (self.image(), tensor))
        assert torch.equal(from_image, from_tensor)
        assert relative_error(from_image, latents_of(pipe)) > 1e-2

    def test_image_of_another_size_is_resized(self, pipe: ARDiffusionPipeline) -> None:
        video = pipe(PROMPT, image=self.image().resize((20, 30)), num_frames=5, recipe=QUICK, output_type="pt").frames
        assert video.shape == (1, 5, 3, 32, 48)

    @pytest.mark.parametrize(("given", "sizes"), [(1, [1]), (5, [2]), (9, [3]), (13, [3, 1]), (25, [3, 3, 1])])
    def test_video_is_committed_chunk_by_chunk(self, pipe: ARDiffusionPipeline, given: int, sizes: list[int]) -> None:
        video = torch.rand(1, given, 3, 32, 48, generator=seed(3))
        with record_forwards(pipe.transformer) as forwards:
            latents = latents_of(pipe, video=video, num_frames=given + 8)
        assert latents.shape[2] == 1 + (given + 8 - 1) // 4
        committed = [x for x, t in zip(forwards.inputs, forwards.timesteps, strict=True) if t == 0.0]
        assert [x.shape[2] for x in committed[: len(sizes)]] == sizes
        known = encode_video(pipe.vae, video.transpose(1, 2) * 2 - 1)
        assert torch.equal(torch.cat(committed[: len(sizes)], dim=2), known)
        assert torch.equal(latents[:, :, : known.shape[2]], known), "what was given comes first, unchanged"

    def test_chunks_of_a_long_video_are_counted_at_once(self) -> None:
        """Every chunk summed all before it: four hours at 16 frames a second took seconds to plan, a day minutes."""
        start = time.perf_counter()
        assert generated_chunk_sizes(QUICK, 0, 360_000) == [3] * 120_000
        assert time.perf_counter() - start < 5

    def test_given_frames_are_cut_like_generated_ones(self, pipe: ARDiffusionPipeline) -> None:
        """With a first chunk of 1 frame, 7 given latents were committed as 3, 3, 1, which no such model has seen."""
        recipe = QUICK.replace(first_chunk_frames=1)
        assert generated_chunk_sizes(recipe, 0, 7) == [1, 3, 3]
        context = torch.randn(1, 16, 7, 4, 6, generator=seed(3))
        with pipe.stream(PROMPT, context_latents=context, recipe=recipe, output_type="latent") as stream:
            chunks = [next(stream) for _ in range(4)]
        assert [(chunk.num_latent_frames, chunk.is_given) for chunk in chunks] == [
            (1, True),
            (3, True),
            (3, True),
            (3, False),
        ]

    def test_context_latents_equal_the_video_they_were_made_from(self, pipe: ARDiffusionPipeline) -> None:
        video = torch.rand(1, 9, 3, 32, 48, generator=seed(3))
        context = encode_video(pipe.vae, video.transpose(1, 2) * 2 - 1)
        from_video, from_latents = latents_of(pipe, video=video), latents_of(pipe, context_latents=context)
        assert torch.equal(from_video, from_latents)

    def test_context_latents_continue_a_rollout(self, pipe: ARDiffusionPipeline) -> None:
        """The same history, committed from outside, must give the same future as the rollout that made it."""
        noise = torch.randn(1, 16, 9, 4, 6, generator=seed(1))
        step_noise = torch.randn(3, 1, 1, 16, 3, 4, 6, generator=seed(2))
        whole = latents_of(pipe, num_frames=33, latents=noise, step_noise=step_noise)
        continued = latents_of(
            pipe,
            num_frames=33,
            context_latents=whole[:, :, :6],
            latents=noise[:, :, 6:],
            step_noise=step_noise[2:],
        )
        assert relative_error(continued[:, :, 6:], whole[:, :, 6:]) < 1e-5

    @pytest.mark.parametrize("source", ["image", "video", "context_latents"])
    def test_two_prompts(self, pipe: ARDiffusionPipeline, source: str) -> None:
        """One given source serves all prompts, or each has its own."""
        given = {
            "image": [self.image(), self.image().rotate(180)],
            "video": torch.rand(2, 9, 3, 32, 48, generator=seed(3)),
            "context_latents": torch.randn(2, 16, 3, 4, 6, generator=seed(3)),
        }[source]
        prompts = [PROMPT, "blue square"]
        both = latents_of(pipe, prompts, generator=[seed(0), seed(1)], **{source: given})
        for row, prompt in enumerate(prompts):
            own = given[row : row + 1] if isinstance(given, torch.Tensor) else given[row]
            alone = latents_of(pipe, prompt, generator=seed(row), **{source: own})
            assert relative_error(both[row : row + 1], alone) < 1e-4
        first = given[:1] if isinstance(given, torch.Tensor) else given[0]
        shared = latents_of(pipe, prompts, generator=[seed(0), seed(1)], **{source: first})
        assert relative_error(shared[:1], both[:1]) < 1e-4
        assert relative_error(shared[1:], both[1:]) > 1e-2


class TestSteps:
    def test_every_chunk_sees_the_same_timesteps(self, pipe: ARDiffusionPipeline) -> None:
        """Schedules were shifted twice, ignored, or ran off their end in the second chunk."""
        with record_forwards(pipe.transformer) as forwards:
            latents_of(pipe, num_frames=33, recipe=RECIPE)
        assert len(forwards) == 3 * 4 + 2
        for chunk in range(3):
            assert forwards.timesteps[chunk * 5 : chunk * 5 + 4] == STEPS
        assert forwards.timesteps[4::5] == [0.0, 0.0]

    def test_commit_timestep_of_the_recipe(self, pipe: ARDiffusionPipeline) -> None:
        with record_forwards(pipe.transformer) as forwards:
            latents_of(pipe, recipe=QUICK.replace(commit_timestep=10.0))
        assert forwards.timesteps[2] == 10.0

    def test_first_chunk_with_its_own_steps(self, pipe: ARDiffusionPipeline) -> None:
        recipe = QUICK.replace(first_chunk_denoising_steps=(1000, 750, 500))
        seen: list[int] = []
        with record_forwards(pipe.transformer) as forwards:
            latents_of(pipe, recipe=recipe, callback_on_step_end=lambda _pipe, step, _t, _x: seen.append(step))
        assert [len(forwards), pipe.num_timesteps, seen] == [3 + 1 + 2, 5, list(range(5))]

    def test_positions_are_absolute(self, pipe: ARDiffusionPipeline) -> None:
        """The host always starts at frame 0; chunk k starts at 3 k, in its denoise forwards and in its commit."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        handle = pipe.transformer.blocks[0].register_forward_pre_hook(lambda _module, args: seen.append(args[3]))
        latents_of(pipe, num_frames=33)
        handle.remove()
        whole = pipe.transformer.rope(torch.empty(1, 16, 9, 4, 6))
        for forward, chunk in enumerate((0, 0, 0, 1, 1, 1, 2, 2)):
            for have, want in zip(seen[forward], whole, strict=True):
                torch.testing.assert_close(have, want[:, 18 * chunk : 18 * chunk + 18], rtol=0, atol=1e-6)

    @torch.no_grad()
    def test_update_rule_by_hand(self, pipe: ARDiffusionPipeline) -> None:
        """One chunk has no history, so the stock transformer gives its velocities: x0 = x - sigma v, then fresh noise."""
        embeds = random_embeds(5)
        noise = torch.randn(1, 16, 3, 4, 6, generator=seed(1))
        step_noise = torch.randn(1, 3, 1, 16, 3, 4, 6, generator=seed(2))
        sigmas = [1.0, 0.9375, 0.8333333, 0.625]
        x = noise
        for step, sigma in enumerate(sigmas):
            velocity = pipe.transformer(x, torch.tensor([1000 * sigma]), embeds, return_dict=False)[0]
            clean = x - sigma * velocity
            if step < 3:
                x = (1 - sigmas[step + 1]) * clean + sigmas[step + 1] * step_noise[0, step]
        latents = latents_of(
            pipe, None, prompt_embeds=embeds, num_frames=9, recipe=RECIPE, latents=noise, step_noise=step_noise
        )
        torch.testing.assert_close(latents, clean, rtol=0, atol=2e-5)

    def test_text_length_of_embeds(self, pipe: ARDiffusionPipeline) -> None:
        """Prompt lengths were literals; 12, 20 and 30 rows give cross caches of that length."""
        for text_len in (12, 20, 30):
            with pipe.stream(
                prompt_embeds=random_embeds(1, text_len=text_len), recipe=QUICK, output_type="latent"
            ) as stream:
                text = stream.rollout.sessions[0].branch().text
                assert [tuple(layer.key.shape) for layer in text.layers] == [(1, text_len, 2, 12)] * 2
                assert next(stream).latents.isfinite().all()

    @pytest.mark.parametrize(("heads", "head_dim"), [(1, 24), (3, 16), (5, 8)])
    def test_geometry_comes_from_the_transformer(self, heads: int, head_dim: int) -> None:
        """12 heads of 128 were literals and broke every other model size."""
        transformer = make_transformer(num_attention_heads=heads, attention_head_dim=head_dim, num_layers=3)
        pipe = make_pipeline(QUICK, transformer=transformer)
        manager = pipe.create_cache()
        shape = manager.storage.shape
        assert (shape.num_layers, shape.num_heads, shape.head_dim) == (3, heads, head_dim)
        assert latents_of(pipe, cache=manager).isfinite().all()


class TestNoise:
    @staticmethod
    def record(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
        drawn: list[torch.Tensor] = []
        draw = NoiseSource._draw

        def note(source: NoiseSource, shape: tuple[int, ...]) -> torch.Tensor:
            drawn.append(draw(source, shape))
            return drawn[-1]

        monkeypatch.setattr(NoiseSource, "_draw", note)
        return drawn

    def test_longer_runs_begin_like_shorter_ones(
        self, pipe: ARDiffusionPipeline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Noise drawn for the whole video at once gives another video for another length."""
        drawn = self.record(monkeypatch)
        short = latents_of(pipe, num_frames=33)
        short_noise, drawn[:] = list(drawn), []
        long = latents_of(pipe, num_frames=69)
        assert (len(short_noise), len(drawn)) == (6, 12)
        assert all(map(torch.equal, short_noise, drawn))
        assert torch.equal(long[:, :, :9], short)

    def test_list_of_generators_gives_single_runs(
        self, pipe: ARDiffusionPipeline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One generator for a whole batch made a video depend on its neighbours."""
        drawn = self.record(monkeypatch)
        prompts = [PROMPT, "green square moving left"]
        both = latents_of(pipe, prompts, generator=[seed(0), seed(7)])
        together, drawn[:] = list(drawn), []
        for row, (prompt, value) in enumerate(zip(prompts, (0, 7), strict=True)):
            alone = latents_of(pipe, prompt, generator=seed(value))
            assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, drawn, strict=True))
            assert relative_error(both[row : row + 1], alone) < 1e-4
            drawn.clear()

    def test_the_seed_matters(self, pipe: ARDiffusionPipeline) -> None:
        assert relative_error(latents_of(pipe, generator=seed(1)), latents_of(pipe)) > 0.1

    def test_num_videos_per_prompt(self, pipe: ARDiffusionPipeline) -> None:
        prompts = [PROMPT, "green square"]
        four = latents_of(pipe, prompts, num_videos_per_prompt=2, generator=[seed(i) for i in range(4)])
        assert four.shape[0] == 4
        for row in range(4):
            alone = latents_of(pipe, prompts[row // 2], generator=seed(row))
            assert relative_error(four[row : row + 1], alone) < 1e-4

    def test_given_noise_is_used(self, pipe: ARDiffusionPipeline) -> None:
        noise = torch.randn(1, 16, 6, 4, 6, generator=seed(9))
        with record_forwards(pipe.transformer) as forwards:
            latents_of(pipe, latents=noise)
        assert torch.equal(forwards.inputs[0], noise[:, :, :3]) and torch.equal(forwards.inputs[3], noise[:, :, 3:])

    def test_step_noise_as_a_function(self, pipe: ARDiffusionPipeline) -> None:
        noise = torch.randn(2, 1, 1, 16, 3, 4, 6, generator=seed(9))
        asked: list[tuple[int, int]] = []

        def step_noise(chunk: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
            asked.append((chunk, step))
            return noise[chunk, step].reshape(shape)

        first = latents_of(pipe, step_noise=step_noise)
        assert asked == [(0, 0), (1, 0)]
        assert torch.equal(first, latents_of(pipe, step_noise=noise))

    def test_too_little_step_noise(self, pipe: ARDiffusionPipeline) -> None:
        """A bare IndexError came out of the middle of the rollout; only an endless stream can get there now."""
        noise = torch.randn(1, 1, 1, 16, 3, 4, 6)
        with pipe.stream(PROMPT, step_noise=noise, recipe=QUICK) as stream:
            next(stream)
            with pytest.raises(ValueError, match=r"`step_noise` holds noise for \(1, 1\).*chunk 1, step 0"):
                next(stream)


class TestGuidance:
    SCALE = 4.0

    def guided(self, pipe: ARDiffusionPipeline, **call: Any) -> torch.Tensor:
        return latents_of(pipe, guidance_scale=self.SCALE, **call)

    def test_formula_of_the_first_step(self, pipe: ARDiffusionPipeline) -> None:
        """v = v_neg + s (v_pos - v_neg), from two unguided runs of one step on the same noise."""
        recipe = QUICK.replace(denoising_steps=(1000,))
        positive, negative = random_embeds(1), random_embeds(2)
        call = {"num_frames": 9, "recipe": recipe, "latents": torch.randn(1, 16, 3, 4, 6, generator=seed(1))}
        alone = [latents_of(pipe, None, prompt_embeds=embeds, **call) for embeds in (positive, negative)]
        # sigma is 1 at the only step, so x0 = x - v.
        expected = alone[1] + self.SCALE * (alone[0] - alone[1])
        guided = latents_of(
            pipe,
            None,
            prompt_embeds=positive,
            negative_prompt_embeds=negative,
            guidance_scale=self.SCALE,
            **call,
        )
        torch.testing.assert_close(guided, expected, rtol=0, atol=1e-4)
        assert relative_error(guided, alone[0]) > 1e-2

    def test_negative_prompt_matters(self, pipe: ARDiffusionPipeline) -> None:
        plain, empty = self.guided(pipe), self.guided(pipe, negative_prompt="")
        assert torch.equal(plain, empty), "guidance without a negative prompt uses an empty one"
        assert relative_error(self.guided(pipe, negative_prompt="blurry"), empty) > 1e-3

    def test_scale_of_the_recipe(self, pipe: ARDiffusionPipeline) -> None:
        from_recipe = latents_of(pipe, recipe=QUICK.replace(guidance_scale=self.SCALE))
        assert torch.equal(from_recipe, self.guided(pipe))

    @pytest.mark.parametrize("scale", [0.0, 1.0])
    def test_no_second_branch_up_to_one(self, pipe: ARDiffusionPipeline, scale: float) -> None:
        with record_forwards(pipe.transformer) as forwards:
            latents = latents_of(pipe, guidance_scale=scale, negative_prompt="blurry")
        assert len(forwards) == 2 * 2 + 1
        assert torch.equal(latents, latents_of(pipe))

    def test_half_the_pages_without_guidance(self, pipe: ARDiffusionPipeline) -> None:
        """Pools were sized for two branches with guidance off."""
        one, two = pipe.create_cache(guided=False), pipe.create_cache(guided=True)
        assert 2 * one.allocator.num_pages == two.allocator.num_pages
        used = []
        for manager, scale in ((one, 1.0), (two, self.SCALE)):
            with pipe.stream(PROMPT, guidance_scale=scale, recipe=QUICK, cache=manager):
                used.append(manager.allocator.num_used)
        assert used == [one.allocator.num_pages, two.allocator.num_pages]

    def test_branch_is_skipped_while_the_scale_is_one(self, pipe: ARDiffusionPipeline) -> None:
        """Denoise forwards of the negative branch may be skipped, its commits never: its history would have holes."""
        with pipe.stream(PROMPT, guidance_scale=self.SCALE, recipe=QUICK, output_type="latent") as stream:
            with record_forwards(pipe.transformer) as forwards:
                next(stream)
                stream.state.guidance_scale = 1.0
                next(stream)
                stream.state.guidance_scale = self.SCALE
                next(stream)
            assert forwards.timesteps[:4] == [1000.0, 1000.0] + forwards.timesteps[2:3] * 2
            assert [round(t) for t in forwards.timesteps[4:8]] == [0, 0, 1000, 833]
            assert len(forwards) == 4 + 4 + 6
            ends = {branch.committed_tokens for branch in stream.rollout.sessions[0].branches}
            assert ends == {2 * 18}

    def test_branches_never_mix(self, pipe: ARDiffusionPipeline) -> None:
        """Each branch holds keys of its own text only: as if a run with that text alone had committed these latents."""
        positive, negative = random_embeds(1), random_embeds(2)
        manager = pipe.create_cache(guided=True)
        call = {"recipe": QUICK, "output_type": "latent", "num_frames": 25}
        with pipe.stream(
            prompt_embeds=positive,
            negative_prompt_embeds=negative,
            guidance_scale=self.SCALE,
            cache=manager,
            **call,
        ) as stream:
            chunk = next(stream).latents
            next(stream)
            for name, embeds in (("positive", positive), ("negative", negative)):
                keys = self.keys(manager, name)
                assert relative_error(keys, self.keys_alone(pipe, embeds, chunk)) < 1e-5
                assert relative_error(keys, self.keys_alone(pipe, -embeds, chunk)) > 1e-3

    def keys_alone(self, pipe: ARDiffusionPipeline, embeds: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        manager = pipe.create_cache()
        with pipe.stream(
            prompt_embeds=embeds, context_latents=latents, recipe=QUICK, output_type="latent", cache=manager
        ) as stream:
            next(stream), next(stream)
            return self.keys(manager, "positive")

    @staticmethod
    def keys(manager: KVManager, branch: str) -> torch.Tensor:
        """Layer 2's keys of the first chunk, the layer that depends on the text."""
        run = manager.sessions[0].branch(branch).run
        slots = manager.storage.slots(torch.arange(18), run)
        return manager.storage.key_pools[1][slots].clone()


class TestNextCall:
    """Nothing of a call reaches the next one."""

    @pytest.mark.parametrize(
        "change",
        [
            {"height": 48, "width": 32},
            {"num_frames": 45},
            {"recipe": QUICK.replace(num_window_frames=3, num_sink_frames=0)},
            {"guidance_scale": 3.0},
            {"max_sequence_length": 20},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_another_call_equals_a_fresh_pipeline(self, pipe: ARDiffusionPipeline, change: dict[str, Any]) -> None:
        latents_of(pipe)
        changed = latents_of(pipe, **change)
        assert torch.equal(changed, latents_of(make_pipeline(), **change))
        assert torch.equal(latents_of(pipe), latents_of(make_pipeline()))

    @pytest.mark.parametrize(
        "error", [RuntimeError("lost"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
    )
    @pytest.mark.parametrize("where", ["callback", "layer 2", "decoder"])
    def test_exception_in_the_middle(
        self, where: str, error: BaseException, pools: list[weakref.ref[KVManager]]
    ) -> None:
        pipe = make_pipeline()
        found = host_state(pipe.transformer)

        def callback(_pipe: Any, step: int, _timestep: float, _tensors: Any) -> None:
            if where == "callback" and step == 3:
                raise error

        modules = {"layer 2": pipe.transformer.blocks[1], "decoder": pipe.vae.decoder.conv_out}
        shared = pipe.create_cache()
        with pytest.raises(type(error)), failing(modules.get(where, torch.nn.Identity()), error, after=3):
            pipe(PROMPT, num_frames=33, recipe=QUICK, callback_on_step_end=callback, cache=shared)
        assert shared.allocator.num_used == 0 and shared.sessions == ()
        shared.check_integrity()
        assert host_state(pipe.transformer) == found
        assert torch.equal(latents_of(pipe, cache=shared), latents_of(make_pipeline()))
        assert len(pools) == 2, "the shared pool and the fresh pipeline's own"

    def test_pool_is_collected(self, pipe: ARDiffusionPipeline, pools: list[weakref.ref[KVManager]]) -> None:
        """The pipeline remembered its last stream, and with it the K/V pool, until the next call."""
        latents_of(pipe)
        gc.collect()
        assert [ref() for ref in pools] == [None]

    def test_pool_is_collected_after_an_exception(
        self, pipe: ARDiffusionPipeline, pools: list[weakref.ref[KVManager]]
    ) -> None:
        with pytest.raises(RuntimeError, match="lost"), failing(pipe.transformer.blocks[1], RuntimeError("lost")):
            latents_of(pipe)
        gc.collect()
        assert [ref() for ref in pools] == [None]

    def test_pool_is_collected_after_an_interrupt(
        self, pipe: ARDiffusionPipeline, pools: list[weakref.ref[KVManager]]
    ) -> None:
        def stop(pipe: ARDiffusionPipeline, *_args: Any) -> None:
            pipe._interrupt = True

        assert latents_of(pipe, callback_on_step_end=stop).shape[2] == 3
        gc.collect()
        assert [ref() for ref in pools] == [None]

    def test_interrupt_stops_after_the_step(self, pipe: ARDiffusionPipeline) -> None:
        manager = pipe.create_cache()
        seen: list[int] = []

        def callback(pipe: ARDiffusionPipeline, step: int, _timestep: float, _tensors: Any) -> None:
            seen.append(step)
            pipe._interrupt = step == 2

        latents = latents_of(pipe, num_frames=33, callback_on_step_end=callback, cache=manager)
        assert seen == [0, 1, 2] and pipe.interrupt
        assert latents.shape[2] == 6, "the whole chunk and the interrupted one"
        assert manager.allocator.num_used == 0
        assert torch.equal(latents_of(pipe), latents_of(make_pipeline())) and not pipe.interrupt

    def test_bfloat16(self) -> None:
        """``.to(bfloat16)`` turned rotary tables into bfloat16, where frames 256 and 257 have the same angle."""
        pipe = make_pipeline(QUICK).to(torch.bfloat16)
        angles: list[torch.Tensor] = []
        handle = pipe.transformer.blocks[0].register_forward_pre_hook(lambda _m, args: angles.extend(args[3]))
        latents = latents_of(pipe, num_frames=45)
        handle.remove()
        assert latents.isfinite().all() and latents.dtype == torch.float32
        assert {angle.dtype for angle in angles} == {torch.float32}
        single = latents_of(make_pipeline(QUICK), num_frames=45)
        assert relative_error(latents, single) < 0.1
        assert pipe(PROMPT, num_frames=9, output_type="pt").frames.isfinite().all()


class TestCallbacks:
    @pytest.mark.parametrize(
        ("returned", "error", "message"),
        [
            (3, TypeError, "must return a dictionary of tensors, or None, got 3"),
            ({"latents": torch.zeros(1)}, ValueError, r"`latents` of shape \(1, 16, 3, 4, 6\), got \(1,\)"),
            ({"latents": None}, ValueError, "got None"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, pipe: ARDiffusionPipeline, returned: Any, error: type[Exception], message: str
    ) -> None:
        """It came back as ``unsupported operand type(s) for |``, or an IndexError three calls further."""
        with pytest.raises(error, match=message):
            latents_of(pipe, callback_on_step_end=lambda *_: returned)

    def test_dtype_of_the_latents_stays(self, pipe: ARDiffusionPipeline) -> None:
        """Half precision from a callback made a half-precision video."""
        video = latents_of(pipe, callback_on_step_end=lambda *a: {"latents": a[-1]["latents"].double()})
        assert video.dtype == torch.float32
        assert torch.equal(video, latents_of(pipe))

    def test_step_counts_over_all_chunks(self, pipe: ARDiffusionPipeline) -> None:
        seen: list[tuple[int, float]] = []
        latents_of(
            pipe,
            num_frames=33,
            recipe=RECIPE,
            callback_on_step_end=lambda _pipe, step, timestep, _tensors: seen.append((step, timestep)),
        )
        assert [step for step, _ in seen] == list(range(12)) and pipe.num_timesteps == 12
        assert [timestep for _, timestep in seen[4:8]] == STEPS

    def test_replaced_latents_are_used(self, pipe: ARDiffusionPipeline) -> None:
        def zero(_pipe: Any, step: int, _timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
            return {"latents": torch.zeros_like(tensors["latents"])} if step == 1 else {}

        with record_forwards(pipe.transformer) as forwards:
            latents = latents_of(pipe, callback_on_step_end=zero)
        assert (latents[:, :, :3] == 0).all() and (latents[:, :, 3:] != 0).any()
        assert (forwards.inputs[2] == 0).all(), "the commit sees what the callback returned"

    def test_replaced_prompt_is_used(self, pipe: ARDiffusionPipeline) -> None:
        other = random_embeds(4)

        def swap(_pipe: Any, _step: int, _timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
            assert set(tensors) == {"latents", "prompt_embeds"}
            return {"prompt_embeds": other}

        recipe = QUICK.replace(denoising_steps=(1000,))
        swapped = latents_of(
            pipe,
            recipe=recipe,
            callback_on_step_end=swap,
            callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
        )
        plain = latents_of(pipe, recipe=recipe)
        assert torch.equal(swapped[:, :, :3], plain[:, :, :3])
        assert relative_error(swapped[:, :, 3:], plain[:, :, 3:]) > 1e-2

    def test_replaced_prompt_with_too_few_rows(self, pipe: ARDiffusionPipeline) -> None:
        """One row for two videos left the second without text instead of an error."""
        with pytest.raises(ValueError, match=r"1 rows for 2 videos"):
            latents_of(
                pipe,
                [PROMPT, PROMPT],
                callback_on_step_end=lambda *_args: {"prompt_embeds": random_embeds(1)},
                callback_on_step_end_tensor_inputs=["prompt_embeds"],
            )

    @pytest.mark.parametrize("returns", [True, False])
    def test_prompt_edited_in_place_is_used(self, pipe: ARDiffusionPipeline, returns: bool) -> None:
        """The embeddings were compared by identity, so what a callback wrote into them changed nothing."""

        def edit(_pipe: Any, step: int, _timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                tensors["prompt_embeds"].copy_(random_embeds(4))
            return tensors if returns else {}

        call = {
            "recipe": QUICK.replace(denoising_steps=(1000,)),
            "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
        }
        swap = {"prompt_embeds": random_embeds(4)}
        replaced = latents_of(pipe, callback_on_step_end=lambda *_args: swap, **call)
        assert torch.equal(latents_of(pipe, callback_on_step_end=edit, **call), replaced)

    def test_negative_embeds_without_guidance(self, pipe: ARDiffusionPipeline) -> None:
        """A KeyError of an inner dictionary."""
        embeds = {"negative_prompt_embeds": random_embeds(1)}
        with pytest.raises(ValueError, match="runs without guidance, so it takes no negative prompt"):
            latents_of(pipe, callback_on_step_end=lambda *_args: embeds)

    def test_call_inside_a_callback(self, pipe: ARDiffusionPipeline) -> None:
        """What a callback wrote after the first nested call went to the nested call's state."""

        def nest(pipe: ARDiffusionPipeline, step: int, _timestep: float, _tensors: Any) -> None:
            if step == 0:
                latents_of(pipe, num_frames=9, guidance_scale=1.0)
            else:
                pipe._interrupt = True

        with record_forwards(pipe.transformer) as forwards:
            latents_of(pipe, num_frames=33, callback_on_step_end=nest)
        assert len(forwards) == 2 + 2

    def test_guidance_scale_is_read_at_every_step(self, pipe: ARDiffusionPipeline) -> None:
        """Callbacks of diffusers write ``_guidance_scale``; it had no effect, and was gone after the call."""

        def increase(
            pipe: ARDiffusionPipeline, _step: int, _timestep: float, tensors: dict[str, Any]
        ) -> dict[str, Any]:
            pipe._guidance_scale += 1.0
            return tensors

        changed = latents_of(pipe, guidance_scale=2.0, callback_on_step_end=increase)
        assert pipe.guidance_scale == 2.0 + pipe.num_timesteps == 6.0
        assert relative_error(changed, latents_of(pipe, guidance_scale=2.0)) > 1e-3

    def test_callback_object_of_diffusers(self, pipe: ARDiffusionPipeline) -> None:
        """It names its own tensors and sets the scale to 0, which means no guidance, not the negative prompt alone."""
        cutoff = SDCFGCutoffCallback(cutoff_step_ratio=None, cutoff_step_index=0)
        with record_forwards(pipe.transformer) as forwards:
            latents = latents_of(pipe, guidance_scale=3.0, callback_on_step_end=cutoff)
        assert pipe.guidance_scale == 0.0 and latents.isfinite().all()
        assert len(forwards) == (2 + 1) + 2 + 2, "both branches in the first step and the commit only"

    def test_progress_bar(self, pipe: ARDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        bars: list[Any] = []
        make = ARDiffusionPipeline.progress_bar

        def note(self: ARDiffusionPipeline, iterable: Any = None, total: int | None = None) -> Any:
            bars.append(make(self, iterable, total))
            return bars[-1]

        monkeypatch.setattr(ARDiffusionPipeline, "progress_bar", note)
        pipe.set_progress_bar_config(disable=False)
        latents_of(pipe, num_frames=33)
        pipe.set_progress_bar_config(disable=True)
        assert [(bar.total, bar.n) for bar in bars] == [(6, 6)]

    def test_return_dict(self, pipe: ARDiffusionPipeline) -> None:
        (frames,) = pipe(PROMPT, num_frames=5, recipe=QUICK, output_type="pt", return_dict=False)
        assert frames.shape == (1, 5, 3, 32, 48)

    def test_number_of_steps_of_a_stream(self, pipe: ARDiffusionPipeline) -> None:
        for num_frames, expected in ((33, 6), (None, 0)):
            with pipe.stream(PROMPT, num_frames=num_frames, recipe=QUICK, output_type="latent") as stream:
                next(stream)
                assert pipe.num_timesteps == expected


def test_replaced_block_is_paged_in_the_next_call() -> None:
    """A block swapped between two calls ran stock attention without history, in silence."""
    pipe = make_pipeline(recipe=QUICK)
    before = latents_of(pipe, num_frames=33)
    pipe.transformer.blocks[1] = make_transformer().blocks[0]
    after = latents_of(pipe, num_frames=33)
    fresh = make_pipeline(recipe=QUICK, transformer=pipe.transformer)
    assert torch.equal(after, latents_of(fresh, num_frames=33))
    assert not torch.equal(after, before)
