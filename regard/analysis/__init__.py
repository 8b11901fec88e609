"""Looking at mechanisms: the matrix that each of them mixes positions with, and what models of them cost."""

from regard.analysis.layer_costs import Setting
from regard.analysis.mixing import Mixing, mixing_matrix
from regard.analysis.planning import Estimate, estimate

__all__ = ["Estimate", "Mixing", "Setting", "estimate", "mixing_matrix"]
