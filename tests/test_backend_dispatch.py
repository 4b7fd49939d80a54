"""Backends whose libraries or devices are not at hand: stub modules with the published signatures, a faked platform.

``calls`` lists which function of a stub served each call.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen_module
from dense import relative_error
from kernel_stubs import (
    Calls,
    aiter_module,
    flash2_module,
    flash3_module,
    kernels_0_10,
    kernels_0_17,
    torch_2_10_varlen,
    torch_2_11_varlen,
    torch_2_12_varlen,
)
from rollouts import forward, make_manager, random_rows

from diffusers_ardiff.attention import AttentionBackend, AttentionRequest, paged_write_attn, registry, select_backend
from diffusers_ardiff.attention.backends import flash2, flash3, libraries, reference, rocm, sdpa, triton_paged, varlen
from diffusers_ardiff.attention.backends.splits import choose_splits
from diffusers_ardiff.cache import Branch
from diffusers_ardiff.context import PagedForwardContext

FITS = AttentionRequest(device_type="cuda", dtype=torch.bfloat16, head_dim=128, page_size=16)
ALL = (flash3, rocm, sdpa, flash2, varlen, reference)
FULL_BUILD = {"FLASHATTENTION_DISABLE_PAGEDKV": False, "FLASHATTENTION_DISABLE_FP16": False}
FORWARD_ONLY_BUILD = {
    "FLASHATTENTION_DISABLE_PAGEDKV": True,
    "FLASHATTENTION_DISABLE_FP16": True,
    "FLASHATTENTION_DISABLE_HDIM128": False,
    "FLASHATTENTION_DISABLE_HDIM192": True,
    "FLASHATTENTION_DISABLE_HDIM256": True,
}

# -- faked machines -------------------------------------------------------------------------------------------------


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator["Machine"]:
    fake = Machine(monkeypatch)
    yield fake
    fake.forget()


class Machine:
    """An empty machine: no library, no GPU, until a test adds some."""

    FINDERS = (
        libraries.find_flash2,
        libraries.find_flash3,
        libraries.flash3_build_flags,
        libraries.find_aiter,
        libraries.find_torch_varlen,
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.forget()
        for name in ("flash_attn_interface", "fa3_fwd_interface", "flash_attn", "aiter", "kernels"):
            monkeypatch.setitem(sys.modules, name, None)
        self.use(*(module.BACKEND for module in ALL))

    def forget(self) -> None:
        for finder in self.FINDERS:
            finder.cache_clear()

    def install(self, module: ModuleType, name: str | None = None) -> None:
        name = name or module.__name__
        module.__spec__ = object()
        self.monkeypatch.setitem(sys.modules, name, module)
        self.forget()

    def install_flash3(self, calls: Calls, flags: dict[str, bool], *, wheel: bool = False) -> AttentionBackend:
        prefix = "fa3_fwd" if wheel else "flash_attn"
        config = ModuleType(f"{prefix}_config")
        config.CONFIG = {"build_flags": flags}
        self.install(config)
        self.install(flash3_module(calls), f"{prefix}_interface")
        return flash3.make_backend()

    def gpu(self, *capability: int, hip: str | None = None) -> None:
        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        self.monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        self.monkeypatch.setattr(torch.version, "hip", hip)

    def torch_varlen(self, function: Callable) -> None:
        self.monkeypatch.setattr(torch_varlen_module, "varlen_attn", function)
        self.forget()

    def use(self, *backends: AttentionBackend) -> None:
        self.monkeypatch.setattr(registry, "_backends", {backend.name: backend for backend in backends})

    def use_on_cpu(self, backend: AttentionBackend) -> str:
        """Let a GPU backend serve CPU tensors; returns its name."""
        self.use(replace(backend, device_types=frozenset({"cpu"})), reference.BACKEND)
        return backend.name


def open_rows(num_rows: int, *, page_size: int = 16, fragmented: bool = False, staging: bool = True) -> list[Branch]:
    """Branches in a poisoned bfloat16 pool: window of 24 + 72 tokens."""
    manager = make_manager(
        24,
        72,
        page_size=page_size,
        dtype=torch.bfloat16,
        max_sessions=num_rows,
        shuffle_seed=3 if fragmented else None,
    )
    if not staging:
        manager.storage.staging = None
    return [manager.open_session().branch() for _ in range(num_rows)]


def check_equal_to_reference(branches: list[Branch], backend: str, num_tokens: int = 24) -> None:
    rows = random_rows(branches, num_tokens)
    expected = forward(branches, rows, backend="reference", commit=False)
    actual = forward(branches, rows, backend=backend, commit=False)
    assert relative_error(actual, expected) < 2e-2


def advance(branches: list[Branch], chunks: int) -> None:
    for _ in range(chunks):
        forward(branches, random_rows(branches, 24), backend="reference")


# -- FlashAttention 3 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wheel", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("chunks", [0, 6])
def test_flash3_reads_contiguous_rows_in_place(
    machine: Machine, calls: Calls, monkeypatch: pytest.MonkeyPatch, wheel: bool, num_rows: int, chunks: int
) -> None:
    machine.gpu(9, 0)
    name = machine.use_on_cpu(machine.install_flash3(calls, FORWARD_ONLY_BUILD, wheel=wheel))
    branches = open_rows(num_rows)
    advance(branches, chunks)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", None)
        forward(branches, random_rows(branches, 24), backend=name, commit=False)
    assert calls == ["dense"]


@pytest.mark.parametrize("fragmented", [False, True])
def test_flash3_split_cuts_dense_keys_only(
    machine: Machine, calls: Calls, monkeypatch: pytest.MonkeyPatch, fragmented: bool
) -> None:
    machine.gpu(9, 0)
    machine.install_flash3(calls, FORWARD_ONLY_BUILD)
    name = machine.use_on_cpu(flash3.make_split_backend())
    monkeypatch.setattr(flash3, "count_multiprocessors", lambda device: 132)
    monkeypatch.setattr(flash3, "choose_splits", lambda shape, keys, count: 3 if keys > 96 - 24 else 1)
    branches = open_rows(1, fragmented=fragmented, staging=False)
    for _ in range(5):
        check_equal_to_reference(branches, name)
        advance(branches, 1)
    assert calls == (["varlen"] * 5 if fragmented else ["dense"] * 3 + ["dense in 3 parts"] * 2)


def test_flash3_split_comes_first_but_not_for_masks(machine: Machine, calls: Calls) -> None:
    """A mask's segments it would not cut; and there are builds without such kernels."""
    machine.gpu(9, 0)
    machine.use(machine.install_flash3(calls, FORWARD_ONLY_BUILD), flash3.make_split_backend())
    assert select_backend(FITS).name == "flash3_split"
    assert select_backend(replace(FITS, needs_mask=True)).name == "flash3"
    with pytest.raises(ValueError, match="flash3_split: honours no piecewise mask"):
        select_backend(replace(FITS, needs_mask=True), "flash3_split")
    machine.install_flash3(calls, FORWARD_ONLY_BUILD | {"FLASHATTENTION_DISABLE_SPLIT": True})
    assert select_backend(FITS).name == "flash3"
    with pytest.raises(ValueError, match="this build can't split keys"):
        select_backend(FITS, "flash3_split")


