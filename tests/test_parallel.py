"""Several processes make one video: the same noise bit by bit and the same latents as one, each with its share of the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.commands.config import default_config_file
from accelerate.commands.config.config_args import ClusterConfig
from diffusers import ContextParallelConfig
from PIL import Image
from ranks import run_ranks
from tiny_components import PROMPT, RECIPE, failing, host_state, make_pipeline, make_transformer, random_embeds, seed
from tiny_wan import PagedRun, latents_of, text_of, tiny_transformer

from diffusers_ardiff import ARDiffusionPipeline, PromptSwitch
from diffusers_ardiff.parallel import (
    HeadExchange,
    ParallelLayout,
    TokenSharding,
    asked_processes,
    check_launch,
    legal_degrees,
)
from diffusers_ardiff.parallel.groups import digest
from diffusers_ardiff.pipelines.steps import NoiseSource

ODD = RECIPE.replace(name="odd", height=48, width=80, denoising_steps=(1000, 500))
"""15 tokens a frame: 45 a chunk, which two ranks can't share evenly."""
EVEN = RECIPE.replace(name="even", denoising_steps=(1000, 500))
NUM_FRAMES = 57  # 15 latents: five chunks of 3, a window of 1 + 5
ULYSSES = {"ulysses_degree": 2}
GUIDANCE = {"guidance_parallel": True}
BOTH = {"ulysses_degree": 2, "guidance_parallel": True}


@contextmanager
def record_noise() -> Iterator[list[torch.Tensor]]:
    """Every noise that is drawn."""
    drawn: list[torch.Tensor] = []
    draw = NoiseSource._draw

    def noted(source: NoiseSource, shape: tuple[int, ...]) -> torch.Tensor:
        drawn.append(draw(source, shape))
        return drawn[-1]

    with patch.object(NoiseSource, "_draw", noted):
        yield drawn


def pipeline(parallel: dict[str, Any] | None, recipe: Any = ODD, **components: Any) -> ARDiffusionPipeline:
    pipe = make_pipeline(recipe, **components)
    if parallel is not None:
        pipe.enable_parallelism(**parallel)
    return pipe


def make_video(rank: int, parallel: dict[str, Any] | None, call: dict[str, Any]) -> tuple[torch.Tensor, list]:
    """Latents and noise of one call with guidance, a prompt switch on the way."""
    pipe, call = pipeline(parallel, call.pop("recipe", ODD)), dict(call)
    length = call.pop("text_len", 512)
    call = {
        "prompt_embeds": random_embeds(1, text_len=length),
        "negative_prompt_embeds": random_embeds(2, text_len=length),
        "guidance_scale": 3.0,
        "num_frames": NUM_FRAMES,
        "generator": seed(0),
        "prompt_schedule": [
            PromptSwitch(latent_frame=6, prompt_embeds=random_embeds(3, text_len=length), mode="recache")
        ],
    } | call
    with record_noise() as noise:
        return pipe(output_type="latent", **call).frames, noise


def check_equal(ranks: list[tuple[torch.Tensor, list]], alone: tuple[torch.Tensor, list]) -> None:
    latents, noise = alone
    assert len(noise) > 0
    for theirs, drawn in ranks:
        assert len(drawn) == len(noise) and all(map(torch.equal, drawn, noise))
        assert (theirs - latents).norm() <= 1e-4 * latents.norm()
        assert torch.equal(theirs, ranks[0][0])


# -- the same video -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "num_ranks"), [(ULYSSES, 2), (GUIDANCE, 2), (BOTH, 4)], ids=["ulysses", "guidance", "both"]
)
@pytest.mark.parametrize("text_len", [512, 769])
@pytest.mark.parametrize("starts_with_image", [False, True], ids=["text", "image"])
def test_ranks_make_the_video_of_one(
    tmp_path: Path, parallel: dict[str, Any], num_ranks: int, text_len: int, starts_with_image: bool
) -> None:
    """Five chunks through fill and overwrite, with guidance and a recache; 45 tokens a chunk."""
    call: dict[str, Any] = {"text_len": text_len}
    if starts_with_image:
        pixels = np.random.default_rng(0).integers(0, 255, (48, 80, 3), dtype=np.uint8)
        call |= {"image": Image.fromarray(pixels), "num_frames": NUM_FRAMES + 4}
    alone = make_video(0, None, call)
    assert alone[0].shape[2] == (16 if starts_with_image else 15)
    check_equal(run_ranks(num_ranks, tmp_path, make_video, parallel, call), alone)


