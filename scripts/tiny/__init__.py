"""Data, training and scoring of the built-in tiny text-to-video model (64x64 pixels, 16 frames a second)."""