@pytest.mark.parametrize(
    ("queries", "heads", "keys", "splits"),
    [
        (4680, 12, 32760, 2),  # 3.4 rounds of tiles in 4; 6.7 of half the length in 7
        (4680, 12, 18720, 2),
        (1560, 12, 32760, 5),  # 1.2 rounds in 2
        (4680, 40, 32760, 1),  # 11.2 in 12: the merge would cost what is left to gain
        (4680, 12, 1560, 1),
    ],
)
def test_number_of_parts(queries: int, heads: int, keys: int, splits: int) -> None:
    assert choose_splits((1, queries, heads, 128), keys, 132) == splits


def test_flash3_equals_the_reference_while_the_window_fills_and_after(machine: Machine, calls: Calls) -> None:
    machine.gpu(9, 0)
    name = machine.use_on_cpu(machine.install_flash3(calls, FULL_BUILD))
    branches = open_rows(2)
    for _ in range(7):
        check_equal_to_reference(branches, name)
        advance(branches, 1)
    assert set(calls) == {"dense"}


@pytest.mark.parametrize(
    ("flags", "page_size", "served_by"),
    [(FULL_BUILD, 16, "paged"), (FULL_BUILD, 64, "varlen"), (FORWARD_ONLY_BUILD, 16, "varlen")],
)
@pytest.mark.parametrize("fragmented", [False, True])
def test_flash3_serves_ragged_rows_in_one_call(
    machine: Machine, calls: Calls, flags: dict, page_size: int, served_by: str, fragmented: bool
) -> None:
    """By the page table where the build has it; at pages of 64 it may load unwritten V whole (flash-attention#2374),
    and the fa3-fwd wheel has none."""
    machine.gpu(9, 0)
    name = machine.use_on_cpu(machine.install_flash3(calls, flags))
    branches = open_rows(3, page_size=page_size, fragmented=fragmented)
    for chunks, branch in zip((0, 2, 6), branches, strict=True):
        advance([branch], chunks)
    check_equal_to_reference(branches, name)
    assert calls == [served_by]


