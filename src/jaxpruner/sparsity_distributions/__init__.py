"""How a total sparsity is shared among the leaves: a distribution maps parameters to one target per leaf.

Any function `params -> tree of floats, None where dense` is a distribution; these are the two that papers use.
"""

from jaxpruner.sparsity_distributions.checks import SparsityMap as SparsityMap
from jaxpruner.sparsity_distributions.checks import check_custom_map as check_custom_map
from jaxpruner.sparsity_distributions.checks import check_density as check_density
from jaxpruner.sparsity_distributions.checks import check_sparsity as check_sparsity
from jaxpruner.sparsity_distributions.distributions import NOT_GIVEN as NOT_GIVEN
from jaxpruner.sparsity_distributions.distributions import NotGiven as NotGiven
from jaxpruner.sparsity_distributions.distributions import erk as erk
from jaxpruner.sparsity_distributions.distributions import uniform as uniform
from jaxpruner.sparsity_distributions.erdos_renyi import get_n_zeros as get_n_zeros
from jaxpruner.sparsity_distributions.erdos_renyi import (
    get_sparsities_erdos_renyi as get_sparsities_erdos_renyi,
)
from jaxpruner.sparsity_distributions.explanations import why_dense as why_dense
from jaxpruner.sparsity_distributions.filters import KERNEL_FILTER_FN as KERNEL_FILTER_FN
from jaxpruner.sparsity_distributions.filters import NOT_BIAS_FILTER as NOT_BIAS_FILTER
from jaxpruner.sparsity_distributions.filters import NOT_DIM_ONE_FILTER as NOT_DIM_ONE_FILTER
from jaxpruner.sparsity_distributions.filters import NOT_DIM_ONE_FILTER_FN as NOT_DIM_ONE_FILTER_FN
from jaxpruner.sparsity_distributions.filters import FilterFn as FilterFn
from jaxpruner.sparsity_distributions.filters import FilterFnType as FilterFnType
