"""Decoders prepared for speed against the plain one: compiled, channels-last, overlapped."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from recorders import GraphWatch, copied_state
from test_light_decoder import make_light
from test_vae_stream import make_latents, make_vae
from tiny_components import PROMPT, QUICK, make_pipeline, seed
from torch._dynamo.utils import counters

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.pipelines import vae_stream
from diffusers_ardiff.pipelines.decode_step import canonical, set_conv_layout
from diffusers_ardiff.pipelines.decoding import DecodeOptions, DecodeStream, Decoding
from diffusers_ardiff.pipelines.overlap import host_frames
from diffusers_ardiff.pipelines.traceable import traceable
from diffusers_ardiff.pipelines.vae_stream import VaeDecodeStream

CPU = torch.device("cpu")
COMPILER = "aot_eager"
"""Traces and guards like the one that users get, without minutes of C++ compilation."""


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def make_decoding(kind: str, **options: bool) -> Decoding:
    if kind == "light":
        made = Decoding(None, make_light(), DecodeOptions(**options), compiler=COMPILER)
        set_conv_layout(made.light, channels_last=made.options.channels_last)
    else:
        made = Decoding(make_vae(kind), None, DecodeOptions(**options), compiler=COMPILER)
        set_conv_layout(made.vae, channels_last=made.options.channels_last)
    return made


def latents_for(made: Decoding, frames: int) -> torch.Tensor:
    if made.light is not None:
        return torch.randn(1, 16, frames, 2, 2, generator=seed(1))
    return make_latents(made.vae, frames)


def decode_all(stream: DecodeStream, latents: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return [stream.decode(part) for part in latents.split(sizes, dim=2)]


@pytest.mark.parametrize(
    ("kind", "sizes", "channels_last"),
    [
        ("wan2.1", [3, 3, 3, 3], False),
        ("wan2.1", [3, 3, 3, 3], True),
        ("wan2.1", [1, 3, 3, 3], False),
        ("wan2.1", [1, 1, 1, 1], True),
        ("wan2.2", [2, 2, 2, 2], True),
        ("light", [3, 3, 3, 3], False),
        ("light", [1, 3, 3, 3], True),
    ],
    ids=str,
)
def test_compiled_is_plain_and_compiles_nothing_in_the_steady_state(
    kind: str, sizes: list[int], channels_last: bool
) -> None:
    """The third chunk compiled again: the strides of the state's single-element dimensions had changed."""
    plain, fast = make_decoding(kind), make_decoding(kind, compile=True, channels_last=channels_last)
    latents = latents_for(plain, sum(sizes))
    expected = decode_all(plain.open(CPU), latents, sizes)
    stream = fast.open(CPU)
    num_warm = 3 if sizes[0] == 1 else 2
    parts = decode_all(stream, latents[:, :, : sum(sizes[:num_warm])], sizes[:num_warm])
    num_graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        parts += decode_all(stream, latents[:, :, sum(sizes[:num_warm]) :], sizes[num_warm:])
        assert stream.state_bytes == plain.state_bytes(2, 2)
        again = decode_all(fast.open(CPU), latents, sizes)
    assert counters["stats"]["unique_graphs"] == num_graphs <= 3
    assert sum(counters["graph_break"].values()) == 0
    for part, same, reference in zip(parts, again, expected, strict=True):
        assert torch.equal(part, same)
        torch.testing.assert_close(part, reference, rtol=0, atol=1e-5)
    assert num_graphs == (3 if kind != "light" else len(set(sizes)))


