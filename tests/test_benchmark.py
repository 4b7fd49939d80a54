"""The op benchmark at sizes a CPU can take: the state it measures, and what it reports."""

import json
import runpy
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import CountingBackend
from tiny_components import QUICK, host_state, make_pipeline, record_pools

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.attention import fused_write_refusals
from diffusers_ardiff.benchmarks import (
    OpCase,
    Timing,
    anchor_cases,
    commands,
    measure_op,
    measure_write,
    order_cases,
    time_interleaved,
)
from diffusers_ardiff.benchmarks.decode import DecodeCase, describe_decode, measure_decode
from diffusers_ardiff.benchmarks.dense_roll import DenseWindow, measure_dense_roll
from diffusers_ardiff.benchmarks.models import build_pipeline, random_embeds, windowed
from diffusers_ardiff.benchmarks.op import SteadyState
from diffusers_ardiff.benchmarks.report import describe
from diffusers_ardiff.benchmarks.rollout import RolloutSettings, count_chunks, measure_rollout
from diffusers_ardiff.benchmarks.write import WriteInputs, norm_rope, norm_rope_scatter
from diffusers_ardiff.pipelines.warmup import WarmupReport
from diffusers_ardiff.recipes import load_recipe

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"
ONE_STEP = QUICK.replace(
    chunk_frames=1, num_sink_frames=0, num_window_frames=2, denoising_steps=(1000,), first_chunk_frames=None
)
TINY = {"num_heads": 2, "head_dim": 8, "num_queries": 24, "num_keys": 120, "sink_tokens": 24}


@pytest.mark.parametrize("fragmented", [False, True])
def test_measured_state_is_steady(fragmented: bool) -> None:
    """The window is full, the ring has wrapped, and every backend has rows of its own."""
    state = SteadyState(OpCase(**TINY, fragmented=fragmented), ["sdpa", "reference"], CPU)
    for context in state.contexts.values():
        (span,) = context.spans
        assert span.kv_len == 120
        assert span.start >= 120
        assert context.branches[0].run.is_contiguous is not fragmented
    assert len({context.branches[0].run.pages for context in state.contexts.values()}) == 2
    state.close()
    assert state.manager.allocator.num_used == 0


@pytest.mark.parametrize("fragmented", [False, True])
def test_op_result(fragmented: bool) -> None:
    case = OpCase(**TINY, fragmented=fragmented, dtype=torch.float32)
    result = measure_op(case, backends=["sdpa", "reference"], device=CPU, warmup=1, repeats=3)
    assert set(result["op"]) == {"sdpa", "reference"}
    for entry in result["op"].values():
        assert 0 < entry["p10_ms"] <= entry["median_ms"] <= entry["p90_ms"]
        mean = (entry["first_ms"] + 4 * entry["median_ms"]) / 5 if fragmented else entry["median_ms"]
        assert entry["ratio"]["sdpa"] == pytest.approx(mean / result["dense"]["sdpa"]["median_ms"])
    json.dumps(result)


def test_first_step_gathers_the_window_and_later_steps_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SteadyState(OpCase(**TINY, fragmented=True), ["sdpa", "reference"], CPU)
    copies: list[int] = []
    original = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *a, **k: copies.append(len(a[2])) or original(*a, **k))
    for call in (state.op("sdpa"), state.op("sdpa"), state.op_with_new_history("sdpa"), state.op("sdpa")):
        call(0)
    assert copies == [120, 120, 24, 24, 120, 120, 24, 24]


def test_ragged_state_has_rows_of_different_length() -> None:
    state = SteadyState(OpCase(**TINY, rows=3), ["sdpa", "reference"], CPU)
    for context in state.contexts.values():
        assert [span.kv_len for span in context.spans] == [48, 96, 120]
        assert context.spans[-1].start >= 120
    assert state.op("sdpa")(0).shape == (3, 24, 2, 8)
    state.close()
    assert state.manager.allocator.num_used == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_masked_state_has_three_spans(rows: int) -> None:
    state = SteadyState(OpCase(**TINY, rows=rows, masked=True, dtype=torch.float32), ["sdpa", "reference"], CPU)
    mask = state.contexts["sdpa"].mask
    assert mask is not None
    visible = mask.dense(CPU)[-1]
    # All of the history, and the spans of the chunk up to the own one.
    assert visible.sum(-1).tolist() == [104] * 8 + [112] * 8 + [120] * 8
    torch.testing.assert_close(state.op("sdpa")(0)[-1].isnan().any(), torch.tensor(False))
    state.close()


