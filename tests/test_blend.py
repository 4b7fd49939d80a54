"""Prompts that blend over several chunks. No step of a blend touches the history."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import relative_error
from live_streams import NEW, OLD, THIRD, stream_of, switched_latents, take
from tiny_components import (
    TEXT_DIM,
    TEXT_LEN,
    TOKENS_PER_FRAME,
    failing,
    pool_pages,
    random_embeds,
)

from diffusers_ardiff import ARDiffusionPipeline, PromptSwitch
from diffusers_ardiff.cache import KVManager


class TestBlend:
    @staticmethod
    def mixtures(start: torch.Tensor, end: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
        return [torch.lerp(start, end, k / num_chunks) for k in range(1, num_chunks)] + [end]

    @staticmethod
    def one_by_one(pipe: ARDiffusionPipeline, texts: list[torch.Tensor], **call: Any) -> torch.Tensor:
        """A chunk under ``OLD``, then one under each text, by immediate switches."""
        with stream_of(pipe, **call) as stream:
            chunks = [take(stream, 1)]
            for embeds in texts:
                stream.switch_prompt(prompt_embeds=embeds)
                chunks.append(take(stream, 1))
        return torch.cat(chunks, dim=2)

    @pytest.mark.parametrize("how", ["switch", "event", "schedule"])
    def test_four_chunks(self, pipe: ARDiffusionPipeline, manager: KVManager, how: str) -> None:
        """Weights 1/4, 2/4, 3/4, 1; no history changes, and the text is projected once a chunk and layer."""
        blend: dict[str, Any] = {"prompt_embeds": NEW, "mode": "blend", "blend_chunks": 4}
        schedule = [PromptSwitch(latent_frame=3, **blend)] if how == "schedule" else []
        projections: list[int] = []
        handle = pipe.transformer.blocks[1].attn2.to_k.register_forward_hook(lambda *_: projections.append(1))
        with stream_of(pipe, cache=manager, prompt_schedule=schedule) as stream:
            chunks = [take(stream, 1)]
            pages = pool_pages(manager)
            if how == "switch":
                stream.switch_prompt(**blend)
            elif how == "event":
                stream.update(**blend)
            for index in range(1, 7):
                chunks.append(take(stream, 1))
                assert pool_pages(manager) == pages
                assert manager.sessions[0].branch().committed_tokens == 3 * index * TOKENS_PER_FRAME
        handle.remove()
        expected = self.one_by_one(pipe, [*self.mixtures(OLD, NEW, 4), NEW, NEW])
        assert torch.equal(torch.cat(chunks, dim=2), expected)
        assert len(projections) == 1 + 4
        assert relative_error(expected[:, :, 3:6], self.one_by_one(pipe, [NEW])[:, :, 3:6]) > 1e-3

    def test_last_chunk_has_the_new_embeddings_exactly(self, pipe: ARDiffusionPipeline) -> None:
        """And the mixtures are rounded once, from float32."""
        old, new = OLD.bfloat16(), (NEW * 1e4).bfloat16()
        with stream_of(pipe, prompt_embeds=old) as stream:
            stream.switch_prompt(prompt_embeds=new, mode="blend", blend_chunks=2)
            seen = []
            for _ in range(2):
                next(stream)
                seen.append(stream._prompt.embeds["positive"])
        assert torch.equal(seen[1], new) and seen[0].dtype == torch.bfloat16
        assert torch.equal(seen[0], ((old.float() + new.float()) / 2).bfloat16())

    def test_last_chunk_of_double_embeddings(self, pipe: ARDiffusionPipeline) -> None:
        """Mixing is float32; the last step does not mix at all."""
        new = torch.randn(1, TEXT_LEN, TEXT_DIM, dtype=torch.float64)
        with stream_of(pipe) as stream:
            stream.switch_prompt(prompt_embeds=new, mode="blend", blend_chunks=1)
            next(stream)
            assert torch.equal(stream._prompt.embeds["positive"], new)

    def test_one_chunk_is_a_change_of_text(self, pipe: ARDiffusionPipeline) -> None:
        blended = switched_latents(pipe, 1, 2, prompt_embeds=NEW, mode="blend", blend_chunks=1)
        assert torch.equal(blended, switched_latents(pipe, 1, 2, prompt_embeds=NEW))

    def test_blend_during_a_blend_starts_from_the_mixture(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            chunks = [take(stream, 1)]
            stream.update(prompt_embeds=NEW, mode="blend", blend_chunks=4)
            chunks.append(take(stream, 2))
            stream.update(prompt_embeds=THIRD, mode="blend", blend_chunks=2)
            chunks.append(take(stream, 3))
        half = torch.lerp(OLD, NEW, 0.5)
        texts = [*self.mixtures(OLD, NEW, 4)[:2], *self.mixtures(half, THIRD, 2), THIRD]
        assert torch.equal(torch.cat(chunks, dim=2), self.one_by_one(pipe, texts))

    @pytest.mark.parametrize("mode", ["text", "recache", "flush"])
    def test_switch_ends_a_blend(self, pipe: ARDiffusionPipeline, mode: str) -> None:
        latents = []
        for how in ("blend", "text"):
            with stream_of(pipe) as stream:
                change = {"prompt_embeds": NEW, "mode": "blend", "blend_chunks": 4}
                half = {"prompt_embeds": torch.lerp(OLD, NEW, 0.25)}
                stream.switch_prompt(**(change if how == "blend" else half))
                chunks = [take(stream, 1)]
                stream.switch_prompt(prompt_embeds=THIRD, mode=mode)
                latents.append(torch.cat([*chunks, take(stream, 3)], dim=2))
        assert torch.equal(*latents)

    def test_callback_that_replaces_the_text_ends_a_blend(self, pipe: ARDiffusionPipeline) -> None:
        def replace(_pipe: Any, step: int, *_args: Any) -> dict[str, Any]:
            return {"prompt_embeds": THIRD} if step == 1 else {}

        latents = []
        for mode in ({"mode": "blend", "blend_chunks": 2}, {"mode": "text"}):
            with stream_of(pipe, callback_on_step_end=replace) as stream:
                target = NEW if mode["mode"] == "blend" else torch.lerp(OLD, NEW, 0.5)
                stream.switch_prompt(prompt_embeds=target, **mode)
                latents.append(take(stream, 3))
        assert torch.equal(*latents)

    @pytest.mark.parametrize("both", [False, True], ids=["positive", "both branches"])
    def test_with_guidance(self, pipe: ARDiffusionPipeline, both: bool) -> None:
        """The negative text stays, or is blended like the positive one."""
        call = {"negative_prompt_embeds": random_embeds(5), "guidance_scale": 3.0}
        target = {"negative_prompt_embeds": random_embeds(6)} if both else {}
        with stream_of(pipe, **call) as stream:
            chunks = [take(stream, 1)]
            stream.switch_prompt(prompt_embeds=NEW, mode="blend", blend_chunks=2, **target)
            chunks.append(take(stream, 3))
        with stream_of(pipe, **call) as stream:
            expected = [take(stream, 1)]
            for weight in (0.5, 1.0, 1.0):
                negative = torch.lerp(random_embeds(5), random_embeds(6), weight) if both else None
                stream.switch_prompt(prompt_embeds=torch.lerp(OLD, NEW, weight), negative_prompt_embeds=negative)
                expected.append(take(stream, 1))
        assert torch.equal(torch.cat(chunks, dim=2), torch.cat(expected, dim=2))

    def test_switch_of_the_positive_text_leaves_the_negative_blend(self, pipe: ARDiffusionPipeline) -> None:
        call = {"negative_prompt_embeds": random_embeds(5), "guidance_scale": 3.0}
        with stream_of(pipe, **call) as stream:
            stream.switch_prompt(
                prompt_embeds=NEW, negative_prompt_embeds=random_embeds(6), mode="blend", blend_chunks=2
            )
            stream.switch_prompt(prompt_embeds=THIRD)
            take(stream, 2)
            assert torch.equal(stream._prompt.embeds["positive"], THIRD)
            assert torch.equal(stream._prompt.embeds["negative"], random_embeds(6))

    def test_lengths_that_differ(self, pipe: ARDiffusionPipeline, plain: torch.Tensor) -> None:
        longer = random_embeds(2, text_len=20)
        with stream_of(pipe) as stream:
            first = take(stream, 1)
            with pytest.raises(ValueError, match=r"of one shape, the stream has \(1, 12, 32\).* new ones are \(1, 20"):
                stream.switch_prompt(prompt_embeds=longer, mode="blend", blend_chunks=2)
            assert torch.equal(torch.cat([first, take(stream, 3)], dim=2), plain)

    def test_no_prompt_to_start_from(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            stream.reset(keep=())
            with pytest.raises(ValueError, match="the stream has none"):
                stream.switch_prompt(prompt_embeds=NEW, mode="blend", blend_chunks=2)

    def test_step_that_fails_is_taken_at_the_next_call(self, pipe: ARDiffusionPipeline) -> None:
        expected = switched_latents(pipe, 1, 3, prompt_embeds=NEW, mode="blend", blend_chunks=3)
        with stream_of(pipe) as stream:
            chunks = [take(stream, 1)]
            stream.switch_prompt(prompt_embeds=NEW, mode="blend", blend_chunks=3)
            chunks.append(take(stream, 1))
            with failing(pipe.transformer.blocks[1].attn2.to_k, RuntimeError("lost")), pytest.raises(RuntimeError):
                next(stream)
            chunks.append(take(stream, 2))
        assert torch.equal(torch.cat(chunks, dim=2), expected)

    def test_reset_of_the_text_ends_it(self, pipe: ARDiffusionPipeline) -> None:
        """A blend that went on would bring back the negative text that was just forgotten."""
        with stream_of(pipe, negative_prompt_embeds=OLD, guidance_scale=3.0) as stream:
            stream.switch_prompt(prompt_embeds=NEW, negative_prompt_embeds=THIRD, mode="blend", blend_chunks=4)
            stream.reset(keep=())
            stream.switch_prompt(prompt_embeds=OLD)
            with pytest.raises(RuntimeError, match="branch 'negative' has no prompt"):
                next(stream)

    def test_reset_of_the_history_goes_on_with_it(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            stream.switch_prompt(prompt_embeds=NEW, mode="blend", blend_chunks=2)
            next(stream)
            stream.reset()
            next(stream)
            assert torch.equal(stream._prompt.embeds["positive"], NEW)

    @pytest.mark.parametrize("blend_chunks", [0, -1, 1.5])
    def test_bad_numbers(self, blend_chunks: Any) -> None:
        with pytest.raises(ValueError, match=r"mode 'blend' needs blend_chunks|blend_chunks must be a whole number"):
            PromptSwitch(latent_frame=0, prompt="blue", mode="blend", blend_chunks=blend_chunks)

    def test_child_goes_on_blending_and_has_its_own_events(self, pipe: ARDiffusionPipeline) -> None:
        shared = pipe.create_cache(num_videos=2)
        with stream_of(pipe, cache=shared) as stream:
            stream.switch_prompt(prompt_embeds=NEW, mode="blend", blend_chunks=4)
            take(stream, 2)
            stream.update(prompt_embeds=THIRD)
            with stream.fork() as child:
                expected = switched_latents(pipe, 0, 4, prompt_embeds=NEW, mode="blend", blend_chunks=4)
                assert torch.equal(take(child, 2), expected[:, :, 6:])
                assert child.update(prompt_embeds=THIRD, event_id=0)
                assert len(stream.inbox.mailbox) == 1
