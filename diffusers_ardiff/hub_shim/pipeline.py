"""For `DiffusionPipeline.from_pretrained(folder, custom_pipeline=diffusers_ardiff.HUB_SHIM, trust_remote_code=True)`."""

from diffusers_ardiff import ARDiffusionPipeline

__all__ = ["ARDiffusionPipeline"]
