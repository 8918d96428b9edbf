"""The posteriors by name. A new posterior is one file with a subclass of `Posterior`, and one row here."""

from fedbe.errors import check_option
from fedbe.posterior.base import Posterior
from fedbe.posterior.direction_gaussian import DirectionGaussian
from fedbe.posterior.dirichlet import Dirichlet, UniformDirichlet
from fedbe.posterior.gaussian import Gaussian

POSTERIORS: dict[str, type[Posterior]] = {
    "gaussian": Gaussian,  # Eq. 5
    "gaussian-released": DirectionGaussian,  # the authors' program
    "dirichlet": Dirichlet,  # Eq. 7
    "dirichlet-released": UniformDirichlet,  # the authors' program
}


def get_posterior(name: str) -> type[Posterior]:
    """The class behind a name, or a SettingError that suggests the nearest name.

    Example:
        >>> get_posterior("dirichlet").__name__
        'Dirichlet'
    """
    check_option("posterior", name, POSTERIORS)
    return POSTERIORS[name]
