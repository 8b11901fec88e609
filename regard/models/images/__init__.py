"""Models of images: classifiers and detectors, the loss of a set of detections; pictures in, names out."""

from regard.models.images.classifying import Guess, classify
from regard.models.images.coatnet import COATNETS, CoAtNet, CoAtNetShape
from regard.models.images.deformable import DeformableAttention
from regard.models.images.detecting import Found, detect, draw, found_in
from regard.models.images.detr import DETR, LearnedPlaces, PlacedAttention, QueryBlock, SinePlaces
from regard.models.images.matching import Detections, Objects, SetLoss, SetLosses, Weights
from regard.models.images.pictures import Preprocessing, open_picture
from regard.models.images.preparing import preparation, preprocess
from regard.models.images.resnet import RESNETS, ResNet, ResNetShape
from regard.models.images.swin import SwinTransformer
from regard.models.images.vit import ImageEncoder

__all__ = [
    "COATNETS",
    "DETR",
    "ImageEncoder",
    "RESNETS",
    "CoAtNet",
    "CoAtNetShape",
    "DeformableAttention",
    "Detections",
    "Found",
    "Guess",
    "LearnedPlaces",
    "Objects",
    "PlacedAttention",
    "Preprocessing",
    "QueryBlock",
    "ResNet",
    "ResNetShape",
    "SetLoss",
    "SetLosses",
    "SinePlaces",
    "SwinTransformer",
    "Weights",
    "classify",
    "detect",
    "draw",
    "found_in",
    "open_picture",
    "preparation",
    "preprocess",
]
