"""The published autoregressive Wan checkpoints, as data: what their files look like, and which recipe goes with them.

Read from the authors' code and model cards. No real file has been loaded here: tests build files of exactly these
layouts at tiny sizes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointFamily:
    """One family of published checkpoints.

    Attributes:
        name: of the family.
        files: hub id and file of each published checkpoint.
        wrapper: entry of the file that holds the weights; None: the file itself.
        prefix: before each weight name.
        layout: weight names, "original" (Wan) or "diffusers".
        dtype: of the weights in the file.
        suffix: ".pt", ".safetensors", or "" for a diffusers folder.
        lora_file: a LoRA that belongs to the base file; "": none.
        recipe: name of the recipe that comes with the package; None: none of them samples it.
        use_ema: whether `generator_ema` is the reference where a file has it and `generator`.
        oracle: reference rollouts whose weights went through this layout, chunk size and window; empty: none.
        refused: why the files are refused; "": they load.
        note: what a user has to know.
    """

    name: str
    files: tuple[str, ...]
    wrapper: str | None = None
    prefix: str = ""
    layout: str = "original"
    dtype: str = "float32"
    suffix: str = ".pt"
    lora_file: str = ""
    recipe: str | None = None
    use_ema: bool = True
    oracle: tuple[str, ...] = ()
    refused: str = ""
    note: str = ""


FAMILIES: tuple[CheckpointFamily, ...] = (
    CheckpointFamily(
        name="Self-Forcing",
        files=("gdhe17/Self-Forcing checkpoints/self_forcing_dmd.pt",),
        wrapper="generator_ema",
        prefix="model.",
        recipe="self-forcing",
        oracle=("full_history", "image_to_video", "odd_grid"),
    ),
    CheckpointFamily(
        name="LongLive",
        files=("Efficient-Large-Model/LongLive-1.3B models/longlive_base.pt",),
        wrapper="generator",
        prefix="model.",
        lora_file="models/lora.pt",
        recipe="longlive",
        oracle=("longlive_recache", "longlive_recache_full_window", "prompt_switch", "window_9_sink_3"),
        note="base and LoRA (rank 256) in one call: `ar_checkpoint=`, `ar_lora=`",
    ),
    CheckpointFamily(
        name="LongLive 2, 5B",
        files=("Efficient-Large-Model LongLive-2.0-5B model_bf16.pt",),
        wrapper="generator",
        prefix="model.",
        dtype="bfloat16",
        recipe="longlive-2",
        note="over Wan-AI/Wan2.2-TI2V-5B-Diffusers; its authors sample with UniPC, here it is the few-step rule",
    ),
    CheckpointFamily(
        name="LongLive 2, NVFP4",
        files=("Efficient-Large-Model LongLive-2.0-5B model_te.pt, model_4o6.pt",),
        wrapper="generator",
        prefix="model.",
        dtype="uint8",
        refused="packed for TransformerEngine or fouroversix kernels",
        note="use model_bf16.pt",
    ),
    CheckpointFamily(
        name="Krea Realtime 14B",
        files=("krea/krea-realtime-video krea-realtime-video-14b.safetensors",),
        prefix="model.",
        dtype="bfloat16",
        suffix=".safetensors",
        recipe="krea",
        note="over Wan-AI/Wan2.1-T2V-14B-Diffusers; weights for non-commercial use",
    ),
    CheckpointFamily(
        name="CausVid",
        files=(
            "tianweiy/CausVid autoregressive_checkpoint/model.pt",
            "lightx2v/Wan2.1-T2V-14B-CausVid",
        ),
        wrapper="generator",
        prefix="model.",
        recipe="causvid",
        note="weights for non-commercial use",
    ),
    CheckpointFamily(
        name="Causal-Forcing, chunkwise",
        files=("zhuhz22/Causal-Forcing chunkwise/causal_forcing.pt, chunkwise/longvideo.pt",),
        wrapper="generator",
        prefix="model._fsdp_wrapped_module.",
        recipe="causal-forcing-chunkwise",
    ),
    CheckpointFamily(
        name="Causal-Forcing, framewise",
        files=("zhuhz22/Causal-Forcing framewise/causal_forcing.pt",),
        wrapper="generator",
        prefix="model._fsdp_wrapped_module.",
        recipe="causal-forcing-framewise",
        oracle=("framewise_window_5_sink_1",),
    ),
    CheckpointFamily(
        name="Causal-Forcing++, 2 steps",
        files=("zhuhz22/Causal-Forcing causal-forcing++/framewise-2step.pt",),
        wrapper="generator_ema",
        prefix="model._fsdp_wrapped_module.",
        recipe="causal-forcing-framewise-2step",
    ),
    CheckpointFamily(
        name="Causal-Forcing++, 1 step",
        files=("zhuhz22/Causal-Forcing causal-forcing++/framewise-1step.pt",),
        wrapper="generator_ema",
        prefix="model._fsdp_wrapped_module.",
        recipe="causal-forcing-framewise-1step",
    ),
    CheckpointFamily(
        name="Rolling Forcing",
        files=("TencentARC/RollingForcing checkpoints/rolling_forcing_dmd.pt",),
        wrapper="generator_ema",
        prefix="model.",
        recipe="rolling-forcing",
        note="licence of its own",
    ),
    CheckpointFamily(
        name="Reward-Forcing",
        files=("daydreamlive/Reward-Forcing-T2V-1.3B rewardforcing.pt",),
        wrapper="generator_ema",
        prefix="model.",
        recipe="reward-forcing",
        note="its authors blend evicted keys into the sink; here the sink stays as written",
    ),
    CheckpointFamily(
        name="MemFlow",
        files=("daydreamlive/MemFlow base.pt",),
        wrapper="generator",
        prefix="model.",
        lora_file="lora.pt",
        note="its memory bank is not built; `longlive` has its chunk, window and steps",
    ),
    CheckpointFamily(
        name="StreamDiffusionV2",
        files=("jerryfeng/StreamDiffusionV2 wan_causal_dmd_v2v/model.pt",),
        wrapper="generator",
        prefix="model.",
        use_ema=False,
        note="video to video with one noise level a row of a batch, which no recipe here does; `--raw` where a file has both",
    ),
    CheckpointFamily(
        name="Self-Forcing in fp8 or nvfp4",
        files=("lightx2v/Self-Forcing-FP8", "lightx2v/Self-Forcing-NVFP4"),
        dtype="float8_e4m3fn",
        suffix=".safetensors",
        refused="packed for other kernels",
        note="use the file of Self-Forcing",
    ),
    CheckpointFamily(
        name="diffusers folders of a causal class",
        files=("wlsaidhi/SFWan2.1-T2V-1.3B-Diffusers",),
        layout="diffusers",
        dtype="bfloat16",
        suffix="",
        recipe="self-forcing",
        note="a transformer class that diffusers does not have (`CausalWanTransformer3DModel`) is loaded as "
        "`WanTransformer3DModel` where every weight fits",
    ),
    CheckpointFamily(
        name="two experts",
        files=("rand0nmr/SFWan2.2-T2V-A14B-Diffusers", "FastVideo/SFWan2.2-I2V-A14B-Preview-Diffusers"),
        layout="diffusers",
        dtype="bfloat16",
        suffix="",
        refused="transformer_2 would need a cache of its own",
    ),
    CheckpointFamily(
        name="models with layers of their own",
        files=(
            "FastVideo/LingBot-World-Fast-Diffusers",
            "robbyant/lingbot-world-v2-14b-causal-fast",
            "FastVideo/Matrix-Game-2.0-*-Diffusers",
            "nvidia/AnyFlow-FAR-Wan2.1-1.3B-Diffusers",
        ),
        layout="diffusers",
        dtype="bfloat16",
        suffix="",
        refused="camera, action or delta layers that the stock transformer lacks",
        note="diffusers itself runs AnyFlow",
    ),
)
