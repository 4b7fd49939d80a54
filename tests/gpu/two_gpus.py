"""What two GPUs make of one video, against one GPU; started by accelerate on both. Prints a line of JSON a case."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from tiny_components import RECIPE, make_pipeline, make_transformer, random_embeds, seed

from diffusers_ardiff import ARDiffusionPipeline, PromptSwitch

ODD = RECIPE.replace(name="odd", height=48, width=80, denoising_steps=(1000, 500))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ulysses": ({"ulysses_degree": 2}, {}),
    "ulysses guided": ({"ulysses_degree": 2}, {"guidance_scale": 3.0}),
    "guidance parallel": ({"guidance_parallel": True}, {"guidance_scale": 3.0}),
    "merged": ({"ulysses_degree": 2}, {"merge_commits": True}),
    "two videos": ({"ulysses_degree": 2}, {"rows": 2}),
}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compiled": {"cuda_graphs": False},
    "graphs": {"compile": False},
    "both": {},
}


def make(pipe: ARDiffusionPipeline, call: dict[str, Any], warmup: dict[str, Any] | None) -> torch.Tensor:
    """Latents of five chunks, with a recache on the way."""
    call = dict(call)
    rows, guided = call.pop("rows", 1), call.get("guidance_scale", 1.0) > 1.0
    if warmup is not None:
        merged = {"merge_commits": True} if call.get("merge_commits") else {}
        pipe.warmup(recipe=ODD, num_videos=rows, guided=guided, text_len=512, decode=False, **merged, **warmup)
    embeds = random_embeds(1, rows=rows, text_len=512)
    switch = PromptSwitch(latent_frame=6, prompt_embeds=random_embeds(3, text_len=512), mode="recache")
    negative = {"negative_prompt_embeds": random_embeds(2, rows=rows, text_len=512)} if guided else {}
    latents = pipe(
        prompt_embeds=embeds,
        num_frames=57,
        generator=[seed(row) for row in range(rows)],
        prompt_schedule=[switch],
        output_type="latent",
        **negative,
        **call,
    ).frames
    pipe.cooldown()
    return latents


def main(dtype: torch.dtype) -> None:
    """Every case in every variant; the first rank prints the relative errors."""
    state = PartialState()
    transformer = make_transformer(attention_head_dim=64, num_attention_heads=4, ffn_dim=256, num_layers=3)
    pipe = make_pipeline(ODD, transformer=transformer).to(state.device, dtype)
    for name, (parallel, call) in CASES.items():
        expected = make(pipe, call, None)
        for variant, warmup in VARIANTS.items():
            if name != "ulysses" and variant in ("compiled", "graphs"):
                continue
            torch._dynamo.reset()
            pipe.enable_parallelism(**parallel)
            latents = make(pipe, call, warmup)
            pipe.disable_parallelism()
            everyone = [torch.empty_like(latents) for _ in range(2)]
            dist.all_gather(everyone, latents.contiguous())
            error = float((latents - expected).norm() / expected.norm())
            same = bool(torch.equal(*everyone))
            if state.is_main_process:
                print(json.dumps({"case": name, "variant": variant, "error": error, "same": same}), flush=True)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
