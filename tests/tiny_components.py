"""A Wan pipeline of real classes, small enough for a CPU and made without a network. Every call gives the same weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from diffusers_ardiff import ARDiffusionPipeline, Recipe
from diffusers_ardiff.cache import KVManager

WORDS = ("a", "red", "green", "blue", "circle", "square", "moving", "left", "right", "blurry")
PROMPT = "a red circle moving right"
TEXT_LEN = 12
TEXT_DIM = 32
TOKENS_PER_FRAME = 6

RECIPE = Recipe(
    name="test",
    chunk_frames=3,
    num_sink_frames=1,
    num_window_frames=5,
    denoising_steps=(1000, 750, 500, 250),
    shift=5.0,
    height=32,
    width=48,
    num_frames=21,
)
QUICK = RECIPE.replace(name="test-quick", denoising_steps=(1000, 500))
"""Half the steps, where their number is beside the point."""


def make_tokenizer(text_len: int = TEXT_LEN) -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocab["</s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=text_len,
    )


def make_text_encoder() -> UMT5EncoderModel:
    torch.manual_seed(1)
    config = UMT5Config(
        vocab_size=3 + len(WORDS), d_model=TEXT_DIM, d_ff=48, d_kv=8, num_heads=4, num_layers=2, is_gated_act=True
    )
    return UMT5EncoderModel(config).eval()


def make_vae() -> AutoencoderKLWan:
    torch.manual_seed(2)
    return AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()


def make_transformer(**overrides: Any) -> WanTransformer3DModel:
    torch.manual_seed(3)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": TEXT_DIM,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return WanTransformer3DModel(**config | overrides).eval()


def make_components(**overrides: Any) -> dict[str, Any]:
    """Arguments of ``ARDiffusionPipeline`` but its recipe."""
    made = {
        "tokenizer": make_tokenizer,
        "text_encoder": make_text_encoder,
        "vae": make_vae,
        "scheduler": lambda: FlowMatchEulerDiscreteScheduler(shift=5.0),
        "transformer": make_transformer,
    }
    return {name: overrides[name] if name in overrides else make() for name, make in made.items()}


def make_pipeline(recipe: Recipe = RECIPE, **components: Any) -> ARDiffusionPipeline:
    """The pipeline with its components, some of them replaced by name."""
    pipe = ARDiffusionPipeline(**make_components(**components), recipe=recipe)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents_of(pipe: ARDiffusionPipeline, prompt: Any = PROMPT, **call: Any) -> torch.Tensor:
    """Latents of a short call, from seed 0 unless told otherwise."""
    call = {"num_frames": 21, "generator": seed(0), "recipe": QUICK} | call
    return pipe(prompt, output_type="latent", **call).frames


def seed(value: int) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def random_embeds(value: int, *, rows: int = 1, text_len: int = TEXT_LEN) -> torch.Tensor:
    """Prompt embeddings large enough that a change of text is a change of video."""
    return torch.randn(rows, text_len, TEXT_DIM, generator=seed(value))


@dataclass
class Forwards:
    """What a transformer was called with, forward by forward."""

    timesteps: list[float] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.timesteps)


@contextmanager
def record_forwards(transformer: WanTransformer3DModel) -> Iterator[Forwards]:
    """Record timestep and latents of every forward of the whole transformer."""
    seen = Forwards()

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        assert (kwargs["timestep"] == kwargs["timestep"][0]).all()
        seen.timesteps.append(kwargs["timestep"][0].item())
        seen.inputs.append(kwargs["hidden_states"].clone())

    handle = transformer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def record_pools() -> Iterator[list[weakref.ref[KVManager]]]:
    """Weak references to every K/V pool that is allocated."""
    made: list[weakref.ref[KVManager]] = []
    build = KVManager.__init__

    def note(manager: KVManager, *args: Any, **kwargs: Any) -> None:
        build(manager, *args, **kwargs)
        made.append(weakref.ref(manager))

    with patch.object(KVManager, "__init__", note):
        yield made


@contextmanager
def failing(module: torch.nn.Module, error: BaseException, *, after: int = 0) -> Iterator[None]:
    """Let the calls of a module through ``after`` times, then raise."""
    calls = 0

    def fail(*_args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def host_state(transformer: WanTransformer3DModel) -> list[int]:
    """Identities of everything that paged attention swaps."""
    swapped = [transformer.rope]
    for block in transformer.blocks:
        swapped += [block.attn1.processor, block.attn2.processor]
    return [id(item) for item in swapped]


def pool_pages(manager: KVManager) -> list[tuple[int, ...]]:
    """Page ids of every branch of every open session."""
    return [tuple(branch.run.pages) for session in manager.sessions for branch in session.branches]


def committed_keys(manager: KVManager, layer: int, frames: Sequence[int], branch: str = "positive") -> torch.Tensor:
    """Keys of latent frames in the first session, by their storage index: valid until the window wraps."""
    run = manager.sessions[0].branch(branch).run
    tokens = torch.cat([torch.arange(f * TOKENS_PER_FRAME, (f + 1) * TOKENS_PER_FRAME) for f in frames])
    return manager.storage.key_pools[layer][manager.storage.slots(tokens, run)].clone()