@pytest.mark.parametrize(
    "call",
    [
        {"guidance_scale": 1.0, "negative_prompt_embeds": None, "merge_commits": True},
        {"prompt_embeds": random_embeds(4, rows=2, text_len=512), "generator": [seed(1), seed(2)]},
        {
            "prompt_schedule": [
                PromptSwitch(latent_frame=6, prompt_embeds=random_embeds(3, text_len=512), mode="flush")
            ]
        },
        {"recipe": EVEN},
    ],
    ids=["merged commits", "two videos", "flush", "tokens that divide"],
)
def test_other_calls_on_two_ranks(tmp_path: Path, call: dict[str, Any]) -> None:
    check_equal(run_ranks(2, tmp_path, make_video, ULYSSES, dict(call)), make_video(0, None, dict(call)))


def compiled_video(rank: int, parallel: dict[str, Any] | None) -> tuple[torch.Tensor, list]:
    pipe = pipeline(parallel)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="aot_eager")
    call = {"prompt_embeds": random_embeds(1, text_len=7), "num_frames": 33, "generator": seed(0)}
    with record_noise() as noise:
        return pipe(output_type="latent", **call).frames, noise


def test_compiled_blocks_on_two_ranks(tmp_path: Path) -> None:
    """The exchange is part of one full graph, and changes no number."""
    check_equal(run_ranks(2, tmp_path, compiled_video, ULYSSES), compiled_video(0, None))


