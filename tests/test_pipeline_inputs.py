"""Bad arguments: the message says what was given and what is allowed, and nothing has run or been allocated. Prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_components import (
    PROMPT,
    QUICK,
    TEXT_DIM,
    TEXT_LEN,
    latents_of,
    make_pipeline,
    make_tokenizer,
    make_transformer,
    random_embeds,
    record_forwards,
    record_pools,
    seed,
)

from diffusers_ardiff import ARDiffusionPipeline, PromptSwitch
from diffusers_ardiff.pipelines.text import encode_text

EMBEDS = random_embeds(1)
VIDEO = torch.rand(1, 9, 3, 32, 48)
LATENTS = torch.randn(1, 16, 3, 4, 6)


@pytest.fixture
def untouched(pipe: ARDiffusionPipeline) -> Iterator[None]:
    """No pool was allocated and no transformer forward ran in the test."""
    with record_forwards(pipe.transformer) as forwards, record_pools() as pools:
        yield
    assert (len(forwards), len(pools)) == (0, 0)


BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no prompt": ({"prompt": None}, ValueError, "give either `prompt` or `prompt_embeds`, exactly one"),
    "empty list": ({"prompt": []}, ValueError, "`prompt` is an empty list"),
    "both": ({"prompt_embeds": EMBEDS}, ValueError, "give either `prompt` or `prompt_embeds`, exactly one"),
    "number": ({"prompt": 3}, TypeError, "must be a string or a list of strings, got 3"),
    "list of numbers": ({"prompt": ["a", 3]}, TypeError, "must be a string or a list of strings"),
    "embeds rank": ({"prompt": None, "prompt_embeds": EMBEDS[0]}, ValueError, r"\(prompts, text_len, text_dim\), got"),
    "no embeds": ({"prompt": None, "prompt_embeds": EMBEDS[:0]}, ValueError, r"got \(0, 12, 32\)"),
    "both negative": (
        {"negative_prompt": "a", "negative_prompt_embeds": EMBEDS, "guidance_scale": 3.0},
        ValueError,
        "give either `negative_prompt`",
    ),
    "negative count": (
        {"negative_prompt": ["a", "red"], "guidance_scale": 3.0},
        ValueError,
        "`negative_prompt` has 2 prompts for 1 videos",
    ),
    "height": ({"height": 40}, ValueError, "height must be a multiple of 16, got 40; the nearest are 32 and 48"),
    "width": ({"width": 100}, ValueError, "width must be a multiple of 16, got 100; the nearest are 96 and 112"),
    "height 0": ({"height": 0}, ValueError, "height must be a whole number >= 16, got 0"),
    "width 0": ({"width": 0}, ValueError, "width must be a whole number >= 16, got 0"),
    "float height": ({"height": 32.0}, ValueError, "height must be a whole number"),
    "output type": ({"output_type": "mp4"}, ValueError, r"one of \['np', 'pt', 'pil', 'latent'\], got 'mp4'"),
    "callback tensor": (
        {"callback_on_step_end_tensor_inputs": ["latents", "noise"]},
        ValueError,
        r"has to be in \['latents', 'prompt_embeds', 'negative_prompt_embeds'\], but found \['noise'\]",
    ),
    "generators": ({"generator": [seed(0), seed(1)]}, ValueError, "list of 2 generators was given for 1 videos"),
    "generators of another kind": ({"generator": [0]}, TypeError, r"torch\.Generator or a list of them, got \[0\]"),
    "no videos": (
        {"num_videos_per_prompt": 0},
        ValueError,
        "num_videos_per_prompt must be a whole number >= 1, got 0",
    ),
    "half a video": ({"num_videos_per_prompt": 1.5}, ValueError, "num_videos_per_prompt must be a whole number"),
    "text length": ({"max_sequence_length": 0}, ValueError, "max_sequence_length must be a whole number >= 1, got 0"),
    "noise frames": (
        {"latents": LATENTS},
        ValueError,
        r"= \(1, 16, 6, 4, 6\), got \(1, 16, 3, 4, 6\).*Whole chunks are generated",
    ),
    "noise rows": ({"latents": torch.randn(2, 16, 6, 4, 6)}, ValueError, r"= \(1, 16, 6, 4, 6\), got \(2, 16"),
    "two sources": ({"image": VIDEO[0], "video": VIDEO}, ValueError, r"at most one of .* got \['image', 'video'\]"),
    "6 frames": ({"video": VIDEO[:, :6]}, ValueError, r"1 \+ 4 \* n frames, got 6; use 5 or 9"),
    "all given": (
        {"video": VIDEO, "num_frames": 9},
        ValueError,
        r"num_frames=9 \(3 latent frames\) includes the given .* which has 3 latent frames",
    ),
    "image only": ({"image": VIDEO[:, 0], "num_frames": 1}, ValueError, "ask for more frames"),
    "context rank": ({"context_latents": LATENTS[0]}, ValueError, r"\(videos or 1, channels, frames, height, width\)"),
    "context size": (
        {"context_latents": LATENTS[..., :4]},
        ValueError,
        r"\(1 or 1, 16, 3, 4, 6\), got \(1, 16, 3, 4, 4\)",
    ),
    "guidance nan": (
        {"guidance_scale": float("nan")},
        ValueError,
        "guidance_scale must be a finite number >= 0, got nan",
    ),
    "guidance below 0": ({"guidance_scale": -1.0}, ValueError, "finite number >= 0, got -1.0"),
    "text width": (
        {"prompt": None, "prompt_embeds": EMBEDS[..., :31]},
        ValueError,
        r"`prompt_embeds` must be \(prompts, text_len, 32\) for this transformer, got \(1, 12, 31\)",
    ),
    "negative text width": (
        {"negative_prompt_embeds": EMBEDS[..., :31], "guidance_scale": 3.0},
        ValueError,
        "`negative_prompt_embeds` must be",
    ),
    "switch text width": (
        {"prompt_schedule": [PromptSwitch(latent_frame=3, prompt_embeds=EMBEDS[..., :31])]},
        ValueError,
        "prompt switch at latent frame 3` must be",
    ),
    "step noise chunks": (
        {"step_noise": torch.randn(1, 1, 1, 16, 3, 4, 6)},
        ValueError,
        r"at least \(2, 1\) chunks and steps of \(1, 16, 3, 4, 6\), got \(1, 1, 1, 16, 3",
    ),
    "step noise size": ({"step_noise": torch.randn(2, 1, 1, 16, 4, 4, 6)}, ValueError, "`step_noise` must be"),
    "step noise list": ({"step_noise": [0.0]}, TypeError, "must be a tensor or a function, got list"),
    "cache": ({"cache": 10**9}, TypeError, r"`cache` must be CacheOptions.*create_cache\(\), got 1000000000"),
    "image file": ({"image": "cat.png"}, TypeError, r"`image` must be PIL images.*got 'cat.png'.*PIL\.Image\.open"),
    "no image": ({"image": []}, ValueError, "`image` is an empty list"),
    "image of bytes": (
        {"image": np.full((32, 48, 3), 255, np.uint8)},
        ValueError,
        r"`image` must be .*floats in \[0, 1\], got uint8\. Divide by 255",
    ),
    "video of bytes": ({"video": [np.zeros((32, 48, 3), np.uint8)] * 5}, ValueError, "`video` must be .*got uint8"),
    "image up to 255": ({"image": VIDEO[:, 0] * 255}, ValueError, r"`image` must be .*got -?\d.*\.\. 25[45]"),
    "image nan": ({"image": VIDEO[:, 0] * float("nan")}, ValueError, r"`image` must be .*got nan"),
    "image with alpha": ({"image": Image.new("RGBA", (48, 32))}, ValueError, r"3 channels .*got 4.*convert\('RGB'\)"),
    "grey image": ({"image": Image.new("L", (48, 32))}, ValueError, "`image` must have 3 channels"),
    "video with alpha": ({"video": [Image.new("RGBA", (48, 32))] * 5}, ValueError, "`video` must have 3 channels"),
    "noise list": ({"latents": [1.0]}, TypeError, r"`latents` must be a tensor, got \[1.0\]"),
    "embeds list": ({"prompt": None, "prompt_embeds": [1.0]}, TypeError, "`prompt_embeds` must be a tensor"),
    "context list": ({"context_latents": [1.0]}, TypeError, "`context_latents` must be a tensor"),
    "one switch": (
        {"prompt_schedule": PromptSwitch(latent_frame=3, prompt="a")},
        ValueError,
        "prompt_schedule takes a list of PromptSwitch objects, got PromptSwitch",
    ),
    "callback": ({"callback_on_step_end": 3}, TypeError, "callback_on_step_end must be a function, got 3"),
    "callback tensors as a word": (
        {"callback_on_step_end_tensor_inputs": "latents"},
        ValueError,
        r"has to be in \['latents', .*but found \['latents'\]",
    ),
    "steps": ({"num_inference_steps": 50}, TypeError, r"'num_inference_steps'; .*denoising_steps="),
    "misspelt": ({"num_frame": 9}, TypeError, "'num_frame'; did you mean 'num_frames'"),
    "recipe": ({"recipe": "sora"}, ValueError, "unknown recipe 'sora': known are .*'longlive'"),
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("way", ["call", "stream"])
@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_argument(
    pipe: ARDiffusionPipeline, call: dict[str, Any], error: type[Exception], message: str, way: str
) -> None:
    arguments = {"prompt": PROMPT, "num_frames": 21, "output_type": "latent"} | call
    with pytest.raises(error, match=message):
        (pipe if way == "call" else pipe.stream)(**arguments)


def test_unknown_argument_of_a_stream(pipe: ARDiffusionPipeline) -> None:
    """The error spoke of a class that no user has heard of."""
    with pytest.raises(
        TypeError, match=r"^stream\(\) got an unexpected argument 'num_frame'; did you mean 'num_frames'"
    ):
        pipe.stream(PROMPT, num_frame=9)
    with pytest.raises(TypeError, match=r"^astream\(\) .* 'steps_per_video'; known: .*num_frames, .*generator"):
        pipe.astream(PROMPT, steps_per_video=50)


@pytest.mark.usefixtures("untouched")
def test_endless_stream_with_noise_of_another_rank(pipe: ARDiffusionPipeline) -> None:
    """Its frames were counted before its rank was: an IndexError."""
    with pytest.raises(ValueError, match=r"= \(1, 16, any, 4, 6\), got \(4, 6\)"):
        pipe.stream(PROMPT, latents=torch.randn(4, 6))


@pytest.mark.usefixtures("untouched")
def test_endless_stream_whose_given_frames_fill_the_history(pipe: ARDiffusionPipeline) -> None:
    """An endless call over full history was not checked at all, and failed in a commit."""
    recipe = QUICK.replace(num_sink_frames=0, num_window_frames=None, max_latent_frames=6)
    with pytest.raises(ValueError, match="full history of at most 6"):
        pipe.stream(PROMPT, context_latents=torch.randn(1, 16, 6, 4, 6), recipe=recipe)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("call", [{}, {"output_type": "latent", "image": VIDEO[:, 0].expand(2, -1, -1, -1)}])
def test_sliced_vae(pipe: ARDiffusionPipeline, call: dict[str, Any]) -> None:
    """Slicing was refused by the first chunk's decoder, after the pool and all the steps."""
    pipe.vae.enable_slicing()
    try:
        with pytest.raises(NotImplementedError, match="sliced VAE"):
            pipe([PROMPT, PROMPT], num_frames=9, **call)
    finally:
        pipe.vae.disable_slicing()


