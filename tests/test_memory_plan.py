"""The memory plan of the pipeline: what it says before a call is what live objects hold in the middle of it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorders import FunctionRecorder
from tiny_components import (
    PROMPT,
    QUICK,
    latents_of,
    make_pipeline,
    random_embeds,
    record_forwards,
    record_pools,
    seed,
)

from diffusers_ardiff import ARDiffusionPipeline, CacheOptions, MemoryLimitError
from diffusers_ardiff.attention import get_backend, registry
from diffusers_ardiff.cache import KVShape, RingGeometry, plan_memory
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.pipelines.warmup import run_warmup


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Bytes of the allocations behind these tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def measure(stream: ARStream) -> dict[str, int]:
    """Bytes that a stream holds now, by part, from the tensors themselves."""
    sessions = stream.rollout.sessions
    storage = sessions[0].branch().storage
    texts = [branch.text for session in sessions for branch in session.branches]
    return {
        "pool": bytes_of([*storage.key_pools, *storage.value_pools]),
        "text": bytes_of([t for text in texts for layer in text.layers for t in layer if t is not None]),
        "vae": stream.vae_state_bytes,
        "latents": bytes_of([stream.rollout.recent_latents]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("guided", [False, True], ids=["one branch", "two branches"])
@pytest.mark.parametrize("num_videos", [1, 2])
def test_plan_is_what_is_allocated(num_videos: int, guided: bool, dtype: torch.dtype) -> None:
    pipe = make_pipeline(QUICK).to(dtype)
    plan = pipe.plan_memory(num_videos=num_videos, guided=guided)
    with pipe.stream([PROMPT] * num_videos, guidance_scale=3.0 if guided else 1.0, output_type="pt") as stream:
        for _ in range(3):
            next(stream)
        held = measure(stream)
    parts = {
        "pool": plan.pool_bytes,
        "text": plan.text_bytes,
        "vae": plan.vae_state_bytes,
        "latents": plan.latent_bytes,
    }
    assert {name: num_videos * size for name, size in parts.items()} == held
    assert plan.total_bytes == sum(held.values())
    assert min(held.values()) > 0
    # 2 layers of 2 heads of 12, K and V, ceil(36 / 16) pages of 16.
    assert plan.pool_bytes == (2 if guided else 1) * 3 * 16 * 2 * 2 * 2 * 12 * dtype.itemsize


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ({"height": 48, "width": 64}, {}),
        ({"recipe": QUICK.replace(num_window_frames=9)}, {}),
        ({}, {"page_size": 64}),
        ({}, {"kv_dtype": torch.bfloat16}),
        ({}, {"shuffle_seed": 1}),
    ],
    ids=["size", "window", "page size", "kv dtype", "fragmented"],
)
def test_everything_that_changes_the_plan(
    pipe: ARDiffusionPipeline, call: dict[str, Any], options: dict[str, Any]
) -> None:
    cache = CacheOptions(**options)
    plan = pipe.plan_memory(**call, cache=cache)
    assert plan.total_bytes != pipe.plan_memory().total_bytes
    with pipe.stream(PROMPT, **call, cache=cache, output_type="pt") as stream:
        for _ in range(5):
            next(stream)
        held = measure(stream)
        staging = stream.rollout.sessions[0].branch().storage.staging
    held["staging"] = 0 if staging is None else staging.num_bytes
    assert plan.total_bytes == sum(held.values())


def test_text_length_counts(pipe: ARDiffusionPipeline) -> None:
    embeds = random_embeds(1, text_len=30)
    assert pipe.plan_memory(text_len=30).text_bytes == 2 * 2 * 30 * 2 * 12 * 4
    with pipe.stream(prompt_embeds=embeds, output_type="latent") as stream:
        assert measure(stream)["text"] == pipe.plan_memory(text_len=30).text_bytes


def test_prompts_beside_given_embeddings_have_their_length(pipe: ARDiffusionPipeline) -> None:
    """The negative prompt and later ones had the tokenizer's length beside longer embeddings: the plan was wrong."""
    plan = pipe.plan_memory(text_len=30, guided=True)
    with pipe.stream(prompt_embeds=random_embeds(1, text_len=30), guidance_scale=3.0, output_type="latent") as stream:
        assert measure(stream)["text"] == plan.text_bytes
        stream.switch_prompt("blue square", negative_prompt="blurry")
        assert measure(stream)["text"] == plan.text_bytes