def guidance_off_on_the_way(rank: int, parallel: dict[str, Any] | None) -> tuple[torch.Tensor, list]:
    def turn_off(pipe: Any, step: int, timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = 1.0 if step >= 3 else 3.0
        return {}

    return make_video(rank, parallel, {"callback_on_step_end": turn_off})


def test_guidance_off_on_the_way(tmp_path: Path) -> None:
    """The positive rank's prediction reaches the other one, whose branch goes on committing."""
    check_equal(run_ranks(2, tmp_path, guidance_off_on_the_way, GUIDANCE), guidance_off_on_the_way(0, None))


def events(rank: int, parallel: dict[str, Any] | None) -> tuple[torch.Tensor, list]:
    pipe, latents = pipeline(parallel), []
    with (
        record_noise() as noise,
        pipe.stream(PROMPT, num_frames=33, generator=seed(0), output_type="latent") as stream,
    ):
        for index, chunk in enumerate(stream):
            latents.append(chunk.latents)
            if index == 0 and rank == 0:
                assert stream.update("a blue square", mode="recache")
            elif index == 0:
                with pytest.raises(ValueError, match="first rank"):
                    stream.update("a blue square", mode="recache")
    assert chunk.last_event_id is not None
    return torch.cat(latents, dim=2), noise


def test_events_of_the_first_rank_reach_all(tmp_path: Path) -> None:
    check_equal(run_ranks(2, tmp_path, events, ULYSSES), events(0, None))


def unseeded(rank: int, parallel: dict[str, Any]) -> tuple[torch.Tensor, list]:
    pipe = pipeline(parallel)
    torch.manual_seed(rank)  # what differs between processes that nobody seeded
    with record_noise() as noise:
        return pipe(PROMPT, num_frames=21, output_type="latent").frames, noise


def test_noise_is_one_without_a_generator(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, unseeded, ULYSSES)
    check_equal([second], first)


# -- memory and traffic ---------------------------------------------------------------------------------------------


def pool_of(rank: int, parallel: dict[str, Any]) -> tuple[int, int, int, int]:
    pipe = pipeline(parallel)
    plan, manager = pipe.plan_memory(guided=True), pipe.create_cache(guided=True)
    return plan.pool_bytes, manager.storage.num_bytes, plan.text_bytes, manager.storage.shape.num_heads


@pytest.mark.parametrize(("parallel", "num_ranks", "share"), [(ULYSSES, 2, 2), (GUIDANCE, 2, 2), (BOTH, 4, 4)])
def test_each_rank_holds_its_share(tmp_path: Path, parallel: dict[str, Any], num_ranks: int, share: int) -> None:
    whole = pipeline(None).plan_memory(guided=True)
    degree = parallel.get("ulysses_degree", 1)
    for planned, allocated, text, heads in run_ranks(num_ranks, tmp_path, pool_of, parallel):
        assert planned == allocated == whole.pool_bytes // share
        assert text == whole.text_bytes * degree // share  # text K/V are local: all heads of the branches held
        assert heads == 2 // degree


def traffic(rank: int, parallel: dict[str, Any]) -> list[tuple[int, int]]:
    """(elements sent by this rank in an exchange, forwards begun by then)."""
    pipe, sent, forwards = pipeline(parallel), [], []
    pipe.transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    exchange = dist.all_to_all_single

    def noted(out: torch.Tensor, rows: torch.Tensor, **options: Any) -> Any:
        sent.append((rows.numel(), len(forwards)))
        return exchange(out, rows, **options)

    with patch.object(dist, "all_to_all_single", noted):
        pipe(PROMPT, num_frames=NUM_FRAMES, generator=seed(0), output_type="latent")
    return sent


def test_only_the_new_chunk_travels(tmp_path: Path) -> None:
    """One exchange each way a layer, of the same size in the first forward and with a full window."""
    for sent in run_ranks(2, tmp_path, traffic, ULYSSES):
        num_forwards = sent[-1][1]
        assert num_forwards == 5 * 2 + 4
        share = 23 * 2 * 12  # tokens, heads, head size
        assert [size for size, _ in sent] == [3 * share, share] * 2 * num_forwards


def leaves_as_found(rank: int, parallel: dict[str, Any]) -> bool:
    pipe = pipeline(parallel)
    before, hooks = host_state(pipe.transformer), len(pipe.transformer.patch_embedding._forward_hooks)
    pipe(PROMPT, num_frames=9, generator=seed(0), output_type="latent")
    same = before == host_state(pipe.transformer)
    return same and hooks == len(pipe.transformer.patch_embedding._forward_hooks) == 0


def test_the_host_is_left_as_found(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, leaves_as_found, ULYSSES) == [True, True]


def off_again(rank: int) -> tuple[torch.Tensor, list]:
    pipe = pipeline(ULYSSES)
    call = {"prompt_embeds": random_embeds(1, text_len=7), "num_frames": 21, "output_type": "latent"}
    pipe(generator=seed(0), **call)
    pipe.disable_parallelism()
    assert pipe.parallel_layout == ParallelLayout()
    with record_noise() as noise:
        return pipe(generator=seed(0), **call).frames, noise


def test_parallelism_can_be_switched_off(tmp_path: Path) -> None:
    pipe = pipeline(None)
    call = {"prompt_embeds": random_embeds(1, text_len=7), "num_frames": 21, "output_type": "latent"}
    with record_noise() as noise:
        alone = pipe(generator=seed(0), **call).frames
    check_equal(run_ranks(2, tmp_path, off_again), (alone, noise))


# -- refusals -------------------------------------------------------------------------------------------------------


def refused(rank: int, parallel: dict[str, Any], transformer: dict[str, int], call: dict[str, Any]) -> str:
    forwards: list[int] = []
    host = make_transformer(**transformer)
    host.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        pipeline(parallel, transformer=host)(PROMPT, num_frames=9, output_type="latent", **call)
    assert not forwards
    return str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "transformer", "call", "words"),
    [
        ({"ulysses_degree": 2}, {"num_attention_heads": 3}, {}, ["2", "3 attention heads", "[1, 3]"]),
        ({"ulysses_degree": 3}, {"num_attention_heads": 3}, {}, ["teams of 3", "2 run", "--num_processes 3"]),
        ({"ulysses_degree": 0}, {}, {}, ["ulysses_degree", "0"]),
        (GUIDANCE, {}, {"guidance_scale": 1.0}, ["guidance_parallel", "guidance_scale"]),
    ],
)
def test_refused_before_the_first_forward(
    tmp_path: Path, parallel: dict[str, Any], transformer: dict[str, int], call: dict[str, Any], words: list[str]
) -> None:
    for message in run_ranks(2, tmp_path, refused, parallel, transformer, call):
        assert all(word in message for word in words), message


def different(rank: int, name: str, values: list[Any]) -> str:
    call = {"prompt": PROMPT, "num_frames": 9, "generator": seed(0), "output_type": "latent"} | {name: values[rank]}
    with pytest.raises(ValueError) as caught:
        pipeline(ULYSSES)(**call)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prompt", [PROMPT, "a blue square"]),
        ("generator", [seed(0), seed(1)]),
        ("num_frames", [9, 21]),
        ("latents", [torch.zeros(1, 16, 3, 6, 10), torch.ones(1, 16, 3, 6, 10)]),
    ],
)
def test_different_arguments_are_refused_on_all_ranks(tmp_path: Path, name: str, values: list[Any]) -> None:
    for message in run_ranks(2, tmp_path, different, name, values):
        assert f"`{name}`" in message


