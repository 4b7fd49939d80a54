"""The light decoder against a plain frame-by-frame reading of the published layout, and as the pipeline's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_components import PROMPT, QUICK, make_pipeline, make_vae, seed
from torch.nn import functional

from diffusers_ardiff import ARDiffusionPipeline, LightDecoder
from diffusers_ardiff.pipelines.light_stream import LightDecodeStream, light_state_bytes

WIDTHS = (12, 8, 6, 4)


def make_light(patch_size: int = 1) -> LightDecoder:
    """Random weights whose pixels are neither black nor white."""
    torch.manual_seed(5)
    decoder = LightDecoder(widths=WIDTHS, patch_size=patch_size).eval().requires_grad_(False)
    for weight in decoder.parameters():
        weight.mul_(1.3)
    decoder.decoder["22"].bias.fill_(0.5)
    return decoder


def make_latents(frames: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 16, frames, 3, 4, generator=seed(1))


def published_state(decoder: LightDecoder) -> dict[str, torch.Tensor]:
    """A file as it is published: the encoder beside the decoder, the first stage stored with two frames."""
    state = {name: value.clone() for name, value in decoder.state_dict().items()}
    unused = torch.randn_like(state["decoder.7.conv.weight"])
    state["decoder.7.conv.weight"] = torch.cat([unused, state["decoder.7.conv.weight"]])
    return state | {"encoder.0.weight": torch.zeros(64, 3, 3, 3)}


@torch.no_grad()
def decode_frame_by_frame(state: dict[str, torch.Tensor], latents: torch.Tensor, patch: int = 1) -> torch.Tensor:
    """One row at a time, layer by layer over lists of frames, straight from the weights' names."""

    def conv(name: str, frame: torch.Tensor) -> torch.Tensor:
        weight = state[f"decoder.{name}.weight"]
        return functional.conv2d(frame, weight, state.get(f"decoder.{name}.bias"), padding=weight.shape[-1] // 2)

    def block(index: int, frame: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([frame, past])
        for part in ("0", "2"):
            hidden = conv(f"{index}.conv.{part}", hidden).relu()
        return (conv(f"{index}.conv.4", hidden) + frame).relu()

    frames = [conv("1", torch.tanh(frame / 3) * 3).relu() for frame in latents.unbind(1)]
    for first, growth in ((3, 1), (9, 2), (15, 2)):
        for index in range(first, first + 3):
            pasts = [torch.zeros_like(frames[0]), *frames[:-1]]
            frames = [block(index, frame, past) for frame, past in zip(frames, pasts, strict=True)]
        frames = [frame.repeat_interleave(2, 1).repeat_interleave(2, 2) for frame in frames]
        frames = [part for frame in frames for part in conv(f"{first + 4}.conv", frame).chunk(growth)]
        frames = [conv(f"{first + 5}", frame) for frame in frames]
    pixels = [functional.pixel_shuffle(conv("22", frame.relu()), patch).clamp(0, 1) for frame in frames]
    return torch.stack(pixels[3:], dim=1) * 2 - 1


def stream_decode(decoder: LightDecoder, latents: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    stream = LightDecodeStream(decoder)
    return [stream.decode(part) for part in latents.split(list(sizes), dim=2)]


@pytest.mark.parametrize("patch_size", [1, 2])
@pytest.mark.parametrize("sizes", [(7,), (3, 3, 1), (1, 3, 3), (1,) * 7], ids=str)
def test_stream_is_the_frame_by_frame_decoder(sizes: Sequence[int], patch_size: int) -> None:
    decoder, latents = make_light(patch_size), make_latents(7, batch=2)
    parts = stream_decode(decoder, latents, sizes)
    assert [part.shape[2] for part in parts] == [4 * sizes[0] - 3, *(4 * size for size in sizes[1:])]
    video = torch.cat(parts, dim=2)
    assert video.shape == (2, 3, 25, 24 * patch_size, 32 * patch_size) and video.dtype == torch.float32
    expected = torch.stack([decode_frame_by_frame(decoder.state_dict(), row, patch_size) for row in latents])
    torch.testing.assert_close(video, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.01 and (expected.abs() < 1).float().mean() > 0.5


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_published_file_loads(tmp_path: Path, suffix: str) -> None:
    """Sizes come from the weights; of a first stage stored with two frames the later one is used."""
    decoder, path = make_light(patch_size=2), tmp_path / f"tae{suffix}"
    state = published_state(decoder)
    if suffix == ".pth":
        torch.save(state, path)
    else:
        from safetensors.torch import save_file

        save_file(state, path)
    loaded = LightDecoder.from_file(path)
    assert (loaded.latent_channels, loaded.patch_size, loaded.widths) == (16, 2, WIDTHS)
    assert (loaded.spatial_factor, loaded.temporal_factor) == (16, 4)
    latents = make_latents(3)
    assert torch.equal(stream_decode(loaded, latents, [3])[0], stream_decode(decoder, latents, [3])[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder.9.conv.2.bias": None}, r"decoder\.9\.conv\.2\.bias is missing"),
        ({"decoder.40.weight": torch.zeros(1)}, r"decoder\.40\.weight is unknown"),
        ({"decoder.15.conv.0.weight": torch.zeros(6, 6, 3, 3)}, r"has shape \(6, 6, 3, 3\), expected \(6, 12, 3, 3\)"),
        ({"decoder.22.weight": torch.zeros(5, 4, 3, 3)}, r"makes 5 channels; allowed are 3 \* patch \*\* 2"),
        ({"decoder.1.weight": None}, r"no decoder of TAEHV's layout: decoder\.1\.weight missing among 63 weights"),
        ({"decoder.13.conv.weight": torch.zeros(8, 8, 1, 1)}, r"expected \(16, 8, 1, 1\)"),
    ],
)
def test_other_weights_are_refused(change: dict[str, torch.Tensor | None], message: str) -> None:
    state = {name: value for name, value in (make_light().state_dict() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        LightDecoder.from_state_dict(state)


def test_state() -> None:
    """Constant from the first chunk on, as planned; forks and other streams have their own past."""
    decoder, latents = make_light(), make_latents(9)
    whole = torch.cat(stream_decode(decoder, latents, [3, 3, 3]), dim=2)
    stream = LightDecodeStream(decoder)
    stream.decode(latents[:, :, :3])
    assert stream.state_bytes == light_state_bytes(decoder, 1, 3, 4) == 3 * 12 * (12 + 4 * 8 + 16 * 6) * 4
    child = stream.fork()
    child.decode(torch.zeros_like(latents[:, :, :3]))
    assert torch.equal(stream.decode(latents[:, :, 3:6]), whole[:, :, 9:21])
    with pytest.raises(ValueError, match=r"it began with \(1, 3, 4\), got \(1, 2, 4\)"):
        stream.decode(latents[:, :, :3, :2])
    assert torch.equal(stream.decode(latents[:, :, 6:]), whole[:, :, 21:])
    stream.reset()
    assert (stream.state_bytes, stream.num_latent_frames) == (0, 0)


class TestPipeline:
    @pytest.fixture
    def pipe(self) -> ARDiffusionPipeline:
        return make_pipeline(QUICK)

    def test_stream_equals_call_and_latents_stay(self, pipe: ARDiffusionPipeline) -> None:
        plain = pipe(PROMPT, num_frames=33, generator=seed(0), output_type="pt").frames
        latents = pipe(PROMPT, num_frames=33, generator=seed(0), output_type="latent").frames
        decoder = make_light()
        pipe.set_decoder(decoder)
        whole = pipe(PROMPT, num_frames=33, generator=seed(0), output_type="pt").frames
        with pipe.stream(PROMPT, num_frames=33, generator=seed(0), output_type="pt") as stream:
            chunks = list(stream)
        assert torch.equal(torch.cat([chunk.frames for chunk in chunks], dim=1), whole)
        assert torch.equal(torch.cat([chunk.latents for chunk in chunks], dim=2), latents)
        expected = decode_frame_by_frame(decoder.state_dict(), latents[0])
        torch.testing.assert_close(whole[0].transpose(0, 1) * 2 - 1, expected[:, :33], rtol=0, atol=1e-5)
        pipe.set_decoder()
        assert torch.equal(pipe(PROMPT, num_frames=33, generator=seed(0), output_type="pt").frames, plain)

    def test_counted_in_the_plan(self, pipe: ARDiffusionPipeline) -> None:
        decoder = make_light()
        pipe.set_decoder(decoder)
        plan = pipe.plan_memory(num_videos=2)
        assert plan.vae_state_bytes == light_state_bytes(decoder, 1, 4, 6)
        with pipe.stream([PROMPT] * 2, output_type="pt") as stream:
            next(stream)
            assert stream.vae_state_bytes == 2 * plan.vae_state_bytes

    def test_needs_no_vae(self) -> None:
        pipe = make_pipeline(QUICK, vae=None)
        with pytest.raises(ValueError, match="a light decoder"):
            pipe(PROMPT, num_frames=9)
        pipe.set_decoder(make_light())
        assert pipe(PROMPT, num_frames=9).frames.shape == (1, 9, 32, 48, 3)

    def test_encodes_given_images_with_the_vae(self, pipe: ARDiffusionPipeline) -> None:
        pipe.set_decoder(make_light())
        image = torch.rand(1, 3, 32, 48, generator=seed(3))
        given = pipe(PROMPT, image=image, num_frames=13, generator=seed(0), output_type="latent").frames[:, :, :1]
        pipe.set_decoder()
        expected = pipe(PROMPT, image=image, num_frames=13, generator=seed(0), output_type="latent").frames[:, :, :1]
        assert torch.equal(given, expected)

    def test_decoders_that_do_not_fit(self, pipe: ARDiffusionPipeline) -> None:
        with pytest.raises(TypeError, match="must be a LightDecoder"):
            pipe.set_decoder(make_vae())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="spatial factor 16 instead of 8"):
            pipe.set_decoder(make_light(patch_size=2))
        with pytest.raises(ValueError, match="latent channels 48 instead of 16"):
            pipe.set_decoder(LightDecoder(48, WIDTHS))
        with pytest.raises(ValueError, match="temporal factor 2 instead of 4"):
            pipe.set_decoder(LightDecoder(16, WIDTHS, (1, 1, 2)))
        assert pipe.decoding.light is None
