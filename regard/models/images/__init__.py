"""Models of images: classifiers and detectors."""

from regard.models.images.swin import SwinTransformer

__all__ = ["SwinTransformer"]