def test_without_processes_it_says_how_to_start_them() -> None:
    with pytest.raises(RuntimeError, match="accelerate launch --multi_gpu"):
        make_pipeline(ODD).enable_parallelism(ulysses_degree=2)


def named_write(rank: int) -> str:
    pipe = pipeline(ULYSSES)
    with pytest.raises(ValueError) as caught:
        pipe.paged_attachment(write="fused").choose_write("cuda", torch.bfloat16)
    return str(caught.value)


def test_the_fused_write_says_why_not(tmp_path: Path) -> None:
    assert all("all heads" in message for message in run_ranks(2, tmp_path, named_write))


# -- failures -------------------------------------------------------------------------------------------------------


def fails_in_commit(rank: int, after: int) -> tuple[str, list[int], float]:
    """Rank 1's commit forward of the second chunk raises, in its second block or after its last."""
    pipe = pipeline({**ULYSSES, "timeout": 2.0})
    manager = pipe.create_cache()
    stream = pipe.stream(PROMPT, cache=manager, generator=seed(0), output_type="latent")
    next(stream)
    next(stream)
    branch = manager.sessions[0].branch()
    module = pipe.transformer.blocks[1] if after == 0 else pipe.transformer.proj_out
    start, before = time.monotonic(), branch.committed_tokens
    with pytest.raises(RuntimeError) as caught, torch.no_grad():
        if rank == 1:
            with failing(module, RuntimeError("planted")):
                stream.rollout.commit_held()
        else:
            stream.rollout.commit_held()
    return str(caught.value), [before, branch.committed_tokens], time.monotonic() - start


@pytest.mark.parametrize("after", [0, 1], ids=["in a block", "after the last"])
def test_commit_happens_on_all_ranks_or_none(tmp_path: Path, after: int) -> None:
    (waited, mine, seconds), (planted, theirs, _) = run_ranks(2, tmp_path, fails_in_commit, after)
    assert "planted" in planted and "planted" not in waited
    assert mine == theirs == [45, 45]
    assert seconds < 20


def fails_before_agreement(rank: int) -> tuple[str, int]:
    """Rank 1 is interrupted between its commit forward and the commit."""
    pipe = pipeline({**ULYSSES, "timeout": 2.0})
    manager = pipe.create_cache()
    stream = pipe.stream(PROMPT, cache=manager, generator=seed(0), output_type="latent")
    next(stream)
    if rank == 1:
        stream.rollout.agree = lambda: (_ for _ in ()).throw(RuntimeError("planted"))
    with pytest.raises(RuntimeError) as caught, torch.no_grad():
        stream.rollout.commit_held()
    return str(caught.value), manager.sessions[0].branch().committed_tokens


def test_a_rank_that_does_not_come_stops_the_commit(tmp_path: Path) -> None:
    (message, mine), (_, theirs) = run_ranks(2, tmp_path, fails_before_agreement)
    assert "one did not come" in message
    assert mine == theirs == 0


# -- diffusers' own context parallelism -----------------------------------------------------------------------------


def hosted(rank: int, config: dict[str, Any], recipe: Any) -> tuple[torch.Tensor, list] | str:
    pipe = pipeline(None, recipe)
    # Without an accelerator diffusers divides by their number, to name this rank's device.
    with patch.object(torch.accelerator, "device_count", lambda: 1):
        pipe.transformer.enable_parallelism(config=ContextParallelConfig(**config))
    call = {"prompt_embeds": random_embeds(1, text_len=7), "num_frames": 33, "generator": seed(0)}
    try:
        with record_noise() as noise:
            return pipe(output_type="latent", **call).frames, noise
    except ValueError as error:
        return str(error)


def test_context_parallel_config_of_the_host(tmp_path: Path) -> None:
    """A transformer that diffusers was told to run on two ranks does so with the paged cache, where tokens divide."""
    pipe = pipeline(None, EVEN)
    call = {"prompt_embeds": random_embeds(1, text_len=7), "num_frames": 33, "generator": seed(0)}
    with record_noise() as noise:
        alone = pipe(output_type="latent", **call).frames
    check_equal(run_ranks(2, tmp_path, hosted, {"ulysses_degree": 2}, EVEN), (alone, noise))