def dropping_clones(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """A compiler that, like Inductor, takes a clone that changes no layout for nothing."""
    for node in list(module.graph.nodes):
        if node.target == "clone":
            node.replace_all_uses_with(node.args[0])
    module.recompile()
    return module


@pytest.mark.parametrize("kind", ["wan2.1", "light"])
def test_state_holds_no_activations(kind: str) -> None:
    """Inductor dropped the host's clone of a chunk's last two frames, so that the state was views that kept whole
    activations alive: 7.7 GiB at 832x480, and as much again while a chunk was decoded."""
    plain = make_decoding(kind)
    light, vae = plain.light, None if plain.light is not None else plain.vae
    fast = Decoding(vae, light, DecodeOptions(compile=True), compiler=dropping_clones)
    latents = latents_for(plain, 9)
    stream = fast.open(CPU)
    parts = decode_all(stream, latents, [3, 3, 3])
    assert stream.state_bytes == plain.state_bytes(2, 2)
    for part, reference in zip(parts, decode_all(plain.open(CPU), latents, [3, 3, 3]), strict=True):
        torch.testing.assert_close(part, reference, rtol=0, atol=1e-5)


def open_watched(made: Decoding, channels_last: bool) -> tuple[DecodeStream, GraphWatch]:
    """A compiled stream on the models of ``made``, laid out so, and what watches its graphs."""
    set_conv_layout(made.light if made.light is not None else made.vae, channels_last=channels_last)
    watch = GraphWatch()
    options = DecodeOptions(compile=True, channels_last=channels_last)
    return Decoding(made.vae, made.light, options, compiler=watch).open(CPU), watch


def state_of(stream: DecodeStream) -> list[torch.Tensor]:
    entries = stream._cache if isinstance(stream, VaeDecodeStream) else stream._state
    return [entry for entry in entries if isinstance(entry, torch.Tensor)]


@pytest.mark.parametrize("kind", ["wan2.1", "light"])
def test_weights_of_another_layout_compile_anew(kind: str) -> None:
    """After ``set_decoder(compile=True, channels_last=True)``, ``set_decoder(compile=True)`` ran what was compiled for
    channels-last weights, and Inductor failed: "expected size 16==16, stride 27==1". Compiled code is shared by all steps,
    and torch 2.11 looks at no strides of parameters. Streams that are open meet the same."""
    made = make_decoding(kind)
    latents = latents_for(made, 9)
    expected = decode_all(made.open(CPU), latents, [3, 3, 3])
    for channels_last in (True, False):
        stream, _ = open_watched(made, channels_last)
        parts = decode_all(stream, latents[:, :, :6], [3, 3])
        set_conv_layout(made.light if made.light is not None else made.vae, channels_last=not channels_last)
        parts.append(stream.decode(latents[:, :, 6:]))
        for part, reference in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["wan2.1", "light"])
def test_state_is_copied_once(kind: str, channels_last: bool) -> None:
    """The graphs copied the state out of the activations in the layout of these, and then it was copied into the layout of
    the next call, transposed: 136 ms instead of 121 for a chunk at 832x480."""
    made = make_decoding(kind)
    stream, watch = open_watched(made, channels_last)
    for chunk in latents_for(made, 9).split(3, dim=2):
        stream.decode(chunk)
        state = state_of(stream)
        assert len(state) == len(watch.outputs) - 1 > 0
        assert copied_state(watch, state) == []
        assert all(entry.stride() == canonical(entry, channels_last=channels_last).stride() for entry in state)
        assert stream.state_bytes == sum(entry.numel() * entry.element_size() for entry in state)


