"""Original checkpoints: every published layout loads bit-equal, everything else is refused and changes nothing."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from diffusers_ardiff.checkpoints import CheckpointReport, infer_transformer_config, load_ar_checkpoint

Weights = dict[str, torch.Tensor]

ORACLES = Path(os.environ.get("ARDIFF_ORACLES", Path(__file__).parent / "oracles"))
TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 48,
    "freq_dim": 64,
    "ffn_dim": 128,
    "num_layers": 2,
}
IMAGE: dict[str, Any] = {**TINY, "in_channels": 36, "image_dim": 40, "added_kv_proj_dim": 64}

# diffusers -> original, the other way round than the package has it. Order matters: block rules before top rules.
INVERSE_RULES = [
    (r"^(blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out\.", "head.head."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"^(blocks\.\d+)\.norm2\.", r"\1.norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"_attn\.to_out\.0\.", "_attn.o."),
    (r"_attn\.to_([qkv])\.", r"_attn.\1."),
    (r"_attn\.add_([kv])_proj\.", r"_attn.\1_img."),
    (r"_attn\.norm_added_k\.", "_attn.norm_k_img."),
]

WRAPPERS = [None, "generator_ema", "generator", "model", "state_dict"]
PREFIXES: dict[str, Callable[[str], str]] = {
    "none": lambda name: name,
    "model": lambda name: f"model.{name}",
    "fsdp": lambda name: f"model._fsdp_wrapped_module.{name}",
    "fsdp inside": lambda name: "model._fsdp_wrapped_module." + into_blocks(name, "_fsdp_wrapped_module."),
    "checkpointing inside": lambda name: into_blocks(name, "_fsdp_wrapped_module._checkpoint_wrapped_module."),
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled inside": lambda name: "generator.model._orig_mod." + into_blocks(name, "_orig_mod."),
    "diffusion model": lambda name: f"model.diffusion_model.{name}",
    "twice": lambda name: f"model.model.{name}",
}


def into_blocks(name: str, inserted: str) -> str:
    return re.sub(r"^(blocks\.\d+\.)", rf"\g<1>{inserted}", name)


def to_original(name: str) -> str:
    for pattern, replacement in INVERSE_RULES:
        name = re.sub(pattern, replacement, name)
    return name


def tiny_transformer(seed: int, config: dict[str, Any] | None = None) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    return WanTransformer3DModel(**(config or TINY))


def snapshot(transformer: torch.nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in transformer.state_dict().items()}


def assert_bit_equal(actual: torch.nn.Module, expected: Weights) -> None:
    weights = actual.state_dict()
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


@pytest.fixture(scope="module")
def trained() -> Weights:
    """The weights in the files, in diffusers names."""
    return snapshot(tiny_transformer(seed=1))


@pytest.fixture(scope="module")
def original(trained: Weights) -> Weights:
    return {to_original(name): tensor for name, tensor in trained.items()}


@pytest.fixture
def base() -> WanTransformer3DModel:
    return tiny_transformer(seed=2)


@pytest.fixture
def unchanged(base: WanTransformer3DModel) -> Iterator[WanTransformer3DModel]:
    """A base transformer that must still have its own weights when the test is over."""
    before = snapshot(base)
    yield base
    assert_bit_equal(base, before)


def refused(transformer: WanTransformer3DModel, path: Path, content: Any, message: str) -> None:
    save = save_file if path.suffix == ".safetensors" else torch.save
    save(content, path)
    with pytest.raises(ValueError, match=message) as error:
        load_ar_checkpoint(transformer, path)
    assert str(path) in str(error.value)


# ---------------------------------------------------------------------------------------------------- what loads


def test_the_inverse_map_gives_the_published_names(original: Weights) -> None:
    published = {
        "blocks.0.self_attn.q.weight",
        "blocks.0.cross_attn.norm_k.weight",
        "blocks.0.modulation",
        "blocks.1.norm3.weight",
        "head.modulation",
        "head.head.bias",
        "time_projection.1.bias",
    }
    assert published <= original.keys()


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize("prefix", list(PREFIXES))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_and_prefixes(
    wrapper: str | None, prefix: str, layout: str, base: WanTransformer3DModel, trained: Weights, tmp_path: Path
) -> None:
    rename = to_original if layout == "original" else str
    weights = {PREFIXES[prefix](rename(name)): tensor for name, tensor in trained.items()}
    torch.save(weights if wrapper is None else {wrapper: weights, "step": 3}, tmp_path / "model.pt")
    report = load_ar_checkpoint(base, tmp_path / "model.pt")
    assert_bit_equal(base, trained)
    assert (report.num_tensors, report.wrapper_key, report.layout) == (len(trained), wrapper, layout)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
def test_file_types(suffix: str, base: WanTransformer3DModel, original: Weights, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(original, path)
    assert load_ar_checkpoint(base, str(path)).wrapper_key is None
    assert infer_transformer_config(base.state_dict(), attention_head_dim=32)["num_layers"] == 2
    assert_bit_equal(base, {name: original[to_original(name)] for name in base.state_dict()})


def test_ema_is_preferred_unless_told_otherwise(base: WanTransformer3DModel, trained: Weights, tmp_path: Path) -> None:
    raw = {name: tensor + 1 for name, tensor in trained.items()}
    path = tmp_path / "model.pt"
    torch.save({"model": {}, "generator": raw, "generator_ema": trained}, path)
    assert load_ar_checkpoint(base, path).wrapper_key == "generator_ema"
    assert_bit_equal(base, trained)
    assert load_ar_checkpoint(base, path, use_ema=False).wrapper_key == "generator"
    assert_bit_equal(base, raw)


def test_image_weights(tmp_path: Path) -> None:
    source, target = tiny_transformer(1, IMAGE), tiny_transformer(2, IMAGE)
    weights = {f"model.{to_original(name)}": tensor for name, tensor in source.state_dict().items()}
    assert "model.img_emb.proj.3.weight" in weights
    assert "model.blocks.0.cross_attn.norm_k_img.weight" in weights
    save_file(weights, tmp_path / "model.safetensors")
    report = load_ar_checkpoint(target, tmp_path / "model.safetensors")
    assert_bit_equal(target, snapshot(source))
    assert (report.config["image_dim"], report.config["added_kv_proj_dim"]) == (40, 64)


def test_names_the_host_ignores_are_ignored(base: WanTransformer3DModel, trained: Weights, tmp_path: Path) -> None:
    save_file({**trained, "blocks.0.attn2.norm_added_q.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    assert load_ar_checkpoint(base, tmp_path / "model.safetensors").num_tensors == len(trained)


@pytest.mark.parametrize("max_shard_size", ["60KB", "10GB"])
def test_folders(max_shard_size: str, base: WanTransformer3DModel, trained: Weights, tmp_path: Path) -> None:
    tiny_transformer(seed=1).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "60KB")
    assert load_ar_checkpoint(base, tmp_path).layout == "diffusers"
    assert_bit_equal(base, trained)


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_the_base_are_kept(file_dtype: torch.dtype, original: Weights, tmp_path: Path) -> None:
    tiny_transformer(seed=2).save_pretrained(tmp_path / "base")
    base = WanTransformer3DModel.from_pretrained(tmp_path / "base", torch_dtype=torch.bfloat16)
    before = {name: tensor.dtype for name, tensor in base.state_dict().items()}
    assert before["scale_shift_table"] == torch.float32
    assert before["proj_out.weight"] == torch.bfloat16
    weights = {name: tensor.to(file_dtype) for name, tensor in original.items()}
    torch.save({"generator": weights}, tmp_path / "model.pt")
    load_ar_checkpoint(base, tmp_path / "model.pt")
    assert {name: tensor.dtype for name, tensor in base.state_dict().items()} == before
    assert_bit_equal(base, {name: weights[to_original(name)].to(dtype) for name, dtype in before.items()})


def test_parameters_stay_the_same_objects(base: WanTransformer3DModel, trained: Weights, tmp_path: Path) -> None:
    """Captured graphs and optimizers hold parameters by address."""
    addresses = {name: parameter.data_ptr() for name, parameter in base.named_parameters()}
    torch.save(trained, tmp_path / "model.pt")
    load_ar_checkpoint(base, tmp_path / "model.pt")
    assert {name: parameter.data_ptr() for name, parameter in base.named_parameters()} == addresses
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in base.parameters())


def test_torch_files_are_mapped_and_never_unpickled(
    base: WanTransformer3DModel, trained: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(trained, tmp_path / "model.pt")
    seen: list[dict[str, Any]] = []
    load = torch.load

    def recording_load(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", recording_load)
    load_ar_checkpoint(base, tmp_path / "model.pt")
    assert [(kwargs["weights_only"], kwargs["mmap"]) for kwargs in seen] == [(True, True)]


def oracle_files() -> list[Any]:
    files = sorted(ORACLES.glob("*.safetensors"))
    reason = f"no oracle files in {ORACLES}: set ARDIFF_ORACLES to their folder"
    return files or [pytest.param(ORACLES, marks=pytest.mark.skip(reason=reason))]


@pytest.mark.parametrize("path", oracle_files(), ids=lambda path: path.stem)
def test_oracle_weights(path: Path, tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in load_file(path).items() if name.startswith("model.")}
    save_file(weights, tmp_path / "weights.safetensors")
    config = infer_transformer_config(weights, attention_head_dim=32)
    transformer = WanTransformer3DModel(**config)
    report = load_ar_checkpoint(transformer, tmp_path / "weights.safetensors")
    assert report == CheckpointReport(num_tensors=69, wrapper_key=None, layout="original", config=config)
    assert_bit_equal(transformer, {name: weights[f"model.{to_original(name)}"] for name in transformer.state_dict()})


# ------------------------------------------------------------------------------------------------------ inference


@pytest.mark.parametrize("config", [TINY, IMAGE, {**TINY, "cross_attn_norm": False}])
@pytest.mark.parametrize("rename", [str, to_original, lambda name: f"model.{to_original(name)}"])
def test_inferred_config_builds_a_transformer_that_fits(config: dict[str, Any], rename: Callable[[str], str]) -> None:
    weights = {rename(name): tensor for name, tensor in tiny_transformer(1, config).state_dict().items()}
    inferred = infer_transformer_config(weights, attention_head_dim=32)
    assert {name: inferred[name] for name in config} == config
    assert WanTransformer3DModel(**inferred).state_dict().keys() == tiny_transformer(1, config).state_dict().keys()


@pytest.mark.parametrize(
    ("layers", "dim", "ffn_dim", "channels", "heads"),
    [(30, 1536, 8960, 16, 12), (40, 5120, 13824, 16, 40), (30, 3072, 14336, 48, 24)],
)
def test_public_sizes(layers: int, dim: int, ffn_dim: int, channels: int, heads: int) -> None:
    with torch.device("meta"):
        weights = WanTransformer3DModel(
            num_layers=layers, num_attention_heads=heads, ffn_dim=ffn_dim, in_channels=channels, out_channels=channels
        ).state_dict()
    config = infer_transformer_config(weights)
    assert config["num_attention_heads"] * config["attention_head_dim"] == dim
    assert (config["num_layers"], config["ffn_dim"], config["num_attention_heads"]) == (layers, ffn_dim, heads)
    assert (config["in_channels"], config["out_channels"], config["patch_size"]) == (channels, channels, (1, 2, 2))
    assert (config["text_dim"], config["freq_dim"]) == (4096, 256)


def test_inference_refuses_what_is_no_wan_transformer(trained: Weights) -> None:
    with pytest.raises(ValueError, match=r"not a Wan transformer: \['patch_embedding.weight'.*\['encoder.weight'\]"):
        infer_transformer_config({"encoder.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"patch_embedding.weight is \(64, 16, 1, 2, 2\).*head size 128"):
        infer_transformer_config(trained)
    flat = {**trained, "patch_embedding.weight": torch.ones(64, 64)}
    with pytest.raises(ValueError, match=r"patch_embedding.weight is \(64, 64\).*Conv3d"):
        infer_transformer_config(flat, attention_head_dim=32)


# -------------------------------------------------------------------------------------------- refused: the file


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_pickled_code_is_refused_and_not_run(
    unchanged: WanTransformer3DModel, trained: Weights, tmp_path: Path
) -> None:
    content = {"generator": trained, "config": Bomb(tmp_path / "ran")}
    refused(unchanged, tmp_path / "model.pt", content, r"needs pickled code \('\w+\.mkdir'\).*save_file")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("kind", ["empty", "git-lfs pointer", "cut short"])
def test_damaged_files(
    name: str, kind: str, unchanged: WanTransformer3DModel, original: Weights, tmp_path: Path
) -> None:
    path = tmp_path / name
    (save_file if path.suffix == ".safetensors" else torch.save)(original, path)
    whole = path.read_bytes()
    contents = {"empty": b"", "git-lfs pointer": b"version https://git-lfs", "cut short": whole[: len(whole) // 2]}
    path.write_bytes(contents[kind])
    with pytest.raises(ValueError, match=rf"{name}' can not be read.*[Dd]ownload it again"):
        load_ar_checkpoint(unchanged, path)


def test_old_torch_files_are_refused(unchanged: WanTransformer3DModel, original: Weights, tmp_path: Path) -> None:
    torch.save(original, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"can not be read: allowed is a whole file in torch\.save's zip format"):
        load_ar_checkpoint(unchanged, tmp_path / "old.pt")


def test_other_paths(unchanged: WanTransformer3DModel, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.pt' does not exist: give the path"):
        load_ar_checkpoint(unchanged, tmp_path / "absent.pt")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ValueError, match=r"ends in '\.gguf': allowed are \['\.pt', '\.pth', '\.bin', '\.safetensors'\]"
    ):
        load_ar_checkpoint(unchanged, tmp_path / "model.gguf")
    refused(unchanged, tmp_path / "tensor.pt", torch.ones(3), "holds a Tensor: allowed is a dict")


def test_folders_without_one_model(unchanged: WanTransformer3DModel, original: Weights, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds \[\]: allowed is one.*'transformer' folder"):
        load_ar_checkpoint(unchanged, tmp_path)
    save_file(original, tmp_path / "a.safetensors")
    save_file(original, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"holds \['a\.safetensors', 'b\.safetensors'\]: allowed is one"):
        load_ar_checkpoint(unchanged, tmp_path)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ("{", ValueError, "not a safetensors index"),
        ("[]", ValueError, "not a safetensors index"),
        ({"weight_map": {"x": "../a.safetensors"}}, ValueError, r"outside its folder: \['\.\./a\.safetensors'\]"),
        ({"weight_map": {"x": "c.safetensors"}}, FileNotFoundError, r"1 missing shards.*\['c\.safetensors'\]"),
        ({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}, ValueError, "71 weights are in more than one"),
    ],
)
def test_bad_indexes(
    index: Any,
    error: type[Exception],
    message: str,
    unchanged: WanTransformer3DModel,
    original: Weights,
    tmp_path: Path,
) -> None:
    save_file(original, tmp_path / "a.safetensors")
    save_file(original, tmp_path / "b.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(error, match=message.replace("71", str(len(original)))):
        load_ar_checkpoint(unchanged, tmp_path)


# ---------------------------------------------------------------------------------------- refused: the content


@pytest.mark.parametrize("wrapper", [None, "generator_lora", "state_dict"])
def test_lora_files(wrapper: str | None, unchanged: WanTransformer3DModel, tmp_path: Path) -> None:
    lora = {
        "base_model.model.blocks.0.self_attn.q.lora_A.weight": torch.ones(4, 64),
        "base_model.model.blocks.0.self_attn.q.lora_B.weight": torch.ones(64, 4),
    }
    content = lora if wrapper is None else {wrapper: lora}
    refused(unchanged, tmp_path / "lora.pt", content, r"LoRA file.*load it with pipe\.load_lora_weights on top of")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("blocks.0.ffn.0.weight", torch.ones(128, 64).to(torch.float8_e4m3fn)),
        ("blocks.0.ffn.0.weight", torch.ones(128, 64).to(torch.float8_e5m2)),
        ("blocks.0.ffn.0.weight", torch.ones(128, 64, dtype=torch.int8)),
        ("blocks.0.ffn.0.weight_packed", torch.ones(128, 32, dtype=torch.uint8)),
        ("blocks.0.ffn.0.weight_scale", torch.ones(1)),
        ("blocks.0.ffn.0.weight_scale_2", torch.ones(1)),
        ("blocks.0.ffn.0.weight_scale_inv", torch.ones(1)),
        ("blocks.0.ffn.0.input_scale", torch.ones(1)),
        ("blocks.0.ffn.0.scale_weight", torch.ones(1)),
        ("blocks.0.ffn.0.weight_amax", torch.ones(1)),
        ("blocks.0.ffn.0._extra_state", torch.ones(1)),
        ("scaled_fp8", torch.ones(1)),
    ],
)
def test_packed_files(
    name: str, tensor: torch.Tensor, unchanged: WanTransformer3DModel, original: Weights, tmp_path: Path
) -> None:
    kind = str(tensor.dtype).removeprefix("torch.")
    message = rf"quantized weights packed for other kernels.*'{name}' is {kind}\).*use the unquantized file"
    refused(unchanged, tmp_path / "model.safetensors", {**original, name: tensor}, message)


def test_entries_that_are_not_plain_tensors(
    unchanged: WanTransformer3DModel, original: Weights, tmp_path: Path
) -> None:
    message = r"1 entries of the file are not plain tensors, for example \['step'\].*\['generator_ema', 'generator'"
    refused(unchanged, tmp_path / "a.pt", {**original, "step": 3}, message)
    sparse = {**original, "head.modulation": original["head.modulation"].to_sparse()}
    refused(unchanged, tmp_path / "b.pt", {"model": sparse}, r"1 entries of model are not.*\['head\.modulation'\]")
    meta = {**original, "head.modulation": original["head.modulation"].to("meta")}
    refused(unchanged, tmp_path / "c.pt", meta, r"not plain tensors, for example \['head\.modulation'\]")


def test_missing_and_unexpected_names(unchanged: WanTransformer3DModel, original: Weights, tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in original.items() if ".0.cross_attn." not in name}
    weights |= {f"delta_embedder.{index}.weight": torch.ones(1) for index in range(7)}
    message = (
        r"10 weights are missing from it \(first: (\[('blocks\.0\.attn2\.[a-z_0.]+'(, )?){5}\])\), "
        r"7 are unexpected \(first: (\[('delta_embedder\.[0-4]\.weight'(, )?){5}\])\)"
    )
    refused(unchanged, tmp_path / "model.safetensors", weights, message)
    refused(unchanged, tmp_path / "empty.pt", {}, rf"{len(original)} weights are missing from it.*0 are unexpected")


def test_a_file_of_another_model_names_what_is_missing(unchanged: WanTransformer3DModel, tmp_path: Path) -> None:
    message = r"weights are missing from it.*1 are unexpected \(first: \['decoder\.weight'\]\)"
    refused(unchanged, tmp_path / "vae.safetensors", {"decoder.weight": torch.ones(3)}, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, r"file is 3 layers x 64, the base is 2 x 64: use a base folder of the same size"),
        ({"num_attention_heads": 4}, r"file is 2 layers x 128, the base is 2 x 64: use a base folder"),
        ({"ffn_dim": 96}, r"same size \(ffn_dim 96 against 128\)"),
        ({"in_channels": 36}, r"same size \(in_channels 36 against 16\)"),
        ({"out_channels": 48}, r"same size \(out_channels 48 against 16\)"),
        ({"text_dim": 32}, r"same size \(text_dim 32 against 48\)"),
        ({"freq_dim": 32}, r"same size \(freq_dim 32 against 64\)"),
        ({"patch_size": (1, 1, 1)}, r"same size \(patch_size \(1, 1, 1\) against \(1, 2, 2\)\)"),
    ],
)
def test_other_sizes(change: dict[str, Any], message: str, unchanged: WanTransformer3DModel, tmp_path: Path) -> None:
    weights = {to_original(n): t for n, t in tiny_transformer(1, {**TINY, **change}).state_dict().items()}
    refused(unchanged, tmp_path / "model.safetensors", weights, message)


def test_single_tensors_that_do_not_fit(unchanged: WanTransformer3DModel, original: Weights, tmp_path: Path) -> None:
    weights = {**original, "blocks.1.self_attn.o.bias": torch.ones(63)}
    message = r"1 weights do not fit.*blocks\.1\.attn1\.to_out\.0\.bias is torch\.float32 \(63,\) instead of \(64,\)"
    refused(unchanged, tmp_path / "shape.safetensors", weights, message)
    weights = {**original, "blocks.1.self_attn.o.bias": torch.ones(64, dtype=torch.int64)}
    refused(
        unchanged, tmp_path / "dtype.safetensors", weights, r"to_out\.0\.bias is torch\.int64 \(64,\).*floating-point"
    )


def test_one_weight_under_two_names(unchanged: WanTransformer3DModel, original: Weights, tmp_path: Path) -> None:
    for double in ("model.head.head.bias", "proj_out.bias"):
        message = rf"1 weights occur more than once.*\['head\.head\.bias', '{double}'\]"
        refused(unchanged, tmp_path / "model.pt", {**original, double: torch.ones(64)}, message)


# ---------------------------------------------------------------------------------- refused: the transformer


def test_transformers_that_can_not_be_written(original: Weights, tmp_path: Path) -> None:
    message = r"of the transformer is Tensor torch\.\w+ on (meta|cpu): allowed are plain floating-point tensors"
    with torch.device("meta"):
        empty = WanTransformer3DModel(**TINY)
    refused(empty, tmp_path / "model.pt", original, message)
    quantized = tiny_transformer(2)
    quantized.proj_out.weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.int8), requires_grad=False)
    before = snapshot(quantized)
    refused(quantized, tmp_path / "model.pt", original, message)
    assert_bit_equal(quantized, before)


def test_lora_before_checkpoint_is_refused(original: Weights, tmp_path: Path) -> None:
    transformer = tiny_transformer(2)
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    before = snapshot(transformer)
    refused(transformer, tmp_path / "model.pt", original, "carries LoRA adapters: load the checkpoint first")
    assert_bit_equal(transformer, before)


def test_compiled_transformers_can_be_written(trained: Weights, original: Weights, tmp_path: Path) -> None:
    transformer = tiny_transformer(2)
    compiled = torch.compile(transformer.blocks[0])
    assert isinstance(compiled, torch.nn.Module)
    transformer.blocks[0] = compiled
    torch.save(original, tmp_path / "model.pt")
    load_ar_checkpoint(transformer, tmp_path / "model.pt")
    weights = {name.replace("_orig_mod.", ""): tensor for name, tensor in transformer.state_dict().items()}
    assert all(torch.equal(weights[name], tensor) for name, tensor in trained.items())