def test_a_recipe_with_guidance_plans_for_its_negative_branch(pipe: ARDiffusionPipeline) -> None:
    """Plan, pool and warm-up had one branch unless told otherwise, also where the recipe's own guidance needs two."""
    guiding = pipe.recipe.replace(guidance_scale=2.0)
    assert pipe.plan_memory(recipe=guiding) == pipe.plan_memory(guided=True) != pipe.plan_memory()
    assert pipe.plan_memory(recipe=guiding, guided=False) == pipe.plan_memory()
    pool = pipe.create_cache(recipe=guiding)
    with pipe.stream(PROMPT, recipe=guiding, cache=pool, output_type="latent") as stream:
        assert stream.rollout.branch_names == ("positive", "negative")


def test_nothing_is_decoded_for_latents(pipe: ARDiffusionPipeline) -> None:
    assert pipe.plan_memory(decode=False).vae_state_bytes == 0 < pipe.plan_memory().vae_state_bytes
    with pipe.stream(PROMPT, output_type="latent") as stream:
        next(stream)
        assert stream.vae_state_bytes == 0


class TestCapturedForwards:
    """Captured forwards read text K/V at addresses of their own; the plan and the limit of a warm-up knew nothing of them."""

    @pytest.mark.parametrize(
        ("num_videos", "guided", "merge_commits"),
        [(1, False, False), (2, False, False), (2, True, False), (1, False, True), (2, False, True)],
    )
    def test_plan_is_what_is_allocated(self, num_videos: int, guided: bool, merge_commits: bool) -> None:
        pipe = make_pipeline(QUICK)
        call = {"num_videos": num_videos, "guided": guided, "decode": False, "merge_commits": merge_commits}
        plan = pipe.plan_memory(cuda_graphs=True, **call)
        report = run_warmup(pipe, None, None, compile=False, recorder=FunctionRecorder(), recache=True, **call)
        fixed = [text.text for text in pipe._warm.graphs._texts.values()]
        held = bytes_of([t for text in fixed for layer in text.layers for t in layer if t is not None])
        assert num_videos * plan.replay_text_bytes == held == report.text_bytes == pipe.warm_text_bytes > 0
        assert plan.total_bytes - pipe.plan_memory(**call).total_bytes == held
        assert "text K/V of captured forwards" in str(plan) and "their text" in str(report)
        pipe.cooldown()
        assert pipe.warm_text_bytes == 0

    def test_limit(self) -> None:
        """A warm-up took twice the text's bytes where the limit allowed them once."""
        pipe = make_pipeline(QUICK)
        needed = pipe.plan_memory(cuda_graphs=True).total_bytes
        with record_pools() as pools, pytest.raises(MemoryLimitError, match=f"need {needed:,} bytes"):
            options = CacheOptions(limit_bytes=needed - 1)
            run_warmup(pipe, None, None, compile=False, recorder=FunctionRecorder(), cache=options)
        assert not pools and pipe._warm is None
        run_warmup(pipe, None, None, compile=False, recorder=None, cache=options)
        assert pipe.warm_text_bytes == 0


class TestLimit:
    @pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
    @pytest.mark.parametrize("num_videos", [1, 2])
    def test_one_byte_short(self, pipe: ARDiffusionPipeline, num_videos: int, guidance_scale: float) -> None:
        """Refused with both numbers before anything is encoded or allocated; the exact number is enough."""
        needed = pipe.plan_memory(num_videos=num_videos, guided=guidance_scale > 1).total_bytes
        call = {"guidance_scale": guidance_scale, "num_frames": 21}
        prompts, encoded = [PROMPT] * num_videos, []
        handle = pipe.text_encoder.register_forward_pre_hook(lambda *_args: encoded.append(1))
        message = re.escape(f"need {needed:,} bytes, {needed - 1:,} are allowed")
        with record_pools() as pools, record_forwards(pipe.transformer) as forwards:
            for use in (pipe, pipe.stream):
                with pytest.raises(MemoryLimitError, match=message):
                    use(prompts, cache=CacheOptions(limit_bytes=needed - 1), **call)
            assert (len(pools), len(forwards), encoded) == (0, 0, [])
        handle.remove()
        assert len(pipe(prompts, cache=CacheOptions(limit_bytes=needed), **call).frames) == num_videos

    def test_plan_and_pool_refuse_alike(self, pipe: ARDiffusionPipeline) -> None:
        needed = pipe.plan_memory().total_bytes
        for make in (pipe.plan_memory, pipe.create_cache):
            with pytest.raises(MemoryLimitError, match=rf"need {needed:,} bytes, 0 are allowed"):
                make(cache=CacheOptions(limit_bytes=0))
            make(cache=CacheOptions(limit_bytes=needed))