def test_tuple_of_generators(pipe: ARDiffusionPipeline) -> None:
    """A tuple passed the checks and failed at the first draw."""
    have, want = (latents_of(pipe, [PROMPT, "blue"], generator=kind([seed(0), seed(1)])) for kind in (tuple, list))
    assert torch.equal(have, want)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"transformer": {"in_channels": 36}}, "36 input and 16 output channels .* is not supported"),
        ({"transformer": {"in_channels": 12, "out_channels": 12}}, "12 latent channels and the VAE 16"),
        ({"transformer": {"patch_size": (2, 2, 2)}}, "patches span 2 latent frames is not supported"),
    ],
    ids=["image model", "VAE of another model", "temporal patch"],
)
def test_model_that_is_not_supported(parts: dict[str, Any], message: str) -> None:
    """The first forward failed inside the transformer, after the pool had been allocated."""
    pipe = make_pipeline(QUICK, **{name: make_transformer(**config) for name, config in parts.items()})
    with record_pools() as pools, pytest.raises(ValueError, match=message):
        pipe(PROMPT, num_frames=9)
    assert not pools
    with pytest.raises(ValueError, match=message):
        pipe.plan_memory()


class TestMissingComponents:
    """A pipeline may be made of its transformer alone; what it then cannot do is said at once, not by a NoneType."""

    @pytest.mark.parametrize(
        ("parts", "call", "missing"),
        [
            (("vae",), {"output_type": "np"}, r"\['vae'\]"),
            (("vae",), {"image": VIDEO[:, 0], "output_type": "latent"}, r"\['vae'\]"),
            (("text_encoder", "tokenizer"), {}, r"\['tokenizer', 'text_encoder'\]"),
            (("transformer",), {}, r"\['transformer'\]"),
            (
                ("text_encoder", "tokenizer"),
                {"prompt": None, "prompt_embeds": EMBEDS, "guidance_scale": 3.0},
                r"\['tokenizer', 'text_encoder'\]",
            ),
            (
                ("text_encoder", "tokenizer"),
                {
                    "prompt": None,
                    "prompt_embeds": EMBEDS,
                    "prompt_schedule": [PromptSwitch(latent_frame=3, prompt="blue")],
                },
                r"\['tokenizer', 'text_encoder'\]",
            ),
        ],
        ids=["decode", "encode", "text", "transformer", "negative text", "text of a switch"],
    )
    def test_refused(self, parts: tuple[str, ...], call: dict[str, Any], missing: str) -> None:
        pipe = make_pipeline(QUICK, **dict.fromkeys(parts))
        with pytest.raises(ValueError, match=f"this call needs {missing}, which the pipeline was made without"):
            pipe(**{"prompt": PROMPT, "num_frames": 9, "output_type": "latent"} | call)

    def test_transformer_alone_is_enough_for_latents(self, pipe: ARDiffusionPipeline) -> None:
        alone = make_pipeline(QUICK, vae=None, text_encoder=None, tokenizer=None)
        call = {"prompt_embeds": EMBEDS, "negative_prompt_embeds": random_embeds(2), "guidance_scale": 3.0}
        assert torch.equal(latents_of(alone, None, **call), latents_of(pipe, None, **call))

    def test_encoder_alone_is_enough_for_text(self, pipe: ARDiffusionPipeline) -> None:
        alone = make_pipeline(QUICK, vae=None, transformer=None)
        for have, want in zip(alone.encode_prompt(PROMPT), pipe.encode_prompt(PROMPT), strict=True):
            assert torch.equal(have, want)

    def test_two_experts(self, pipe: ARDiffusionPipeline) -> None:
        with pytest.raises(ValueError, match="two experts"):
            ARDiffusionPipeline(**pipe.components | {"transformer_2": pipe.transformer})


