"""The streaming VAE against the host's whole-video encode and decode, on tiny real VAEs of both Wan generations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import AutoencoderKL, AutoencoderKLWan

from diffusers_ardiff.pipelines.vae_stream import (
    VaeDecodeStream,
    VaeEncodeStream,
    check_streamable_vae,
    decode_state_bytes,
    encode_video,
    num_latent_frames,
    num_pixel_frames,
    spatial_factor,
    temporal_factor,
)

TINY = {
    "base_dim": 3,
    "z_dim": 16,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}
CONFIGS = {
    "wan2.1": TINY,
    "wan2.2": TINY
    | {
        "z_dim": 48,
        "latents_mean": [0.1 * (i % 5) for i in range(48)],
        "latents_std": [0.5 + 0.1 * (i % 7) for i in range(48)],
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": True,
        "patch_size": 2,
        "scale_factor_spatial": 16,
    },
}


def make_vae(kind: str = "wan2.1") -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(**CONFIGS[kind]).eval()


@pytest.fixture(params=sorted(CONFIGS))
def vae(request: pytest.FixtureRequest) -> AutoencoderKLWan:
    return make_vae(request.param)


def make_latents(vae: AutoencoderKLWan, frames: int = 21, *, batch: int = 1, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, vae.config.z_dim, frames, 2, 2, generator=generator)


def make_video(vae: AutoencoderKLWan, frames: int, *, batch: int = 1) -> torch.Tensor:
    side = 2 * spatial_factor(vae)
    return torch.rand(batch, 3, frames, side, side, generator=torch.Generator().manual_seed(2)) * 2 - 1


def statistics(vae: AutoencoderKLWan) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))


@torch.no_grad()
def host_decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    mean, std = statistics(vae)
    return vae.decode(latents * std + mean).sample


def stream_decode(vae: AutoencoderKLWan, latents: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    stream = VaeDecodeStream(vae)
    return [stream.decode(chunk) for chunk in latents.split(list(sizes), dim=2)]


class TestFrameCounts:
    @pytest.mark.parametrize(("latent", "pixel"), [(1, 1), (2, 5), (3, 9), (21, 81)])
    def test_latent_frames_round_up(self, latent: int, pixel: int) -> None:
        assert num_pixel_frames(latent, 4) == pixel
        assert [num_latent_frames(pixel + more, 4) for more in range(5)] == [latent] + [latent + 1] * 4

    @pytest.mark.parametrize("count", [0, -3, 1.5, True])
    def test_counts_that_are_no_counts(self, count: object) -> None:
        with pytest.raises(ValueError, match="num_latent_frames"):
            num_pixel_frames(count, 4)
        with pytest.raises(ValueError, match="num_pixel_frames"):
            num_latent_frames(count, 4)

    @pytest.mark.parametrize(("kind", "temporal", "spatial"), [("wan2.1", 4, 8), ("wan2.2", 4, 16)])
    def test_factors(self, kind: str, temporal: int, spatial: int) -> None:
        vae = make_vae(kind)
        assert (temporal_factor(vae), spatial_factor(vae)) == (temporal, spatial)
        assert (vae.config.scale_factor_temporal, vae.config.scale_factor_spatial) == (temporal, spatial)

    def test_factors_are_those_of_the_layers(self) -> None:
        """Tiny VAEs often leave the scale factors of their config at the default, which then is wrong."""
        vae = AutoencoderKLWan(**TINY | {"dim_mult": [1, 1, 1], "temperal_downsample": [False, True]})
        assert (temporal_factor(vae), spatial_factor(vae)) == (2, 4)
        frames = VaeDecodeStream(vae).decode(make_latents(vae, 3))
        assert frames.shape == (1, 3, num_pixel_frames(3, 2), 2 * 4, 2 * 4)


class TestDecode:
    def test_chunks_of_three(self, vae: AutoencoderKLWan) -> None:
        """Each chunk through ``vae.decode`` alone gives 7 x 9 = 63 frames: the first latent of every chunk counts 1."""
        latents = make_latents(vae)
        chunks = stream_decode(vae, latents, [3] * 7)
        assert [chunk.shape[2] for chunk in chunks] == [9] + [12] * 6
        assert sum(host_decode(vae, chunk).shape[2] for chunk in latents.split(3, dim=2)) == 63
        side = 2 * spatial_factor(vae)
        assert torch.cat(chunks, dim=2).shape == (1, 3, 81, side, side)

    @pytest.mark.parametrize("sizes", [[21], [3] * 7, [1] * 21, [1, 2, 9, 9], [5, 16]], ids=str)
    def test_every_plan_agrees_with_the_whole(self, vae: AutoencoderKLWan, sizes: list[int]) -> None:
        latents = make_latents(vae, batch=2)
        video = torch.cat(stream_decode(vae, latents, sizes), dim=2)
        torch.testing.assert_close(video, host_decode(vae, latents), rtol=0, atol=1e-5)

    def test_frame_by_frame_is_the_host_bit_by_bit(self, vae: AutoencoderKLWan) -> None:
        latents = make_latents(vae, 5)
        assert torch.equal(torch.cat(stream_decode(vae, latents, [1] * 5), dim=2), host_decode(vae, latents))

    def test_the_past_matters(self, vae: AutoencoderKLWan) -> None:
        """Guards the other tests: with these weights a lost past moves pixels by far more than their 1e-5."""
        latents = make_latents(vae, 6)
        other_past = torch.cat([-latents[:, :, :3], latents[:, :, 3:]], dim=2)
        second, other = (stream_decode(vae, video, [3, 3])[1] for video in (latents, other_past))
        assert (second - other).abs().max() > 1e-2

    def test_output_is_float32_in_range(self, vae: AutoencoderKLWan) -> None:
        torch.nn.init.constant_(vae.decoder.conv_out.bias, 3.0)
        video = VaeDecodeStream(vae).decode(make_latents(vae, 2))
        assert video.dtype == torch.float32 and not video.requires_grad
        assert video.max() == 1.0, "the bias drives every pixel into the clamp"
        half = VaeDecodeStream(vae.to(torch.bfloat16)).decode(make_latents(vae, 2).bfloat16())
        assert half.dtype == torch.float32

    def test_streams_interleave(self, vae: AutoencoderKLWan) -> None:
        latents = [make_latents(vae, 9, seed=seed) for seed in (1, 2)]
        streams = [VaeDecodeStream(vae) for _ in latents]
        frames: list[list[torch.Tensor]] = [[], []]
        for chunks in zip(*(video.split(3, dim=2) for video in latents), strict=True):
            for stream, chunk, out in zip(streams, chunks, frames, strict=True):
                out.append(stream.decode(chunk))
                host_decode(vae, make_latents(vae, 2, seed=3))
        for video, out in zip(latents, frames, strict=True):  # the same chunks, so the same bits
            assert torch.equal(torch.cat(out, dim=2), torch.cat(stream_decode(vae, video, [3] * 3), dim=2))

    def test_state_of_the_module_is_left_alone(self, vae: AutoencoderKLWan) -> None:
        vae.clear_cache()
        vae._feat_map[0] = marker = torch.ones(1)
        VaeDecodeStream(vae).decode(make_latents(vae, 3))
        VaeEncodeStream(vae).encode(make_video(vae, 5))
        assert vae._feat_map[0] is marker and vae._feat_map[1:] == [None] * (len(vae._feat_map) - 1)
        assert vae._enc_feat_map == [None] * len(vae._enc_feat_map)

    def test_abandoned_stream_leaves_nothing_behind(self, vae: AutoencoderKLWan) -> None:
        stream = VaeDecodeStream(vae)
        stream.decode(make_latents(vae, 3, batch=2))
        other = make_latents(vae, 6, seed=5)
        expected = torch.cat(stream_decode(vae, other, [3, 3]), dim=2)
        stream.reset()
        assert (stream.num_latent_frames, stream.state_bytes) == (0, 0)
        assert torch.equal(torch.cat([stream.decode(chunk) for chunk in other.split(3, dim=2)], dim=2), expected)

    def test_fork_continues_alone(self, vae: AutoencoderKLWan) -> None:
        past, left, right = make_latents(vae, 9).split(3, dim=2)
        stream = VaeDecodeStream(vae)
        stream.decode(past)
        branch = stream.fork()
        outputs = stream.decode(left), branch.decode(right)
        assert (stream.num_latent_frames, branch.num_latent_frames) == (6, 6)
        for future, output in zip((left, right), outputs, strict=True):
            assert torch.equal(output, stream_decode(vae, torch.cat([past, future], dim=2), [3, 3])[1])

    def test_interrupted_chunk_must_not_be_continued(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The cache is half new after an interrupt inside the decoder; going on would show a broken picture."""
        vae, latents = make_vae(), make_latents(make_vae(), 6)
        stream = VaeDecodeStream(vae)
        stream.decode(latents[:, :, :3])
        with monkeypatch.context() as patch:
            patch.setattr(vae.decoder.up_blocks[1], "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                stream.decode(latents[:, :, 3:])
        with pytest.raises(RuntimeError, match=r"inside the decoder.*reset\(\)"):
            stream.decode(latents[:, :, 3:])
        stream.reset()
        assert torch.equal(stream.decode(latents), stream_decode(vae, latents, [6])[0])

    def test_offload_hook_runs_before_every_chunk(self) -> None:
        vae = make_vae()
        calls: list[torch.nn.Module] = []

        class Recorder(ModelHook):
            def pre_forward(self, module: torch.nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
                calls.append(module)
                return args, kwargs

        add_hook_to_module(vae, Recorder())
        stream = VaeDecodeStream(vae)
        for chunk in make_latents(vae, 6).split(3, dim=2):
            stream.decode(chunk)
        encode_video(vae, make_video(vae, 1))
        assert calls == [vae] * 3

    def test_group_offloaded_vae(self) -> None:
        vae, latents = make_vae(), make_latents(make_vae(), 6)
        expected = torch.cat(stream_decode(vae, latents, [3, 3]), dim=2)
        vae.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
        assert torch.equal(torch.cat(stream_decode(vae, latents, [3, 3]), dim=2), expected)


class TestStateBytes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("sizes", [[1, 1, 1], [3, 3], [2, 1]], ids=str)
    def test_plan_equals_what_is_held(self, vae: AutoencoderKLWan, sizes: list[int], dtype: torch.dtype) -> None:
        vae.to(dtype)
        stream = VaeDecodeStream(vae)
        for chunk in make_latents(vae, sum(sizes), batch=2).split(sizes, dim=2):
            stream.decode(chunk)
        assert stream.state_bytes == decode_state_bytes(vae, 2, 2, 2, dtype) > 0
        assert stream.num_latent_frames == sum(sizes)

    def test_state_is_flat(self) -> None:
        vae = make_vae()
        stream = VaeDecodeStream(vae)
        sizes = []
        for chunk in make_latents(vae, 12).split(1, dim=2):
            stream.decode(chunk)
            sizes.append(stream.state_bytes)
        assert 0 < sizes[0] < sizes[1] and set(sizes[1:]) == {sizes[1]}

    def test_plan_scales_with_batch_and_area(self) -> None:
        vae = make_vae()
        one = decode_state_bytes(vae, 1, 2, 2, torch.float32)
        assert decode_state_bytes(vae, 3, 2, 2, torch.float32) == 3 * one
        assert decode_state_bytes(vae, 1, 4, 6, torch.float32) == 6 * one
        assert decode_state_bytes(vae, 1, 2, 2, torch.bfloat16) == one // 2

    def test_plan_of_a_large_video_allocates_nothing(self) -> None:
        """832 x 480 on the real width of the Wan 2.1 VAE, from a VAE that has no storage either."""
        with torch.device("meta"):
            vae = AutoencoderKLWan()
        planned = decode_state_bytes(vae, 1, 60, 104, torch.bfloat16)
        convolutions_at_full_size = 2 * 3 + 1
        full_size = 2 * 96 * 480 * 832 * 2 * convolutions_at_full_size
        assert full_size < planned < 4 * full_size


class TestEncode:
    @pytest.mark.parametrize("frames", [1, 5, 17])
    def test_equals_the_host(self, vae: AutoencoderKLWan, frames: int) -> None:
        video = make_video(vae, frames, batch=2)
        mean, std = statistics(vae)
        with torch.no_grad():
            expected = (vae.encode(video).latent_dist.mode() - mean) / std
        latents = encode_video(vae, video)
        assert latents.shape == (2, vae.config.z_dim, num_latent_frames(frames, 4), 2, 2)
        torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)

    def test_chunks_agree_with_the_whole(self, vae: AutoencoderKLWan) -> None:
        video = make_video(vae, 17)
        stream = VaeEncodeStream(vae)
        latents = torch.cat([stream.encode(chunk) for chunk in video.split([5, 4, 8], dim=2)], dim=2)
        torch.testing.assert_close(latents, encode_video(vae, video), rtol=0, atol=1e-5)
        assert stream.num_latent_frames == 5

    @pytest.mark.parametrize(("frames", "nearest"), [(80, "77 or 81"), (82, "81 or 85"), (2, "1 or 5"), (4, "1 or 5")])
    def test_wrong_frame_count_names_the_neighbours(self, frames: int, nearest: str) -> None:
        vae = make_vae()
        with pytest.raises(ValueError, match=f"{frames} frames .* use {nearest}"):
            encode_video(vae, make_video(vae, frames))

    @pytest.mark.parametrize(("frames", "nearest"), [(3, "4"), (5, "4 or 8")])
    def test_later_chunks_are_whole_latent_frames(self, frames: int, nearest: str) -> None:
        vae = make_vae()
        stream = VaeEncodeStream(vae)
        stream.encode(make_video(vae, 1))
        with pytest.raises(ValueError, match=rf"{frames} frames .* use {nearest}\."):
            stream.encode(make_video(vae, frames))
        assert stream.encode(make_video(vae, 4)).shape[2] == 1, "a refused chunk changes nothing"

    def test_size_must_fill_whole_latents(self) -> None:
        with pytest.raises(ValueError, match="multiples of 8, got 12 x 16"):
            encode_video(make_vae(), torch.zeros(1, 3, 1, 12, 16))


class TestRefusals:
    @pytest.mark.parametrize("shape", [(1, 16, 2, 2), (1, 15, 3, 2, 2), (1, 16, 0, 2, 2)], ids=str)
    def test_latent_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"latents must be \(batch, 16, frames, height, width\), got"):
            VaeDecodeStream(make_vae()).decode(torch.zeros(shape))

    @pytest.mark.parametrize("shape", [(3, 1, 16, 16), (1, 4, 1, 16, 16), (1, 3, 0, 16, 16)], ids=str)
    def test_video_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"video must be \(batch, 3, frames, height, width\), got"):
            encode_video(make_vae(), torch.zeros(shape))

    @pytest.mark.parametrize("shape", [(2, 16, 3, 2, 2), (1, 16, 3, 2, 4)], ids=str)
    def test_layout_change_within_a_video(self, shape: tuple[int, ...]) -> None:
        stream = VaeDecodeStream(make_vae())
        stream.decode(torch.zeros(1, 16, 3, 2, 2))
        with pytest.raises(ValueError, match=r"began with \(1, 2, 2\) in torch.float32"):
            stream.decode(torch.zeros(shape))
        assert stream.decode(torch.zeros(1, 16, 3, 2, 2)).shape[2] == 12, "a refused chunk changes nothing"

    def test_tiling(self, vae: AutoencoderKLWan) -> None:
        stream, latents, video = VaeDecodeStream(vae), make_latents(vae, 3), make_video(vae, 1)
        vae.enable_tiling()
        for refused in (
            lambda: VaeDecodeStream(vae),
            lambda: stream.decode(latents),
            lambda: encode_video(vae, video),
        ):
            with pytest.raises(NotImplementedError, match=r"tiled.*vae\.disable_tiling\(\)"):
                refused()
        vae.disable_tiling()
        assert stream.decode(latents).shape[2] == 9

    def test_slicing_is_refused_for_batches_only(self) -> None:
        vae = make_vae()
        vae.enable_slicing()
        assert VaeDecodeStream(vae).decode(make_latents(vae, 3)).shape[2] == 9
        with pytest.raises(NotImplementedError, match=r"batch of 2.*vae\.disable_slicing\(\)"):
            VaeDecodeStream(vae).decode(make_latents(vae, 3, batch=2))

    def test_other_vaes(self) -> None:
        image_vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=1)
        for refused in (VaeDecodeStream, VaeEncodeStream, temporal_factor, spatial_factor, check_streamable_vae):
            with pytest.raises(TypeError, match=r"AutoencoderKL cannot be streamed.*decoder\(feat_cache=\.\.\.\)"):
                refused(image_vae)
        with pytest.raises(TypeError, match="Linear cannot be streamed"):
            decode_state_bytes(torch.nn.Linear(1, 1), 1, 2, 2, torch.float32)

    def test_compiled_decoder_is_accepted(self) -> None:
        vae = make_vae()
        vae.decoder = torch.compile(vae.decoder, backend="eager")
        check_streamable_vae(vae)


def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt
