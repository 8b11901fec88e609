"""Looking at mechanisms: the matrix that each of them mixes positions with."""

from regard.analysis.mixing import mixing_matrix

__all__ = ["mixing_matrix"]