@pytest.mark.parametrize(
    ("config", "recipe", "words"),
    [
        ({"ulysses_degree": 2}, ODD, ["45 tokens", "pads"]),
        ({"ring_degree": 2}, EVEN, ["ring", "ulysses_degree"]),
        ({"ulysses_degree": 2, "ulysses_anything": True}, EVEN, ["ulysses_anything", "pads"]),
    ],
    ids=["odd", "ring", "anything"],
)
def test_configs_that_cannot_be_served(tmp_path: Path, config: dict[str, Any], recipe: Any, words: list[str]) -> None:
    for message in run_ranks(2, tmp_path, hosted, config, recipe):
        assert isinstance(message, str) and all(word in message for word in words), message


def both_ways(rank: int) -> list[str]:
    """What is said where the pipeline and diffusers are both told to, in either order, and on switching diffusers off."""
    said = []
    for first in ("pipeline", "host"):
        pipe = pipeline(ULYSSES if first == "pipeline" else None, EVEN)
        with patch.object(torch.accelerator, "device_count", lambda: 1):
            pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
        steps = [pipe.plan_memory] if first == "pipeline" else [pipe.enable_parallelism, pipe.disable_parallelism]
        for step in steps:
            with pytest.raises(RuntimeError) as caught:
                step()
            said.append(str(caught.value))
    pipe.transformer = make_transformer()
    assert pipe.parallel_layout == ParallelLayout()  # it went with the transformer that had it
    return said


def test_one_way_at_a_time(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, both_ways):
        assert len(said) == 3 and all("use one of them" in message for message in said)


def own_loop(rank: int, sharded: bool) -> torch.Tensor:
    """Three chunks through a transformer that somebody else calls; the window of 1 + 4 frames wraps."""
    run = PagedRun(tiny_transformer(), 1, 4, **({"heads": 1} if sharded else {}))
    if sharded:
        run.paged.sharding = TokenSharding(HeadExchange(dist.group.WORLD, rank))
    return torch.cat([run.forward(latents_of(3, seed=chunk), 500.0, text_of()) for chunk in range(3)], dim=2)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    alone = own_loop(0, False)
    for theirs in run_ranks(2, tmp_path, own_loop, True):
        assert (theirs - alone).norm() <= 1e-5 * alone.norm()


# -- decoding on a rank of its own --------------------------------------------------------------------------------------


def decoded_apart(rank: int, parallel: dict[str, Any], call: dict[str, Any]) -> Any:
    """The decoder's frames, the others' latents, of two videos one after the other."""
    pipe, results = pipeline(parallel), []
    for _ in range(2):
        if pipe.parallel_layout.is_decoder:
            results.append(np.concatenate([chunk.frames for chunk in pipe.receive_chunks()], axis=1))
        else:
            results.append(pipe(PROMPT, generator=seed(0), output_type="latent", **call).frames)
    return results


@pytest.mark.parametrize("call", [{"num_frames": 30}, {"num_frames": 33, "image": Image.new("RGB", (80, 48), "red")}])
@pytest.mark.parametrize(
    ("parallel", "num_ranks"), [({}, 2), (ULYSSES, 3), (BOTH, 5)], ids=["alone", "ulysses", "guidance and ulysses"]
)
def test_frames_of_the_decode_rank(
    tmp_path: Path, call: dict[str, Any], parallel: dict[str, Any], num_ranks: int
) -> None:
    """Bit by bit what one process makes, whole chunks and the cut at the end included."""
    if "guidance_parallel" in parallel:
        call = call | {"guidance_scale": 3.0, "negative_prompt": "blurry"}
    *latents, frames = run_ranks(num_ranks, tmp_path, decoded_apart, {**parallel, "decode_rank": True}, call)
    pipe = pipeline(None)
    expected = pipe(PROMPT, generator=seed(0), output_type="np", **call).frames
    clean = pipe(PROMPT, generator=seed(0), output_type="latent", **call).frames
    for mine in frames:
        assert mine.shape == expected.shape
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    for theirs in latents:
        assert all((video - clean).norm() <= 1e-4 * clean.norm() for video in theirs)


