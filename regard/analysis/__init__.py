"""Looking at mechanisms: the matrix that each of them mixes positions with, and what models of them cost."""

from regard.analysis.mixing import mixing_matrix
from regard.analysis.planning import Estimate, Setting, estimate

__all__ = ["Estimate", "Setting", "estimate", "mixing_matrix"]
