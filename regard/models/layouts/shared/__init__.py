"""What several families share.

Reading options: `options`, `rotary`. Tables: `rows`. Parts of layers, each with its table: `parts`, `latent`, `kimi`.
Whole decoders: `stacks`, `deepseek`.
"""
