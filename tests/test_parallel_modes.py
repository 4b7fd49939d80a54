"""Context modes, rotary policies, joint forwards and other families where several processes make one video."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, SkyReelsV2Transformer3DModel
from ranks import run_ranks
from test_families import make_for_pipeline
from test_parallel import BOTH, EVEN, GUIDANCE, ODD, ULYSSES, check_equal, make_video, pipeline, record_noise
from tiny_components import PROMPT, random_embeds, seed
from tiny_families import FAMILIES, FamilyRun

from diffusers_ardiff import StreamBatch
from diffusers_ardiff.parallel import HeadExchange, TokenSharding
from diffusers_ardiff.recipes import load_recipe

SMALL = {"height": 48, "width": 80}
RECIPES = {
    "recompute": load_recipe("krea").replace(**SMALL),
    "rolling": load_recipe("rolling-forcing").replace(**SMALL),
    "relative": ODD.replace(rope_policy="relative"),
    "capped": ODD.replace(rope_policy="capped", rope_limit_frames=8),
}
"""45 tokens a chunk, which two ranks can't share evenly; five chunks of the rolling window neither."""


@pytest.mark.parametrize(
    ("name", "parallel", "num_ranks"),
    [(name, ULYSSES, 2) for name in RECIPES] + [(name, BOTH, 4) for name in ("recompute", "rolling")],
)
def test_ranks_make_the_video_of_one(tmp_path: Path, name: str, parallel: dict[str, Any], num_ranks: int) -> None:
    """With guidance and a prompt that changes on the way, past a full window."""
    call = {"recipe": RECIPES[name]}
    check_equal(run_ranks(num_ranks, tmp_path, make_video, parallel, dict(call)), make_video(0, None, dict(call)))


def hosted(rank: int, config: ContextParallelConfig | None) -> tuple[torch.Tensor, list]:
    pipe = pipeline(None, RECIPES["rolling"].replace(height=32, width=64))
    if config is not None:
        with patch.object(torch.accelerator, "device_count", lambda: 1):
            pipe.transformer.enable_parallelism(config=config)
    call = {"prompt_embeds": random_embeds(1, text_len=7), "num_frames": 57, "generator": seed(0)}
    with record_noise() as noise:
        return pipe(output_type="latent", **call).frames, noise


def test_timesteps_of_tokens_under_the_hosts_context_parallelism(tmp_path: Path) -> None:
    check_equal(run_ranks(2, tmp_path, hosted, ContextParallelConfig(ulysses_degree=2)), hosted(0, None))


def share_of_plan(rank: int, name: str) -> tuple[int, int]:
    plan = pipeline(ULYSSES, RECIPES[name]).plan_memory()
    return plan.sink_bytes, plan.forward_bytes


@pytest.mark.parametrize("name", ["rolling", "relative"])
def test_plans_are_of_one_share(tmp_path: Path, name: str) -> None:
    whole = pipeline(None, RECIPES[name]).plan_memory()
    assert whole.sink_bytes > 0 and whole.forward_bytes > 0
    for planned in run_ranks(2, tmp_path, share_of_plan, name):
        assert planned == (whole.sink_bytes // 2, -(-whole.forward_bytes // 2))


# -- joint forwards -------------------------------------------------------------------------------------------------


def open_streams(pipe: Any, **call: Any) -> list[Any]:
    pool = pipe.create_cache(num_videos=2, guided=call.get("guidance_scale", 1.0) > 1.0)
    return [
        pipe.stream(
            prompt_embeds=random_embeds(number, text_len=7),
            generator=seed(number),
            output_type="latent",
            cache=pool,
            **call,
        )
        for number in (1, 2)
    ]


def joint(rank: int, parallel: dict[str, Any] | None) -> tuple[torch.Tensor, list]:
    """The second stream is a chunk ahead; both go past a full window."""
    streams = open_streams(pipeline(parallel))
    with record_noise() as noise:
        next(streams[1])
        batch = StreamBatch(streams)
        rounds = [batch.step() for _ in range(4)]
    assert all(stream.rollout.num_latent_frames >= 12 for stream in streams)
    return torch.cat([chunk.latents for chunks in rounds for chunk in chunks]), noise


def test_streams_share_forwards_on_two_ranks(tmp_path: Path) -> None:
    check_equal(run_ranks(2, tmp_path, joint, ULYSSES), joint(0, None))


def joint_refused(rank: int) -> str:
    pipe, forwards = pipeline(GUIDANCE), []
    pipe.transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    call = {"guidance_scale": 3.0, "negative_prompt_embeds": random_embeds(9, text_len=7)}
    with pytest.raises(ValueError) as caught:
        StreamBatch(open_streams(pipe, **call))
    assert not forwards
    return str(caught.value)


def test_joint_forwards_with_branches_apart_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, tmp_path, joint_refused):
        assert "guidance_parallel=True" in message and "ulysses_degree" in message


