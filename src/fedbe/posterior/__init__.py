"""Distributions over global models, fitted to the clients' models (Section 3.3 of the paper)."""

from fedbe.posterior.base import Posterior
from fedbe.posterior.dirichlet import Dirichlet
from fedbe.posterior.gaussian import DirectionGaussian, DirectionMoments, Gaussian

__all__ = ["DirectionGaussian", "DirectionMoments", "Dirichlet", "Gaussian", "Posterior"]
