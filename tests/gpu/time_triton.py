"""The Triton kernels against torch's attention on one GPU, a table in milliseconds; from the repository's root:

PYTHONPATH=tests python -m gpu.time_triton
"""

import multiprocessing
from collections.abc import Callable
from functools import partial

import torch
import triton
from paged_cases import make_inputs, make_states, row_slots
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from diffusers_ardiff.attention.kernels.paged_attention import attend_pages
from diffusers_ardiff.attention.kernels.rope_write import QKNorm, norm_rope_write, rope_write
from diffusers_ardiff.attention.kernels.tiles import AttentionConfig, choose_num_splits
from diffusers_ardiff.context import PagedLayerInputs
from diffusers_ardiff.rope import apply_rotary

HEADS, HEAD_DIM = 12, 128
SHAPES = [(4680, 18720), (4680, 32760), (1560, 32760)]
"""(queries, keys): a chunk of three frames over 12 and 21 frames, and one frame over 21."""
TILES = [
    # block_m, block_n, num_warps, num_stages, programs_per_unit
    (128, 128, 8, 2, 1),
    (128, 128, 8, 3, 1),
    (128, 64, 8, 3, 1),
    (128, 64, 8, 4, 1),
    (128, 32, 8, 3, 2),
    (64, 128, 4, 2, 1),
    (64, 64, 4, 2, 2),
    (64, 64, 4, 3, 2),
]
LAYOUTS = ["fragmented", "contiguous", "descriptors"]


def milliseconds(function: Callable[[], object]) -> float:
    """Median time of a call."""
    return triton.testing.do_bench(function, warmup=20, rep=80, return_mode="median")


def make_case(num_queries: int, num_keys: int, *, shuffled: bool) -> tuple[torch.Tensor, PagedLayerInputs]:
    """Random queries and one filled row of keys in bfloat16."""
    inputs = make_inputs(
        [num_keys], heads=HEADS, head_dim=HEAD_DIM, shuffled=shuffled, dtype=torch.bfloat16, device="cuda"
    )
    return torch.randn((1, num_queries, HEADS, HEAD_DIM), device="cuda").bfloat16(), inputs


def make_config(tiles: tuple[int, ...], layout: str, shape: tuple[int, int], *, split: bool) -> AttentionConfig:
    """A row of the table; ``split``: as many splits as the package would choose."""
    block_m, block_n, num_warps, num_stages, programs = tiles
    units = torch.cuda.get_device_properties(0).multi_processor_count * programs
    splits = choose_num_splits(-(-shape[0] // block_m) * HEADS, units, shape[1]) if split else 1
    return AttentionConfig(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        descriptors=layout == "descriptors",
        num_splits=splits,
    )


def run(query: torch.Tensor, inputs: PagedLayerInputs, layout: str, config: AttentionConfig | None) -> torch.Tensor:
    """One call of the kernel."""
    return attend_pages(
        query,
        inputs,
        page_size=16,
        softmax_scale=HEAD_DIM**-0.5,
        contiguous=layout != "fragmented",
        config=config,
    ).out


def compile_case(case: tuple[tuple[int, ...], str]) -> str:
    """Fill the compiler's cache in a process of its own; returns what went wrong."""
    tiles, layout = case
    query, inputs = make_case(1560, 2048, shuffled=layout == "fragmented")
    try:
        for split in (1, 2):
            config = make_config(tiles, layout, (1560, 2048), split=False)
            run(query, inputs, layout, AttentionConfig(**{**vars(config), "num_splits": split}))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{tiles} {layout}: {error!r}"[:300]
    return ""


def compile_all() -> None:
    """Compile every row of the table, several at a time."""
    cases = [(tiles, layout) for tiles in TILES for layout in LAYOUTS]
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        for problem in filter(None, pool.imap(compile_case, cases)):
            print("does not run:", problem)


def time_torch(cases: dict) -> None:
    """torch's kernels on the contiguous view."""
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        times = []
        for shape in SHAPES:
            query, inputs = cases[shape, False]
            keys, values = (pool[None, : shape[1]].transpose(1, 2) for pool in inputs[:2])
            with sdpa_kernel([backend]):
                times.append(milliseconds(partial(scaled_dot_product_attention, query.transpose(1, 2), keys, values)))
        print_row(f"torch {name}", times)


def time_triton(cases: dict) -> None:
    """Every tile size in every layout, with the package's number of splits and without."""
    for layout in LAYOUTS:
        for tiles in TILES:
            for split in (True, False):
                configs = [make_config(tiles, layout, shape, split=split) for shape in SHAPES]
                print_row(f"{layout} {tiles} {'split' if split else 'whole'}", time_layout(cases, layout, configs))
    for layout in LAYOUTS[:2]:
        print_row(f"chosen, {layout}", time_layout(cases, layout, [None] * len(SHAPES)))


def time_layout(cases: dict, layout: str, configs: list[AttentionConfig | None]) -> list[float]:
    """Each shape with its configuration; None: the package's choice."""
    calls = [
        partial(run, *cases[shape, layout == "fragmented"], layout, config)
        for shape, config in zip(SHAPES, configs, strict=True)
    ]
    return [time_or_nan(call) for call in calls]


def time_or_nan(function: Callable[[], object]) -> float:
    """NaN where the tiles do not fit the device."""
    try:
        return milliseconds(function)
    except triton.runtime.errors.OutOfResources:
        return float("nan")


def time_writes(cases: dict) -> None:
    """Norm, rotation and write of one chunk, fused and in plain torch."""
    _, inputs = cases[SHAPES[0], True]
    inputs = inputs._replace(slot_mapping=row_slots(inputs.block_table[0], 16, 4680)[None].contiguous())
    states = tuple(t.contiguous() for t in make_states(1, 4680, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda"))
    angles = torch.rand((1, 4680, 1, HEAD_DIM), device="cuda")
    rotary, weight = (angles.cos(), angles.sin()), torch.ones(HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    norm = QKNorm(weight, weight, 1e-6)

    def plain() -> None:
        normed = [rms_norm(t.flatten(2), (HEADS * HEAD_DIM,), weight, 1e-6).view_as(t) for t in states[:2]]
        apply_rotary(normed[0], *rotary)
        inputs.key_pool.index_copy_(0, inputs.slot_mapping[0], apply_rotary(normed[1], *rotary)[0])
        inputs.value_pool.index_copy_(0, inputs.slot_mapping[0], states[2][0])

    print_row("norm, rotate, write: torch", [milliseconds(plain)])
    print_row("norm, rotate, write: fused", [milliseconds(lambda: norm_rope_write(inputs, *states, rotary, norm))])
    print_row("rotate, write: fused", [milliseconds(lambda: rope_write(inputs, *states, rotary))])


def print_row(name: str, times: list[float]) -> None:
    """A line of the table."""
    print(f"{name:48s}" + "".join(f"{time:9.3f}" for time in times), flush=True)


def main() -> None:
    """Compile, then time."""
    compile_all()
    cases = {(shape, shuffled): make_case(*shape, shuffled=shuffled) for shape in SHAPES for shuffled in (True, False)}
    print(
        f"{'ms, bf16, 12 heads x 128':48s}" + "".join(f"{f'{q}x{k}':>9s}" for q, k in ((s[0], s[1]) for s in SHAPES))
    )
    time_torch(cases)
    time_triton(cases)
    time_writes(cases)


if __name__ == "__main__":
    main()