def reset_on_the_way(rank: int) -> list[Any]:
    """Chunks before and after a reset of all but the text."""
    pipe = pipeline({"decode_rank": True})
    if pipe.parallel_layout.is_decoder:
        return [(chunk.index, chunk.start_latent_frame, chunk.frames) for chunk in pipe.receive_chunks()]
    with pipe.stream(PROMPT, generator=seed(0), output_type="latent") as stream:
        for _ in range(2):
            next(stream)
        with pytest.raises(NotImplementedError, match="another rank"):
            stream.fork()
        stream.reset()
        next(stream)
        stream.reset(keep=("history", "text"))  # the decoder alone: it is told the last latent frame again
        next(stream)
    return []


def test_the_decode_rank_follows_a_reset(tmp_path: Path) -> None:
    _, chunks = run_ranks(2, tmp_path, reset_on_the_way)
    assert [(index, start, frames.shape[1]) for index, start, frames in chunks] == [
        (0, 0, 9),
        (1, 3, 12),
        (0, 0, 9),
        (1, 3, 12),
    ]


def breaks_off(rank: int, where: str) -> str:
    """The leader's second chunk fails, or the body of its ``with`` block does."""
    pipe = pipeline({"decode_rank": True})
    if pipe.parallel_layout.is_decoder:
        chunks = pipe.receive_chunks()
        next(chunks)
        with pytest.raises(RuntimeError) as told:
            list(chunks)
        return str(told.value)
    with pytest.raises(OSError) as caught, pipe.stream(PROMPT, generator=seed(0), output_type="latent") as stream:
        next(stream)
        if where == "body":
            raise OSError("planted")
        with failing(pipe.transformer.blocks[1].ffn, OSError("planted")):
            next(stream)
    return str(caught.value)


@pytest.mark.parametrize("where", ["chunk", "body"])
def test_the_decode_rank_is_told_of_a_failure(tmp_path: Path, where: str) -> None:
    """It saw the end of a video, as after the last chunk, and finished a file that lacked frames."""
    planted, told = run_ranks(2, tmp_path, breaks_off, where)
    assert planted == "planted"
    assert "breaks off" in told and "rank 0" in told and "OSError('planted')" in told


def roles(rank: int) -> tuple[str, tuple[int, int, int]]:
    pipe = pipeline({"decode_rank": True})
    with pytest.raises(ValueError) as caught:
        pipe(PROMPT, num_frames=9, output_type="np")
    plan = pipe.plan_memory()
    return str(caught.value), (plan.pool_bytes, plan.text_bytes, plan.vae_state_bytes)


def test_the_decode_rank_has_a_role_and_memory_of_its_own(tmp_path: Path) -> None:
    (denoiser, (pool, text, vae)), (decoder, planned) = run_ranks(2, tmp_path, roles)
    assert "receive_chunks" in denoiser and "output_type='latent'" in denoiser
    assert "receive_chunks" in decoder and "decodes for its team" in decoder
    whole = pipeline(None).plan_memory()
    assert (pool, text, vae) == (whole.pool_bytes, whole.text_bytes, 0)
    assert planned == (0, 0, whole.vae_state_bytes)
    with pytest.raises(ValueError, match="decode_rank=True"):
        next(pipeline(None).receive_chunks())


# -- integers -------------------------------------------------------------------------------------------------------


