"""Page ids and reference counts, and the plan that sizes the pool."""

import random

import pytest
import torch

from diffusers_ardiff.cache import (
    KVManager,
    KVShape,
    MemoryLimitError,
    OutOfPagesError,
    PageAllocator,
    PageRun,
    RingGeometry,
    SideState,
    plan_memory,
)

SMALL = RingGeometry(sink_tokens=24, window_tokens=48, page_size=16)
SHAPE = KVShape(num_layers=2, num_heads=3, head_dim=8, itemsize=4)


def test_every_page_is_handed_out_once() -> None:
    """A null page whose id differed from the one kernels skip made a real page 0 be ignored (kvcached PR#398). Here no
    page is special: a drained pool has handed out 0 .. n-1, and a full cycle brings all of them back."""
    allocator = PageAllocator(8)
    runs = [allocator.allocate(1, 2)[0] for _ in range(4)]
    assert sorted(page for run in runs for page in run.pages) == list(range(8))
    assert (allocator.num_free, allocator.num_used) == (0, 8)
    for run in runs:
        allocator.release(run)
    assert allocator.num_free == 8


def test_branches_of_one_session_lie_side_by_side() -> None:
    allocator = PageAllocator(12)
    first, second = allocator.allocate(2, 4)
    assert (first.pages, second.pages) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert first.is_contiguous
    assert second.is_contiguous


def test_a_gap_for_one_is_left_for_one() -> None:
    """Two branches go side by side behind a gap that holds only one of them: equal stride, one view for both."""
    allocator = PageAllocator(8)
    first, _ = (allocator.allocate(1, 2)[0] for _ in range(2))
    allocator.release(first)
    assert [run.pages for run in allocator.allocate(2, 2)] == [(4, 5), (6, 7)]


def test_runs_stay_contiguous_through_a_gap() -> None:
    """One branch closes between two others; its gap is used again, and a pair that fits no gap is split into runs."""
    allocator = PageAllocator(8)
    runs = [allocator.allocate(1, 2)[0] for _ in range(4)]
    allocator.release(runs[0])
    allocator.release(runs[2])
    pair = allocator.allocate(2, 2)
    assert [run.pages for run in pair] == [(0, 1), (4, 5)]


def test_fragmented_pool_is_still_usable() -> None:
    allocator = PageAllocator(4)
    singles = [allocator.allocate(1, 1)[0] for _ in range(4)]
    allocator.release(singles[0])
    allocator.release(singles[2])
    (run,) = allocator.allocate(1, 2)
    assert run.pages == (0, 2)
    assert not run.is_contiguous