def second_stream(rank: int) -> list[str]:
    pipe, said = pipeline({**ULYSSES, "decode_rank": True}), []
    if pipe.parallel_layout.is_decoder:
        return [str(chunk.index) for _ in range(2) for chunk in pipe.receive_chunks()]
    for _ in range(2):
        with pipe.stream(PROMPT, generator=seed(0), output_type="latent") as stream:
            next(stream)
            with pytest.raises(ValueError) as caught:
                pipe(PROMPT, num_frames=9, output_type="latent")
            said.append(str(caught.value))
    return said


def test_a_decode_rank_serves_one_stream_at_a_time(tmp_path: Path) -> None:
    """The one that was open goes on, and the next one opens when it is closed."""
    *denoisers, decoder = run_ranks(3, tmp_path, second_stream)
    assert all("decode_rank=True decodes one stream" in message for said in denoisers for message in said)
    assert decoder == ["0", "0"]


# -- families -------------------------------------------------------------------------------------------------------


def skyreels(rank: int, parallel: dict[str, Any] | None) -> tuple[torch.Tensor, list]:
    pipe = pipeline(parallel, EVEN, transformer=make_for_pipeline(SkyReelsV2Transformer3DModel))
    call = {"prompt_embeds": random_embeds(1, text_len=7), "num_frames": 33, "generator": seed(0)}
    with record_noise() as noise:
        return pipe(output_type="latent", **call).frames, noise


def test_skyreels_on_two_ranks(tmp_path: Path) -> None:
    check_equal(run_ranks(2, tmp_path, skyreels, ULYSSES), skyreels(0, None))


def chronoedit(rank: int, sharded: bool) -> torch.Tensor:
    family = FAMILIES["chronoedit"]
    run = FamilyRun(family, family.make(), 1, 4, **({"heads": 1} if sharded else {}))
    if sharded:
        run.paged.sharding = TokenSharding(HeadExchange(dist.group.WORLD, rank))
    return torch.cat([run.forward(family.latents(3, seed=chunk), 500.0) for chunk in range(3)], dim=2)


def test_chronoedit_on_two_ranks(tmp_path: Path) -> None:
    alone = chronoedit(0, False)
    for theirs in run_ranks(2, tmp_path, chronoedit, True):
        assert (theirs - alone).norm() <= 1e-5 * alone.norm()


def other_family(rank: int, name: str) -> list[str]:
    """What the pipeline says, and what a loop of one's own is told."""
    family, forwards, said = FAMILIES[name], [], []
    transformer = family.make()
    transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(TypeError) as caught:
        pipeline(ULYSSES, transformer=transformer)
    said.append(str(caught.value))
    run = FamilyRun(family, transformer, 1, 4)
    run.paged.sharding = TokenSharding(HeadExchange(dist.group.WORLD, rank))
    with pytest.raises(TypeError) as caught:
        run.forward(family.latents(family.patch[0] * 2, seed=0), 500.0)
    assert not forwards and run.branch.committed_tokens == 0
    return [*said, str(caught.value)]


@pytest.mark.parametrize("name", ["wan-vace", "ltx", "kandinsky5"])
def test_other_families_are_refused_before_the_first_forward(tmp_path: Path, name: str) -> None:
    for said in run_ranks(2, tmp_path, other_family, name):
        assert len(said) == 2
        for message in said:
            assert "can't be run on several ranks" in message and "ulysses_degree=1" in message
            assert FAMILIES[name].model.__name__ in message