def test_layout_of_eight_ranks() -> None:
    """Two teams of two branches of two shares: every rank has one place."""
    ranks = [ParallelLayout(ulysses_degree=2, guidance_parallel=True, world_size=8, rank=rank) for rank in range(8)]
    assert [r.team for r in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [r.branch_index for r in ranks] == [0, 0, 1, 1] * 2
    assert [r.shard for r in ranks] == [0, 1] * 4
    assert [r.is_leader for r in ranks] == [True, False, False, False] * 2
    assert ranks[5].head_ranks(1, 0) == [4, 5] and ranks[6].head_ranks(1, 1) == [6, 7]
    assert ranks[5].branch_ranks(1, 1) == [5, 7]
    assert ranks[3].local_branches(("positive", "negative")) == ("negative",)


def test_layout_with_a_rank_that_decodes() -> None:
    """Two teams of two that denoise and one that decodes."""
    ranks = [ParallelLayout(ulysses_degree=2, decode_rank=True, world_size=6, rank=rank) for rank in range(6)]
    assert [r.is_decoder for r in ranks] == [r.writes_frames for r in ranks] == [False, False, True] * 2
    assert [r.shard for r in ranks if not r.is_decoder] == [0, 1, 0, 1]
    assert ranks[0].head_ranks(1, 0) == ranks[0].team_ranks(1) == [3, 4]
    with pytest.raises(ValueError, match=r"1 rank that decodes.*teams of 3.*4 run"):
        ParallelLayout(ulysses_degree=2, decode_rank=True, world_size=4)


def test_degrees_of_the_real_models() -> None:
    assert [d for d in legal_degrees(12) if d <= 8] == [1, 2, 3, 4, 6]
    assert [d for d in legal_degrees(40) if d <= 8] == [1, 2, 4, 5, 8]
    with pytest.raises(ValueError, match=r"ulysses_degree=8 .* 12 attention heads.*\[1, 2, 3, 4, 6, 12\]"):
        ParallelLayout(ulysses_degree=8, world_size=8).heads_per_rank(12)


def test_ranks_that_take_no_part() -> None:
    ranks = [ParallelLayout(ulysses_degree=3, world_size=4, rank=rank, num_ranks=3) for rank in range(4)]
    assert [r.is_member for r in ranks] == [True, True, True, False]
    assert not any(r.is_leader for r in ranks[1:])
    with pytest.raises(ValueError, match="teams of 3"):
        ParallelLayout(ulysses_degree=3, world_size=2, num_ranks=3)


@pytest.mark.parametrize("num_tokens", [45, 46, 1, 3])
def test_shares_hold_every_token_once(num_tokens: int) -> None:
    class Ranks:
        degree = 2

        def __init__(self, shard: int) -> None:
            self.shard = shard

        def share_of(self, count: int) -> int:
            return -(-count // 2)

    tokens = torch.arange(1, num_tokens + 1)[None, :, None].float()
    parts = [TokenSharding(Ranks(shard)).shard(tokens) for shard in range(2)]
    assert parts[0].shape == parts[1].shape
    joined = torch.cat(parts, dim=1)
    assert torch.equal(joined[:, :num_tokens], tokens) and not joined[:, num_tokens:].any()


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("python /bin/accelerate launch --cpu --num_processes 2 run.py", 2),
        ("python -m accelerate.commands.launch --num_processes=4 run.py", 4),
        ("torchrun --nproc-per-node 8 run.py", 8),
        ("accelerate launch run.py", None),
        ("accelerate launch run.py --num_processes 3", None),
        ("/envs/accelerate/bin/python run.py --num_processes 3", None),
        ("accelerate launch --num_processes 2 run.py --num_processes 3", 2),
        ("python run.py --num_processes 3", None),
        ("bash", None),
    ],
)
def test_what_the_launcher_was_asked_for(
    command: str, asked: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of the script was once taken for the launcher's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    assert asked_processes(command.split()) == asked


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ("", 4),
        ("--num_processes 2", 2),
        ("--cpu", None),  # accelerate then leaves its default file unread
        ("--cpu --config_file {folder}/mine.json", 3),
        ("--config-file={folder}/mine.json", 3),
    ],
)
def test_processes_of_a_config_file(
    options: str, asked: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that stand in accelerate's file were not seen, so a launch of one process went unnoticed."""
    assert Path(default_config_file).parts[-2:] == ("accelerate", "default_config.yaml")
    for number, path in ((4, tmp_path / "accelerate" / "default_config.yaml"), (3, tmp_path / "mine.json")):
        path.parent.mkdir(exist_ok=True)
        config = ClusterConfig(
            compute_environment="LOCAL_MACHINE", distributed_type="NO", mixed_precision="no", use_cpu=True, debug=False
        )
        config.num_processes = number
        (config.to_json_file if path.suffix == ".json" else config.to_yaml_file)(path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    assert asked_processes(f"accelerate launch {options.format(folder=tmp_path)} run.py".split()) == asked


def test_fewer_processes_than_asked_for_are_noticed() -> None:
    with pytest.raises(RuntimeError, match=r"2 processes were asked for, 1 runs.*--multi_gpu"):
        check_launch(1, 2)
    check_launch(2, 2)
    check_launch(1, None)


def test_digests_tell_values_apart() -> None:
    values = [
        None,
        1,
        "1",
        [1],
        [1, 1],
        torch.ones(2),
        torch.ones(1, 2),
        torch.zeros(2),
        torch.ones(2).half(),
        seed(1),
        seed(2),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(seed(1)) == digest(seed(1)) and digest([torch.ones(2)]) == digest((torch.ones(2),))