def test_shuffled_pool_repeats_with_its_seed() -> None:
    runs = [PageAllocator(16, shuffle_seed=seed).allocate(1, 8)[0].pages for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert not PageRun(runs[0]).is_contiguous


def test_too_few_pages_takes_nothing() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(1, 2)
    with pytest.raises(OutOfPagesError, match=r"2 branches of 2 pages need 4 pages, 3 of 5 are free"):
        allocator.allocate(2, 2)
    assert allocator.num_free == 3


def test_a_page_cannot_be_released_twice() -> None:
    allocator = PageAllocator(4)
    (run,) = allocator.allocate(1, 2)
    allocator.release(run)
    with pytest.raises(ValueError, match="released before"):
        allocator.release(run)
    with pytest.raises(ValueError, match="page 4 does not belong"):
        allocator.release(PageRun((4,)))
    with pytest.raises(ValueError, match="is free"):
        allocator.share(run)
    assert allocator.num_free == 4


def test_partly_free_run_releases_nothing() -> None:
    allocator = PageAllocator(4)
    (run,) = allocator.allocate(1, 2)
    with pytest.raises(ValueError, match="page 2 is free"):
        allocator.release(PageRun((*run.pages, 2)))
    assert [allocator.ref_count(page) for page in range(4)] == [1, 1, 0, 0]


def test_shared_pages_live_until_their_last_holder() -> None:
    allocator = PageAllocator(4)
    (run,) = allocator.allocate(1, 2)
    allocator.share(run)
    allocator.release(run)
    assert allocator.num_used == 2
    allocator.release(run)
    assert allocator.num_used == 0


def test_integrity_check_names_the_page() -> None:
    allocator = PageAllocator(4)
    (run,) = allocator.allocate(1, 2)
    allocator.check_integrity([run])
    allocator.share(run)
    with pytest.raises(RuntimeError, match="page 0 is held by 1 branches but counted 2"):
        allocator.check_integrity([run])


@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_random_allocation_never_overlaps(shuffle_seed: int | None) -> None:
    rng = random.Random(0)
    allocator, held = PageAllocator(24, shuffle_seed=shuffle_seed), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            allocator.release(held.pop(rng.randrange(len(held))))
        else:
            try:
                held += allocator.allocate(rng.randint(1, 2), rng.randint(1, 5))
            except OutOfPagesError:
                continue
        pages = [page for run in held for page in run.pages]
        assert len(pages) == len(set(pages)) == allocator.num_used
        allocator.check_integrity(held)


# -- the memory plan ------------------------------------------------------------------------------------------------


def test_plan_of_a_14b_window() -> None:
    """18 frames of 1560 tokens, 40 layers of 40 x 128 in bf16: 1755 pages, 23.0 GB; no scratch pages beside them."""
    policy = RingGeometry(sink_tokens=9 * 1560, window_tokens=9 * 1560, page_size=16)
    plan = plan_memory(policy, KVShape(num_layers=40, num_heads=40, head_dim=128, itemsize=2))
    assert plan.num_pages == 1755
    assert plan.total_bytes == 1755 * 16 * 2 * 40 * 40 * 128 * 2
    assert round(plan.total_bytes / 1e9, 1) == 23.0


@pytest.mark.parametrize("shuffle_seed", [None, 0])
@pytest.mark.parametrize("num_sessions", [1, 2])
@pytest.mark.parametrize("num_branches", [1, 2])
def test_planned_bytes_are_the_allocated_ones(num_sessions: int, num_branches: int, shuffle_seed: int | None) -> None:
    side = SideState(text_bytes=1000, vae_state_bytes=200, latent_bytes=30)
    manager = KVManager(
        SMALL,
        SHAPE,
        max_sessions=num_sessions,
        branches_per_session=num_branches,
        side_state=side,
        shuffle_seed=shuffle_seed,
    )
    token_bytes = 2 * 2 * 3 * 8 * 4
    staging = 72 * token_bytes if shuffle_seed is not None else 0
    pages = num_sessions * num_branches * 5 * 16 * token_bytes
    assert manager.plan.num_pages == num_sessions * num_branches * 5
    assert manager.plan.total_bytes == pages + num_sessions * (num_branches * staging + 1230)
    assert manager.storage.num_bytes == pages + num_sessions * num_branches * staging
    storage, pools = manager.storage, [*manager.storage.key_pools, *manager.storage.value_pools]
    if storage.staging is not None:
        pools += [*storage.staging.key_pools, *storage.staging.value_pools]
    assert len({pool.untyped_storage().data_ptr() for pool in pools}) == len(pools)
    assert sum(pool.untyped_storage().nbytes() for pool in pools) == manager.storage.num_bytes


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before anything is allocated."""
    needed = plan_memory(SMALL, SHAPE).total_bytes
    KVManager(SMALL, SHAPE, limit_bytes=needed)

    def no_allocation(*args, **kwargs):
        raise AssertionError("allocated before the limit was checked")

    monkeypatch.setattr(torch, "empty", no_allocation)
    with pytest.raises(MemoryLimitError, match=rf"{needed:,}.*{needed - 1:,}"):
        KVManager(SMALL, SHAPE, limit_bytes=needed - 1)


def test_one_branch_needs_half_the_pages_of_two() -> None:
    """Pages were once reserved for two branches with guidance off (vllm-omni PR#5271)."""
    one, two = (plan_memory(SMALL, SHAPE, num_branches=n) for n in (1, 2))
    assert (one.num_pages, two.num_pages) == (5, 10)


def test_pool_dtype_must_match_the_plan() -> None:
    with pytest.raises(ValueError, match=r"4 bytes an element, torch.bfloat16 has 2"):
        KVManager(SMALL, SHAPE, dtype=torch.bfloat16)
