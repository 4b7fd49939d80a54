"""Estimates of working memory: what the counter counts, and that the plan has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_light_decoder import make_light
from test_vae_stream import make_vae
from tiny_components import PROMPT, QUICK, TOKENS_PER_FRAME, make_pipeline, make_transformer

from diffusers_ardiff.cache import KVShape, RingGeometry, plan_memory
from diffusers_ardiff.pipelines.decoding import DecodeOptions, Decoding
from diffusers_ardiff.pipelines.work_memory import forward_bytes, peak_bytes, vae_decode_bytes

KILO = 1000
MEGA_ROWS = 250


def make(rows: int = MEGA_ROWS) -> torch.Tensor:
    """A tensor of ``rows`` kilobytes on the meta device."""
    return torch.empty(rows, 250, device="meta")


HELD = torch.empty(MEGA_ROWS, 250, device="meta")


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (make, 250),
        (lambda: [make(), make()], 500),
        (lambda: [make().shape for _ in range(3)], 250),
        (lambda: make().view(-1)[::2].unsqueeze(0), 250),
        (lambda: make() + 1, 500),
        (lambda: make().add_(1), 250),
        (lambda: [make() + 1, make() + 1], 750),
        (lambda: HELD.t()[1:], 0),
        (lambda: HELD + 1, 250),
    ],
    ids=["one", "two", "one after the other", "views", "out of place", "in place", "kept", "view of old", "of old"],
)
def test_counts_what_is_alive_at_once(work: Callable[[], object], expected: int) -> None:
    assert peak_bytes(work) == expected * KILO


def test_convolutions_count_their_operands_again() -> None:
    conv = torch.nn.Conv2d(4, 8, 3, padding=1, device="meta")
    rows = torch.empty(1, 4, 16, 16, device="meta")
    assert peak_bytes(lambda: conv(rows)) == 8 * 256 * 4 + (4 + 8) * 256 * 4


class TestEstimates:
    def test_decoding_grows_with_the_frame_and_the_chunk(self) -> None:
        vae = make_vae()
        one = vae_decode_bytes(vae, (1, 16, 3, 8, 8), torch.float32)
        assert one > 12 * 3 * 64 * 64 * 4
        assert vae_decode_bytes(vae, (2, 16, 3, 8, 8), torch.float32) == pytest.approx(2 * one, rel=0.01)
        assert vae_decode_bytes(vae, (1, 16, 3, 16, 8), torch.float32) == pytest.approx(2 * one, rel=0.01)
        assert one < vae_decode_bytes(vae, (1, 16, 6, 8, 8), torch.float32) < 2.1 * one

    def test_forward_holds_its_feed_forward(self) -> None:
        """(rows, tokens, ffn_dim) before and after the activation are alive together."""
        wide = make_transformer(ffn_dim=4096)
        counted = forward_bytes(wide, (1, 16, 3, 8, 8))
        assert counted == pytest.approx(2 * 3 * 16 * 4096 * 4, rel=0.1)
        assert forward_bytes(make_transformer(ffn_dim=4096, num_layers=6), (1, 16, 3, 8, 8)) == counted

    def test_compiled_transformer_is_seen_through(self) -> None:
        plain = make_transformer()
        assert forward_bytes(torch.compile(plain), (1, 16, 3, 8, 8)) == forward_bytes(plain, (1, 16, 3, 8, 8)) > 0

    def test_light_decoder_takes_less(self) -> None:
        light, full = Decoding(None, make_light(), DecodeOptions()), Decoding(make_vae(), None, DecodeOptions())
        assert 0 < light.work_bytes((1, 16, 3, 8, 8)) < full.work_bytes((1, 16, 3, 8, 8))


class TestPlan:
    def test_work_is_listed_beside_what_is_held(self) -> None:
        pipe = make_pipeline(QUICK)
        plan = pipe.plan_memory(num_videos=2)
        assert plan.forward_bytes == forward_bytes(pipe.transformer, (2, 16, 3, 4, 6))
        assert plan.decode_bytes == vae_decode_bytes(pipe.vae, (2, 16, 3, 4, 6), torch.float32)
        assert plan.peak_bytes == plan.total_bytes + max(plan.forward_bytes, plan.decode_bytes)
        assert "Working memory of a forward about" in str(plan)
        assert pipe.plan_memory(decode=False).decode_bytes == 0

    def test_the_largest_forward_of_a_recipe_counts(self) -> None:
        """A rolling window of three chunks, with a timestep a token and the visible keys of a layer gathered; a context of
        five frames before chunks of one."""
        pipe = make_pipeline(QUICK)
        rolling = QUICK.replace(context_mode="rolling", denoising_steps=(1000, 700, 400), num_window_frames=9)
        frames, tokens = 3 * QUICK.chunk_frames, 3 * QUICK.chunk_frames * TOKENS_PER_FRAME
        expected = forward_bytes(pipe.transformer, (1, 16, frames, 4, 6), tokens)
        gathered = (1 + 9) * TOKENS_PER_FRAME * 2 * 24 * 4
        assert pipe.plan_memory(recipe=rolling).forward_bytes == expected + gathered
        assert expected > forward_bytes(pipe.transformer, (1, 16, frames, 4, 6))
        recompute = QUICK.replace(context_mode="recompute", chunk_frames=1)
        assert (QUICK.num_sink_frames, QUICK.num_window_frames) == (1, 5)
        expected = forward_bytes(pipe.transformer, (1, 16, 5, 4, 6))
        assert pipe.plan_memory(recipe=recompute).forward_bytes == expected

    def test_overlapped_work_adds_up(self) -> None:
        pipe = make_pipeline(QUICK)
        pipe.set_decoder(overlap=True)
        plan = pipe.plan_memory()
        assert plan.work_bytes == plan.forward_bytes + plan.decode_bytes > plan.decode_bytes > 0

    def test_nobody_asked(self) -> None:
        geometry = RingGeometry(sink_tokens=0, window_tokens=16, page_size=16)
        plan = plan_memory(geometry, KVShape(num_layers=1, num_heads=1, head_dim=8, itemsize=2))
        assert plan.work_bytes == 0 and plan.peak_bytes == plan.total_bytes
        assert "Weights and activations come on top" in str(plan)

    def test_a_call_does_not_pay_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from diffusers_ardiff.pipelines import memory

        monkeypatch.setattr(memory, "forward_bytes", None)
        assert make_pipeline(QUICK)(PROMPT, num_frames=9).frames.shape[1] == 9