class TestCacheOptions:
    def test_page_size_no_backend_accepts(self, pipe: ARDiffusionPipeline) -> None:
        """A page size was refused without saying what the frame has to do with it: nothing."""
        with pytest.raises(ValueError, match=r"page_size=0 can't be used: latent frames of 4x6 have 6 tokens \(any"):
            pipe(PROMPT, cache=CacheOptions(page_size=0))

    def test_unknown_backend(self, pipe: ARDiffusionPipeline) -> None:
        with pytest.raises(ValueError, match="nonsense"):
            pipe(PROMPT, cache=CacheOptions(backend="nonsense"))

    def test_backend_by_name(self, pipe: ARDiffusionPipeline) -> None:
        reference = latents_of(pipe, cache=CacheOptions(backend="reference"))
        torch.testing.assert_close(reference, latents_of(pipe), rtol=0, atol=1e-4)

    @pytest.mark.parametrize(
        "options",
        [{"kv_dtype": torch.bfloat16}, {"backend": "reference"}, {"page_size": 64}],
        ids=lambda options: next(iter(options)),
    )
    def test_given_pool_dictates_its_options(self, pipe: ARDiffusionPipeline, options: dict[str, Any]) -> None:
        """A pool of another dtype was refused, and one of a named backend was used with whichever was chosen."""
        manager = pipe.create_cache(cache=CacheOptions(**options))
        with pipe.stream(PROMPT, cache=manager, output_type="latent", generator=seed(0)) as stream:
            assert pipe.paged_attachment(options.get("backend")) is stream.rollout.runner.attachment
            shared = torch.cat([next(stream).latents for _ in range(2)], dim=2)
        assert torch.equal(shared, latents_of(pipe, cache=CacheOptions(**options))[:, :, :6])

    def test_page_size_follows_the_backend(self, pipe: ARDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        """The page size was asked of whichever backend accepts pages of 16, so one that wants 24 was passed over."""
        wants_24 = replace(get_backend("sdpa"), name="wants-24", rank=-1, page_multiple=24)
        monkeypatch.setattr(registry, "_backends", {**registry._backends, "wants-24": wants_24})
        assert pipe.create_cache().geometry.page_size == 24

    def test_kv_dtype_is_its_own_option(self, pipe: ARDiffusionPipeline) -> None:
        """The K/V dtype followed an unrelated flag."""
        manager = pipe.create_cache(cache=CacheOptions(kv_dtype=torch.bfloat16))
        assert manager.storage.dtype == torch.bfloat16 and pipe.transformer.dtype == torch.float32
        half = latents_of(pipe, cache=CacheOptions(kv_dtype=torch.bfloat16), generator=seed(0))
        assert 0 < (half - latents_of(pipe)).abs().max() < 0.1


def test_plan_reads_as_a_sentence() -> None:
    """18 frames of 1560 tokens at 40 layers of 40 x 128 in two bytes: 23.0 GB, as a person reads it."""
    shape = KVShape(num_layers=40, num_heads=40, head_dim=128, itemsize=2)
    geometry = RingGeometry(sink_tokens=9 * 1560, window_tokens=9 * 1560, page_size=16)
    text = str(plan_memory(geometry, shape, num_sessions=2))
    assert text.startswith(
        "42.847 GiB for 2 session(s) of 1 branch(es); one session: K/V pages 21.423 GiB (1755 pages"
    )