@pytest.mark.parametrize("change", [{"rows": 2}, {"masked": True}, {"rows": 2, "fragmented": True}])
def test_work_without_a_dense_twin_has_an_order_but_no_ratio(change: dict) -> None:
    case = OpCase(**TINY, **change, dtype=torch.float32)
    result = measure_op(case, backends=["reference", "sdpa"], device=CPU, warmup=1, repeats=3)
    assert result["dense"] == {}
    assert sorted(result["order"]) == ["reference", "sdpa"]
    times = [result["op"][name] for name in result["order"]]
    means = [entry.get("chunk_mean_ms", entry["median_ms"]) for entry in times]
    assert means == sorted(means)
    assert all(entry["ratio"] == {} for entry in times)


def test_order_cases_cover_every_kind_of_work() -> None:
    kinds = {(case.rows > 1, case.masked, case.fragmented) for case in order_cases()}
    assert kinds == {(r, m, f) for r, m in [(0, 0), (1, 0), (0, 1)] for f in (0, 1)}


def test_write_result() -> None:
    result = measure_write(OpCase(**TINY), device=CPU, warmup=1, repeats=3, compiled=False)
    assert fused_write_refusals("cpu", torch.bfloat16, 8)
    assert set(result["write"]) == {"op", "scatter", "prepare_eager"}
    assert all(entry["gb_per_s"] > 0 for entry in result["write"].values())


def test_inductor_writes_what_eager_does() -> None:
    result = measure_write(OpCase(**TINY, dtype=torch.float32), device=CPU, warmup=1, repeats=1)
    assert set(result["write"]) == {"op", "scatter", "prepare_eager", "prepare_inductor", "prepare_inductor_all"}
    state = SteadyState(OpCase(**TINY, dtype=torch.float32), ["sdpa"], CPU)
    layer, rows, inputs = state.inputs("sdpa", 0), state.rows[0], WriteInputs.random(state.case, CPU)
    expected = norm_rope(rows.query, rows.keys, inputs)
    slots = layer.slot_mapping.flatten()
    query = torch.compile(norm_rope_scatter, fullgraph=True)(rows, inputs, slots, *layer[:2])
    torch.testing.assert_close(query, expected[0])
    torch.testing.assert_close(layer.key_pool[slots], expected[1][0])
    assert torch.equal(layer.value_pool[slots], rows.values[0])
    state.close()


def test_more_queries_than_the_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="120 queries do not fit into a window of 96"):
        OpCase(**TINY | {"num_queries": 120})


def test_anchor_cases() -> None:
    shapes = {(case.num_heads, case.num_queries, case.num_keys, case.fragmented) for case in anchor_cases()}
    assert shapes == {
        (12, 4680, 18720, False),
        (12, 4680, 32760, False),
        (12, 1560, 32760, False),
        (40, 4680, 32760, False),
        (12, 4680, 32760, True),
    }


def test_variants_run_in_turns() -> None:
    order: list[str] = []
    variants = {name: lambda index, name=name: order.append(f"{name}{index}") for name in "ab"}
    times = time_interleaved(variants, device=CPU, warmup=1, repeats=2)
    assert order == ["a0", "b0", "a0", "b0", "a1", "b1"]
    assert set(times) == {"a", "b"}


def test_timing_of_samples() -> None:
    assert Timing.of([2.0]) == Timing(median_ms=2.0, p10_ms=2.0, p90_ms=2.0)
    assert Timing.of([1.0, 2.0, 30.0]).median_ms == 2.0


@pytest.mark.parametrize(
    "mode", [[], ["--fragmented"], ["--ragged", "2", "--masked"], ["--write-only", "--eager-only"]]
)
def test_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: list[str]
) -> None:
    shape = [
        "--heads",
        "2",
        "--head-dim",
        "8",
        "--queries",
        "24",
        "--keys",
        "96",
        "120",
        "--warmup",
        "1",
        "--repeats",
        "2",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "op", *shape, *mode, "--output", str(tmp_path / "op.json")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "op.json").read_text())
    assert [result["case"]["num_keys"] for result in report["results"]] == [96, 120]
    assert all(result["label"] in printed for result in report["results"])