@pytest.mark.parametrize(("staging", "served_by"), [(True, "dense"), (False, "paged")])
def test_flash3_stages_fragmented_rows(machine: Machine, calls: Calls, staging: bool, served_by: str) -> None:
    """Gathering once a chunk and attending densely is faster than the page table in every step."""
    machine.gpu(9, 0)
    name = machine.use_on_cpu(machine.install_flash3(calls, FULL_BUILD))
    branches = open_rows(1, fragmented=True, staging=staging)
    for _ in range(6):
        check_equal_to_reference(branches, name)
        advance(branches, 1)
    assert set(calls) == {served_by}


def test_flash3_takes_what_was_built(machine: Machine, calls: Calls) -> None:
    machine.gpu(9, 0)
    backend = machine.install_flash3(calls, FORWARD_ONLY_BUILD, wheel=True)
    assert backend.refusals(FITS) == []
    assert "not torch.float16" in backend.refusals(replace(FITS, dtype=torch.float16))[0]
    assert "not 192" in backend.refusals(replace(FITS, head_dim=192))[0]
    assert machine.install_flash3(calls, FULL_BUILD).refusals(replace(FITS, dtype=torch.float16, head_dim=192)) == []


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((9, 0), None), ((8, 0), "compute capability 9.0 to 9.9, this one has 8.0"), ((10, 0), "this one has 10.0")],
)
def test_flash3_wants_a_hopper_gpu(machine: Machine, calls: Calls, capability: tuple, reason: str | None) -> None:
    machine.gpu(*capability)
    refusals = machine.install_flash3(calls, FULL_BUILD).refusals(FITS)
    assert (reason is None and not refusals) or reason in refusals[0]


