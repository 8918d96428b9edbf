"""Distributions over global models, fitted to the clients' models (Section 3.3 of the paper)."""

from fedbe.posterior.base import Posterior, PosteriorSettings
from fedbe.posterior.direction_gaussian import DirectionGaussian
from fedbe.posterior.dirichlet import Dirichlet
from fedbe.posterior.gaussian import Gaussian
from fedbe.posterior.registry import POSTERIORS, get_posterior

__all__ = [
    "POSTERIORS",
    "DirectionGaussian",
    "Dirichlet",
    "Gaussian",
    "Posterior",
    "PosteriorSettings",
    "get_posterior",
]