def test_statistics_are_uploaded_once_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk took pinned memory for them, on the decode stream where that was busy: more each time, and the host may
    wait for the device to get it."""
    vae = make_vae("wan2.1")
    uploads: list[torch.Tensor] = []
    monkeypatch.setattr(vae_stream, "upload", lambda tensor, device: uploads.append(tensor) or tensor.to(device))
    stream = VaeDecodeStream(vae)
    for _ in range(2):
        parts = decode_all(stream, make_latents(vae, 9), [3, 3, 3])
        stream.reset()
    assert len(uploads) == 4
    assert torch.equal(
        torch.cat(parts, dim=2), torch.cat(decode_all(stream.fork(), make_latents(vae, 9), [3, 3, 3]), 2)
    )


@pytest.mark.parametrize("kind", ["wan2.1", "wan2.2", "light"])
def test_channels_last_alone(kind: str) -> None:
    plain, fast = make_decoding(kind), make_decoding(kind, channels_last=True)
    latents = latents_for(plain, 6)
    parts, expected = (decode_all(made.open(CPU), latents, [3, 3]) for made in (fast, plain))
    for part, reference in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 2, 4, 5), (1, 1, 1, 1, 1), (2, 3, 4, 5)])
def test_canonical_strides_depend_on_the_shape_alone(shape: tuple[int, ...], channels_last: bool) -> None:
    plain = torch.randn(shape)
    strided = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    swapped = torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    sliced = torch.randn(shape[0], shape[1] + 3, *shape[2:])[:, 1:-2]
    made = [plain, strided, swapped, sliced]
    if shape[0] == 1:
        made.append(plain.as_strided(shape, (97, *plain.stride()[1:])))
    assert len({tensor.stride() for tensor in made}) > 1
    assert len({canonical(tensor, channels_last=channels_last).stride() for tensor in made}) == 1
    assert all(torch.equal(canonical(tensor, channels_last=channels_last), tensor) for tensor in made)


class TestTraceable:
    """torch 2.11 could not compile the Wan decoder: it compares tensors with strings."""

    @pytest.mark.parametrize("sizes", [[1, 3, 3], [1, 1, 1, 1], [1, 2, 4]], ids=str)
    def test_same_bits_and_no_tensor_is_compared_with_a_string(
        self, sizes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vae = make_vae("wan2.1")
        latents = make_latents(vae, sum(sizes))
        expected = decode_all(VaeDecodeStream(vae), latents, sizes)
        compare = torch.Tensor.__eq__

        def strict(self: torch.Tensor, other: object) -> torch.Tensor:
            assert not isinstance(other, str)
            return compare(self, other)

        monkeypatch.setattr(torch.Tensor, "__eq__", strict)
        monkeypatch.setattr(torch.Tensor, "__ne__", lambda self, other: ~strict(self, other))
        with traceable(vae.decoder):
            found = decode_all(VaeDecodeStream(vae), latents, sizes)
        assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))

    def test_decoder_is_left_as_found(self) -> None:
        decoder = make_vae("wan2.1").decoder
        hooked = next(part for part in decoder.modules() if type(part) is WanResample)
        add_hook_to_module(hooked, ModelHook())
        forwards = [part.forward for part in decoder.modules()]
        with pytest.raises(RuntimeError, match="inside"), traceable(decoder):
            assert hooked.forward is forwards[list(decoder.modules()).index(hooked)]
            raise RuntimeError("inside")
        assert [part.forward for part in decoder.modules()] == forwards


class TestPipeline:
    @pytest.fixture
    def pipe(self) -> ARDiffusionPipeline:
        return make_pipeline(QUICK)

    def test_weights_are_laid_out_in_place_and_back(self, pipe: ARDiffusionPipeline) -> None:
        before = copy.deepcopy(pipe.vae.state_dict())
        strides = {name: value.stride() for name, value in pipe.vae.state_dict().items()}
        plain = pipe(PROMPT, num_frames=21, generator=seed(0), output_type="pt").frames
        pipe.set_decoder(channels_last=True)
        weight = pipe.vae.decoder.conv_in.weight
        assert weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous()
        assert all(torch.equal(value, before[name]) for name, value in pipe.vae.state_dict().items())
        fast = pipe(PROMPT, num_frames=21, generator=seed(0), output_type="pt").frames
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)
        pipe.set_decoder()
        assert {name: value.stride() for name, value in pipe.vae.state_dict().items()} == strides
        assert torch.equal(pipe(PROMPT, num_frames=21, generator=seed(0), output_type="pt").frames, plain)

    def test_warmup_compiles_all_that_a_video_needs(self, pipe: ARDiffusionPipeline) -> None:
        plain = pipe(PROMPT, num_frames=33, generator=seed(0), output_type="pt").frames
        pipe.set_decoder(compile=True)
        pipe._decoding = Decoding(pipe.vae, None, pipe.decoding.options, compiler=COMPILER)
        assert pipe.warmup_decoder() > 0
        assert counters["stats"]["unique_graphs"] == 3
        with torch._dynamo.config.patch(error_on_recompile=True):
            fast = pipe(PROMPT, num_frames=33, generator=seed(0), output_type="pt").frames
            with pipe.stream(PROMPT, num_frames=33, generator=seed(0), output_type="pt") as stream:
                parts = [chunk.frames for chunk in stream]
        assert torch.equal(torch.cat(parts, dim=1), fast)
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)

    def test_warmup_of_the_pipeline_warms_the_decoder_too(self, pipe: ARDiffusionPipeline) -> None:
        """For the same size, chunks and number of videos; not where nothing is decoded, or nothing is to be compiled."""
        warm = {"compile": False, "cuda_graphs": False, "num_videos": 2, "height": 48}
        assert pipe.warmup(**warm).decoder_seconds == 0
        pipe.set_decoder(compile=True)
        pipe._decoding = Decoding(pipe.vae, None, pipe.decoding.options, compiler=COMPILER)
        assert pipe.warmup(**warm, decode=False).decoder_seconds == 0
        assert counters["stats"]["unique_graphs"] == 0
        report = pipe.warmup(**warm)
        assert 0 < report.decoder_seconds < report.total_seconds and "decoder compiled in" in str(report)
        assert counters["stats"]["unique_graphs"] == 3
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert pipe([PROMPT] * 2, num_frames=33, height=48, output_type="pt").frames.shape[1] == 33

    def test_overlap_needs_a_gpu(self, pipe: ARDiffusionPipeline) -> None:
        pipe.set_decoder(overlap=True)
        for use in (pipe, pipe.stream):
            with pytest.raises(ValueError, match=r"overlap=True decodes on a CUDA stream .* the pipeline is on cpu"):
                use(PROMPT, num_frames=9)
        assert pipe(PROMPT, num_frames=9, output_type="latent").frames.shape[2] == 3

    def test_offloaded_vae_is_refused(self) -> None:
        made = make_decoding("wan2.1", overlap=True)
        add_hook_to_module(made.vae, ModelHook())
        with pytest.raises(NotImplementedError, match="overlap=True needs the VAE to stay on the GPU"):
            made.check(torch.device("cuda"), 1)
        made = make_decoding("wan2.1", compile=True)
        made.vae.decoder._diffusers_hook = object()
        with pytest.raises(NotImplementedError, match="group offloading moves part by part"):
            made.check(CPU, 1)

    def test_another_vae_gets_its_own_code(self, pipe: ARDiffusionPipeline) -> None:
        pipe.set_decoder(compile=True)
        first = pipe.decoding
        assert pipe.decoding is first
        pipe.vae = copy.deepcopy(pipe.vae)
        assert pipe.decoding is not first and pipe.decoding.vae is pipe.vae and pipe.decoding.options.compile


@pytest.mark.parametrize("output_type", ["np", "pil"])
def test_host_frames_are_those_of_the_processor(output_type: str) -> None:
    """Overlapped frames reach the host as "pt" and take their form there: the same values."""
    processor = make_pipeline(QUICK).video_processor
    video = torch.rand(2, 3, 5, 16, 24, generator=seed(0)) * 2 - 1
    expected = processor.postprocess_video(video, output_type=output_type)
    made = host_frames(processor, processor.postprocess_video(video, output_type="pt"), output_type)
    if output_type == "np":
        assert np.array_equal(made, expected)
    else:
        pairs = [(a, b) for row, other in zip(made, expected, strict=True) for a, b in zip(row, other, strict=True)]
        assert len(pairs) == 10 and all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