class TestEncodePrompt:
    def test_rows_behind_the_prompt_are_zero(self, pipe: ARDiffusionPipeline) -> None:
        """Padding rows leaked into the conditioning."""
        embeds, _ = pipe.encode_prompt(["a red circle", "blue"])
        assert embeds.shape == (2, TEXT_LEN, TEXT_DIM)
        for row, num_tokens in enumerate((4, 2)):
            assert (embeds[row, :num_tokens] != 0).any(dim=-1).all(), "words and the end token"
            assert (embeds[row, num_tokens:] == 0).all()

    def test_padding_does_not_change_the_prompt(self, pipe: ARDiffusionPipeline) -> None:
        short, long = (pipe.encode_prompt(PROMPT, max_sequence_length=n)[0] for n in (TEXT_LEN, 20))
        assert long.shape[1] == 20
        torch.testing.assert_close(long[:, :TEXT_LEN], short, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(("limit", "expected"), [(12, 12), (300, 300), (654, 512), (int(1e30), 512)])
    def test_default_length(self, limit: int, expected: int) -> None:
        """The length was a literal; it is the tokenizer's own limit, at most 512."""
        pipe = make_pipeline(QUICK, tokenizer=make_tokenizer(limit))
        assert pipe.encode_prompt("blue")[0].shape[1] == expected
        assert pipe.plan_memory().text_bytes == 2 * 2 * expected * 2 * 12 * 4

    def test_cut_prompts_are_told(self, pipe: ARDiffusionPipeline, caplog: pytest.LogCaptureFixture) -> None:
        """The end of a prompt that is longer than the text window was dropped without a word."""
        fits, too_long = " ".join(["red"] * (TEXT_LEN - 1)), " ".join([*["red"] * (TEXT_LEN - 1), "blue", "circle"])
        pipe.encode_prompt([fits, PROMPT])
        assert not caplog.records
        pipe.encode_prompt([fits, too_long])
        (record,) = caplog.records
        assert "14 tokens and 12 fit" in record.getMessage() and "'blue circle'" in record.getMessage()

    def test_non_finite_padding(self, pipe: ARDiffusionPipeline) -> None:
        """Zero times NaN is NaN: a padding row that overflows in the encoder must still be zero."""

        def overflow(_module: Any, _args: Any, output: Any) -> Any:
            output.last_hidden_state[:, 4:] = float("nan")
            return output

        handle = pipe.text_encoder.register_forward_hook(overflow)
        embeds = encode_text(pipe.tokenizer, pipe.text_encoder, ["a red circle"], TEXT_LEN, torch.device("cpu"))
        handle.remove()
        assert embeds.isfinite().all()

    def test_isolated_embeddings_give_the_same_video(self, pipe: ARDiffusionPipeline) -> None:
        positive, negative = pipe.encode_prompt(PROMPT, "blurry")
        assert positive.shape == negative.shape
        from_embeds = latents_of(
            pipe, None, prompt_embeds=positive, negative_prompt_embeds=negative, guidance_scale=3.0
        )
        assert torch.equal(from_embeds, latents_of(pipe, negative_prompt="blurry", guidance_scale=3.0))

    def test_guidance_off(self, pipe: ARDiffusionPipeline) -> None:
        assert pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False)[1] is None

    def test_rows_per_video(self, pipe: ARDiffusionPipeline) -> None:
        positive, negative = pipe.encode_prompt(["a", "red"], "blurry", num_videos_per_prompt=2)
        assert positive.shape[0] == negative.shape[0] == 4
        assert torch.equal(positive[0], positive[1]) and not torch.equal(positive[1], positive[2])
        assert (negative == negative[0]).all()

    def test_one_negative_prompt_each(self, pipe: ARDiffusionPipeline) -> None:
        call = {"guidance_scale": 3.0, "generator": [seed(0), seed(0)]}
        both = latents_of(pipe, [PROMPT, PROMPT], negative_prompt=["blurry", "green"], **call)
        assert not torch.equal(both[0], both[1])


class TestOutputTypes:
    def test_np_pt_and_pil_hold_the_same_video(self, pipe: ARDiffusionPipeline) -> None:
        arrays, tensors, images = (
            pipe(PROMPT, num_frames=9, generator=seed(0), output_type=kind).frames for kind in ("np", "pt", "pil")
        )
        assert np.array_equal(arrays, tensors.permute(0, 1, 3, 4, 2).numpy())
        assert [image.size for image in images[0]] == [(48, 32)] * 9
        assert np.abs(np.asarray(images[0][4]) / 255 - arrays[0, 4]).max() <= 0.5 / 255 + 1e-6

    def test_two_videos_of_images(self, pipe: ARDiffusionPipeline) -> None:
        frames = pipe([PROMPT, "blue"], num_frames=13, output_type="pil").frames
        assert [len(video) for video in frames] == [13, 13]