def test_library_that_fails_to_import_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension built for another torch is neither missing nor usable."""
    machine.gpu(9, 0)

    def broken() -> None:
        raise ImportError("undefined symbol: _ZN3c105Error")

    monkeypatch.setattr(flash3, "find_flash3", broken)
    assert "undefined symbol" in flash3.BACKEND.refusals(FITS)[0]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    return tmp_path


def add_snapshot(hub_cache: Path, revision: str, *, kind: str = "kernels", age: int = 0, built: bool = True) -> None:
    """A download of the hub kernel as the ``kernels`` package leaves it: found by commit, without a named version."""
    build = hub_cache / f"{kind}--kernels-community--flash-attn3" / "snapshots" / revision / "build"
    build.mkdir(parents=True)
    if built:
        (build / "torch211-cxx11-cu130-x86_64-linux").mkdir()
    os.utime(build, (1e9 - age, 1e9 - age))


@pytest.mark.parametrize("kernels", [kernels_0_17, kernels_0_10])
@pytest.mark.parametrize("kind", ["kernels", "models"])
def test_flash3_from_the_hub_cache(
    machine: Machine, calls: Calls, hub_cache: Path, kernels: Callable, kind: str
) -> None:
    """The newest download, wherever this version of ``kernels`` keeps it; loaded once, and it computes."""
    machine.gpu(9, 0)
    machine.install(kernels(calls))
    add_snapshot(hub_cache, "older", kind=kind, age=100)
    add_snapshot(hub_cache, "newer", kind=kind)
    backend = flash3.make_backend()
    assert backend.refusals(FITS) == backend.refusals(replace(FITS, dtype=torch.float16)) == []
    library = libraries.find_flash3()
    assert library is not None and library.name == "kernels-community/flash-attn3" and library.paged is not None
    branches = open_rows(2)
    check_equal_to_reference(branches, machine.use_on_cpu(backend))
    advance(branches[1:], 2)
    check_equal_to_reference(branches, backend.name)
    assert calls == ["loaded newer", "dense", "paged"]


def test_installed_flash3_is_taken_before_the_hub_cache(machine: Machine, calls: Calls, hub_cache: Path) -> None:
    machine.install(kernels_0_17(calls))
    add_snapshot(hub_cache, "newer")
    machine.install_flash3(calls, FULL_BUILD)
    library = libraries.find_flash3()
    assert library is not None and library.name == "flash_attn_interface"


@pytest.mark.parametrize("installed", [False, True])
def test_nothing_is_downloaded(machine: Machine, calls: Calls, hub_cache: Path, installed: bool) -> None:
    """With the package and an empty cache, or a full cache without the package."""
    machine.gpu(9, 0)
    if installed:
        machine.install(kernels_0_17(calls))
    else:
        add_snapshot(hub_cache, "newer")
    assert libraries.find_flash3() is None
    assert "pip install fa3-fwd" in flash3.BACKEND.refusals(FITS)[0]


def test_hub_kernel_without_a_build_for_this_machine_says_so(machine: Machine, calls: Calls, hub_cache: Path) -> None:
    """Its error took down every call, also those that other backends serve."""
    machine.gpu(9, 0)
    machine.install(kernels_0_17(calls))
    add_snapshot(hub_cache, "newer", built=False)
    assert "has no build for this machine" in flash3.BACKEND.refusals(FITS)[0]
    assert select_backend(FITS).name == "sdpa"


# -- flash-attn 2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "splits", "served_by"),
    [(16, False, ["varlen"]), (16, True, ["num_splits=1", "varlen"]), (256, False, ["paged"])],
)
def test_flash2_serves_ragged_rows_in_one_call(
    machine: Machine, calls: Calls, page_size: int, splits: bool, served_by: list[str]
) -> None:
    """Split K/V is wrong with paging in some versions (pytorch#194167): one split, where the function has the word."""
    machine.gpu(8, 0)
    machine.install(flash2_module(calls, splits=splits))
    branches = open_rows(2, page_size=page_size)
    advance(branches[1:], 6)
    check_equal_to_reference(branches, machine.use_on_cpu(flash2.BACKEND))
    assert calls == served_by


@pytest.mark.parametrize("fragmented", [False, True])
def test_flash2_is_dense_on_a_view(machine: Machine, calls: Calls, fragmented: bool) -> None:
    machine.gpu(8, 0)
    machine.install(flash2_module(calls))
    branches = open_rows(2, fragmented=fragmented)
    name = machine.use_on_cpu(flash2.BACKEND)
    for _ in range(6):
        check_equal_to_reference(branches, name)
        advance(branches, 1)
    assert set(calls) <= {"dense", "varlen"}
    assert ("dense" in calls) or fragmented


# -- torch varlen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "page_size", "served_by"),
    [
        (torch_2_11_varlen, 16, "varlen"),
        (torch_2_11_varlen, 256, "varlen"),
        (torch_2_12_varlen, 16, "varlen"),
        (torch_2_12_varlen, 256, "paged"),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_torch_varlen_by_signature(
    machine: Machine, calls: Calls, make: Callable, page_size: int, served_by: str, ragged: bool
) -> None:
    machine.gpu(9, 0)
    machine.torch_varlen(make(calls))
    branches = open_rows(2, page_size=page_size)
    advance(branches[: 1 if ragged else 2], 2)
    check_equal_to_reference(branches, machine.use_on_cpu(varlen.BACKEND))
    assert calls == [served_by if ragged else "varlen"]


def test_torch_varlen_without_a_scale_is_refused(machine: Machine, calls: Calls) -> None:
    machine.gpu(9, 0)
    machine.torch_varlen(torch_2_10_varlen(calls))
    assert "use 2.11 or later" in varlen.BACKEND.refusals(FITS)[0]


def test_installed_torch_has_the_expected_signature(machine: Machine) -> None:
    function = libraries.find_torch_varlen()
    assert function is not None
    for parameter in ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale"):
        assert libraries.accepts(function, parameter)
    assert libraries.accepts(function, "block_table") == libraries.accepts(function, "seqused_k")


# -- ROCm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "library", "served_by"),
    [
        ((aiter_module, flash2_module), "aiter", ["aiter"]),
        ((flash2_module,), "flash-attn", ["varlen"]),
        ((), "sdpa", []),
    ],
)
@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_rocm_route(
    machine: Machine, calls: Calls, installed: tuple, library: str, served_by: list, fragmented: bool, ragged: bool
) -> None:
    """Pages of 16 never reach a kernel: the stubs refuse a block table and know no ``num_splits``."""
    machine.gpu(9, 4, hip="7.0")
    for make in installed:
        machine.install(make(calls))
    branches = open_rows(2, fragmented=fragmented)
    advance(branches[: 1 if ragged else 2], 2)
    assert rocm.choose_route().library == library
    check_equal_to_reference(branches, machine.use_on_cpu(rocm.BACKEND))
    assert calls == served_by


def test_rocm_single_query_goes_to_sdpa(machine: Machine, calls: Calls) -> None:
    """Kernels there are wrong at one query (aiter#4455)."""
    machine.gpu(9, 4, hip="7.0")
    machine.install(aiter_module(calls))
    check_equal_to_reference(open_rows(1), machine.use_on_cpu(rocm.BACKEND), num_tokens=1)
    assert calls == []


def test_rocm_reuses_the_staged_window(machine: Machine, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gather of the window a chunk, then the current rows only."""
    machine.gpu(9, 4, hip="7.0")
    machine.install(aiter_module(calls))
    name = machine.use_on_cpu(rocm.BACKEND)
    branches = open_rows(1, fragmented=True)
    advance(branches, 6)
    copies = []
    original = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *a, **k: copies.append(len(a[2])) or original(*a, **k))
    for _ in range(3):
        forward(branches, random_rows(branches, 24), backend=name, commit=False)
    assert copies == [96, 96] + [24, 24] * 2


# -- who is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "hip", "change", "chosen"),
    [
        ((9, 0), None, {}, "flash3"),
        ((9, 0), None, {"dtype": torch.float32}, "sdpa"),
        ((9, 0), None, {"head_dim": 12}, "sdpa"),
        ((8, 0), None, {}, "sdpa"),
        ((10, 0), None, {}, "sdpa"),
        ((9, 4), "7.0", {}, "rocm"),
        ((9, 4), "7.0", {"page_size": 256}, "rocm"),
        ((9, 4), "7.0", {"dtype": torch.float32}, "sdpa"),
    ],
)
def test_choice_by_platform(
    machine: Machine, calls: Calls, capability: tuple, hip: str | None, change: dict, chosen: str
) -> None:
    """ROCm tensors say they are CUDA tensors: with every library installed, no kernel for NVIDIA is reached there."""
    machine.gpu(*capability, hip=hip)
    machine.install(flash2_module(calls))
    machine.install(aiter_module(calls))
    backend = machine.install_flash3(calls, FULL_BUILD)
    machine.use(backend, *(module.BACKEND for module in ALL if module is not flash3))
    request = replace(FITS, is_hip=hip is not None, **change)
    assert select_backend(request).name == chosen
    if hip is not None:
        for name in ("flash3", "flash2", "varlen"):
            with pytest.raises(ValueError, match=f"{name}: does not run on ROCm"):
                select_backend(replace(FITS, is_hip=True), name)


def test_order_depends_on_the_kind_of_work(machine: Machine) -> None:
    machine.gpu(8, 0)
    first = replace(varlen.BACKEND, rank_for={"ragged": 1}, unavailable=None)
    machine.use(first, sdpa.BACKEND)
    assert [select_backend(replace(FITS, work=work)).name for work in ("dense", "ragged")] == ["sdpa", "varlen"]


def test_captured_graphs_that_fill_need_lengths_on_the_device(machine: Machine, calls: Calls) -> None:
    """FlashAttention 3 on a view has its length in the launch; a replay would read the length of the capture."""
    machine.gpu(9, 0)
    triton = replace(triton_paged.BACKEND, unavailable=None)
    machine.use(machine.install_flash3(calls, FULL_BUILD), sdpa.BACKEND, triton)
    replayed = replace(FITS, needs_device_lengths=True)
    assert select_backend(replayed).name == "triton"
    with pytest.raises(ValueError, match="flash3: takes lengths from the host"):
        select_backend(replayed, "flash3")


@pytest.mark.parametrize("module", [varlen, rocm], ids=lambda module: module.BACKEND.name)
@pytest.mark.parametrize("need", ["needs_mask", "needs_lse"])
def test_no_backend_drops_a_mask(machine: Machine, module: ModuleType, need: str) -> None:
    """Unknown keywords were once filtered out, masks with them (diffusers#12605)."""
    reasons = module.BACKEND.refusals(replace(FITS, **{need: True}))
    assert any("mask" in reason or "log-sum-exp" in reason for reason in reasons)


def test_nothing_installed_says_what_to_install(machine: Machine) -> None:
    machine.gpu(9, 0)
    machine.use(flash3.make_backend(), *(module.BACKEND for module in ALL if module is not flash3))
    with pytest.raises(ValueError, match="pip install fa3-fwd"):
        select_backend(FITS, "flash3")
    with pytest.raises(ValueError, match="pip install flash-attn"):
        select_backend(FITS, "flash2")
    with pytest.raises(ValueError, match="not a ROCm build"):
        select_backend(FITS, "rocm")
    assert select_backend(FITS).name == "sdpa"


def test_refused_backend_writes_nothing(machine: Machine, calls: Calls) -> None:
    machine.gpu(9, 0)
    branches = open_rows(1)
    context = PagedForwardContext(branches, num_tokens=24, backend="flash3").prepare()
    with pytest.raises(ValueError, match="flash3: runs on"):
        paged_write_attn(context.layer_inputs(0), *random_rows(branches, 24))
    assert branches[0].storage.key_pools[0].isnan().all()