class TestRollout:
    """The long-rollout benchmark on tiny components; its numbers are the timer's, so only what they say of is tested."""

    def test_reports_every_chunk_and_a_constant_footprint(self) -> None:
        pipe = make_pipeline(recipe=ONE_STEP)
        result = measure_rollout(pipe, RolloutSettings(num_frames=4 * 64, decode=False))
        assert len(result.chunks) == 64
        assert (result.first_steady_chunk, result.compared) == (3, 30)
        assert result.footprint_after_fill == result.footprint_at_end
        assert result.footprint_at_end.table_width == -(-2 * 6 // 16)
        assert result.last_seconds == statistics.median(result.chunk_seconds[-30:])
        assert result.after_fill_seconds == statistics.median(result.chunk_seconds[3:33])
        for chunk in result.chunks:
            assert 0 < chunk.to_latents <= chunk.to_frames
            assert chunk.commit_before + chunk.to_frames <= chunk.seconds
        json.dumps(result.to_dict())
        text = describe(pipe.recipe, result, 4)
        assert "window 2 (0+2) latent frames, chunk 1, 1 steps + commit at 0, decoder none, 64 chunks" in text

    def test_makes_as_many_chunks_as_are_measured(self) -> None:
        pipe = make_pipeline(recipe=ONE_STEP)
        result = measure_rollout(pipe, RolloutSettings(measured_chunks=4))
        assert len(result.chunks) == 3 + 4 + 2 and result.compared == 2
        assert result.planned_bytes == pipe.plan_memory(text_len=512).peak_bytes
        assert result.peak_over_plan is None

    def test_refuses_a_rollout_too_short_to_compare(self) -> None:
        """The message gave a smallest number and no reason for it."""
        with pytest.raises(ValueError, match="num_frames must be at least 252, got 100: the window is full after"):
            measure_rollout(make_pipeline(recipe=ONE_STEP), RolloutSettings(num_frames=100))

    def test_full_history_has_no_steady_state(self) -> None:
        recipe = load_recipe("self-forcing")
        with pytest.raises(ValueError, match="keeps the full history"):
            windowed(recipe, None, None)
        changed = windowed(recipe, 3, 9)
        assert (changed.num_sink_frames, changed.num_window_frames, changed.max_latent_frames) == (3, 9, None)


class TestDenseRoll:
    """The baseline is only worth its name if it makes the same video."""

    @pytest.mark.parametrize("name", list(commands.BASELINES))
    @pytest.mark.parametrize(("sink", "window", "first"), [(3, 9, None), (0, 6, None), (1, 5, None), (2, 4, 1)])
    def test_same_latents_as_the_paged_cache(self, sink: int, window: int, first: int | None, name: str) -> None:
        recipe = QUICK.replace(num_sink_frames=sink, num_window_frames=window, first_chunk_frames=first)
        pipe = make_pipeline(recipe)
        settings = RolloutSettings(recipe=recipe, measured_chunks=4, seed=3)
        dense: list[torch.Tensor] = []
        seconds = measure_dense_roll(pipe, settings, dense.append, commands.BASELINES[name])
        embeds = random_embeds(pipe, CPU)
        call = {"generator": torch.Generator().manual_seed(3), "output_type": "latent", "recipe": recipe}
        with pipe.stream(prompt_embeds=embeds, **call) as stream:
            ours = [next(stream).latents for _ in dense]
        assert len(seconds) == len(dense) == count_chunks(settings, recipe, 4) and min(seconds) > 0
        for left, right in zip(dense, ours, strict=True):
            assert ((left - right).norm() / right.norm()).item() < 1e-4
        # The window did slide, and what it holds matters.
        wider = recipe.replace(num_window_frames=window + 30)
        call |= {"generator": torch.Generator().manual_seed(3), "recipe": wider}
        with pipe.stream(prompt_embeds=embeds, **call) as stream:
            other = [next(stream).latents for _ in dense]
        assert ((dense[-1] - other[-1]).norm() / other[-1].norm()).item() > 1e-3

    def test_window_rolls_by_copying(self) -> None:
        window = DenseWindow(sink=2, window=4)
        assert [window.place(start, 2) for start in (0, 2, 4, 6, 6, 8)] == [
            (0, 0),
            (0, 2),
            (0, 4),
            (2, 4),
            (0, 4),
            (2, 4),
        ]

    def test_published_loop_asks_the_device_in_every_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, item = [], torch.Tensor.item
        monkeypatch.setattr(torch.Tensor, "item", lambda tensor: asked.append(tensor.dtype) or item(tensor))
        pipe = make_pipeline(recipe=ONE_STEP)
        counts = []
        for layer_type in commands.BASELINES.values():
            asked.clear()
            seconds = measure_dense_roll(pipe, RolloutSettings(measured_chunks=2), layer_type=layer_type)
            counts.append(asked.count(torch.long))
        assert counts == [0, len(seconds) * 2 * len(pipe.transformer.blocks) * 2]  # a step and the commit, two levels

    def test_leaves_the_transformer_as_it_was(self) -> None:
        pipe = make_pipeline(recipe=ONE_STEP)
        before = host_state(pipe.transformer)
        measure_dense_roll(pipe, RolloutSettings(measured_chunks=2))
        assert host_state(pipe.transformer) == before

    def test_backend_without_a_dense_twin(self) -> None:
        with pytest.raises(ValueError, match="no kernel equal to backend 'reference' on cpu"):
            measure_dense_roll(make_pipeline(recipe=ONE_STEP), RolloutSettings(backend="reference"))


def test_rollout_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    make_pipeline(recipe=ONE_STEP).save_pretrained(folder)
    output = tmp_path / "rollout.json"
    arguments = ["--model", str(folder), "--sink-frames", "1", "--window-frames", "2", "--measured-chunks", "2"]
    arguments += ["--baseline", "dense-roll", "--device", "cpu", "--decoder", "light", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "rollout", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    (result,) = json.loads(output.read_text())["results"]
    assert (result["window"], result["decoder"]) == ("3 (1+2)", "light")
    baseline = result["baseline"]
    assert baseline["ratio"] == pytest.approx(baseline["steady_seconds"] / baseline["ours"])
    assert baseline["ours"] == result["alone"]["transformer_seconds"] > 0 < result["alone"]["decode_seconds"]
    assert result["pixel_fps"] == pytest.approx(4 / result["mean_seconds"])
    assert "window 3 (1+2) latent frames" in printed and f"{baseline['ratio']:.2f} x" in printed


@pytest.mark.parametrize("peak", [None, 2**30], ids=["cpu", "gpu"])
def test_plot_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: int | None) -> None:
    """Time and memory a chunk, from files that were measured on another machine."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    chunks = [{"seconds": 0.1 + index, "peak_bytes": peak} for index in range(3)]
    result = {"window": "3 (1+2)", "decoder": "light", "chunks": chunks}
    result["baseline"] = {"name": "dense-roll", "chunk_seconds": [0.2, 0.3]}
    source, chart = tmp_path / "long.json", tmp_path / "charts" / "long.png"
    source.write_text(json.dumps({"results": [result]}))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "plot", str(source), "--plot", str(chart)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


def test_rollout_script_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rollouts run in the pool that the warm-up left, and compile nothing more."""
    torch._dynamo.reset()
    counting, pools = CountingBackend("eager"), []
    plain = ARDiffusionPipeline.warmup

    def counted(self: ARDiffusionPipeline, *, compile: bool, **call: Any) -> WarmupReport:
        report = plain(self, compile={"backend": counting} if compile else False, **call)
        pools.append(self._warm.manager)
        return report

    monkeypatch.setattr(ARDiffusionPipeline, "warmup", counted)
    folder, output = tmp_path / "model", tmp_path / "rollout.json"
    make_pipeline(recipe=ONE_STEP).save_pretrained(folder)
    arguments = ["rollout", "--model", str(folder), "--measured-chunks", "2", "--device", "cpu", "--latents-only"]
    arguments += ["--kv-dtype", "float8"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--compile", "--output", str(output)])
    with record_pools() as made:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    (result,) = json.loads(output.read_text())["results"]
    assert [pool() for pool in made] == pools and len(counting.graphs) == 1
    assert result["kv_dtype"] == "float8" and pools[0].storage.dtype == torch.float8_e4m3fn
    assert result["forwards"] == {"compiled": True, "graphs": False, "fused_gelu": False}
    assert (result["warmup"]["num_graphs"], result["warmup"]["num_compiled_shapes"]) == (0, 1)
    assert "forwards compiled: warm after" in capsys.readouterr().out
    torch._dynamo.reset()


def test_rollout_script_warm_against_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baseline is the stock blocks, eager: neither compiled nor with a fused GELU, which come after it."""
    torch._dynamo.reset()
    counting, seen = CountingBackend("eager"), []
    plain, dense = ARDiffusionPipeline.warmup, commands.measure_dense_roll

    def counted(self: ARDiffusionPipeline, *, compile: bool, **call: Any) -> WarmupReport:
        return plain(self, compile={"backend": counting} if compile else False, **call)

    def noted(pipeline: ARDiffusionPipeline, settings: RolloutSettings, **options: Any) -> list[float]:
        block = pipeline.transformer.blocks[0]
        seen.append((type(block.ffn.net[0]).__name__, block._compiled_call_impl))
        return dense(pipeline, settings, **options)

    monkeypatch.setattr(ARDiffusionPipeline, "warmup", counted)
    monkeypatch.setattr(commands, "measure_dense_roll", noted)
    folder, output = tmp_path / "model", tmp_path / "rollout.json"
    make_pipeline(recipe=ONE_STEP).save_pretrained(folder)
    arguments = [
        "rollout",
        "--model",
        str(folder),
        "--measured-chunks",
        "2",
        "--device",
        "cpu",
        "--output",
        str(output),
    ]
    arguments += ["--compile", "--fuse-gelu", "--baseline", "dense-roll", "--latents-only"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (result,) = json.loads(output.read_text())["results"]
    baseline, printed = result["baseline"], capsys.readouterr().out
    assert seen == [("GELU", None)] * 2 and len(counting.graphs) == 1
    assert baseline["ratio"] == pytest.approx(baseline["steady_seconds"] / baseline["ours"])
    assert baseline["ratio_eager"] == pytest.approx(baseline["steady_seconds"] / baseline["ours_eager"])
    assert result["forwards"] == {"compiled": True, "graphs": False, "fused_gelu": True}
    assert "dense-roll (stock blocks, eager)" in printed and "ours (compiled, GELU fused)" in printed
    assert "both eager: dense-roll" in printed
    torch._dynamo.reset()


def test_decode_result() -> None:
    case = DecodeCase(height=16, width=16, chunk_frames=1, dtype=torch.float32, repeats=2)
    plain, fast = measure_decode(case, ["light", "light-channels-last"], CPU)
    assert (plain["variant"], plain["max_error"]) == ("light", 0)
    assert 0 < fast["max_error"] < 1e-5
    assert plain["state_bytes"] == fast["state_bytes"] == 3 * 4 * (256 + 4 * 128 + 16 * 64) * 4
    assert plain["planned_work_bytes"] > 0 and "light-channels-last" in describe_decode(case, fast)
    with pytest.raises(ValueError, match=r"unknown variants \['vae'\]"):
        measure_decode(case, ["vae"], CPU)


@pytest.mark.parametrize(("name", "parameters"), [("wan-1.3b", 1.42e9), ("wan-14b", 14.29e9)])
def test_presets_have_the_real_shapes(name: str, parameters: float) -> None:
    pipe = build_pipeline(name, torch.device("meta"))
    assert sum(weight.numel() for weight in pipe.transformer.parameters()) == pytest.approx(parameters, rel=0.005)
    assert pipe.transformer.dtype == pipe.vae.dtype == torch.bfloat16
    assert pipe.transformer.blocks[0].scale_shift_table.dtype == torch.float32
    assert pipe.transformer.config.text_dim == 4096 and pipe.vae.config.z_dim == 16
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ValueError, match="unknown model 'wan-5b'"):
        build_pipeline("wan-5b", torch.device("meta"))


def test_benchmarks_need_no_video_library() -> None:
    """They are run on machines lent for an hour: once, figures were lost because the script imported PyAV."""
    code = f"import runpy, sys; sys.modules['av'] = None; runpy.run_path({str(SCRIPT)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
