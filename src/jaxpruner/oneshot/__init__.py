"""Models pruned once: trained ones by what their inputs do, untrained ones by derivatives of a loss.

A trained model goes through these files, in this order:

1. `prune`: makes the pruner of that name, or asks it for its plan.
2. `calibrated_pruning`: `instant_sparsify`. It chooses the leaves (`leaves`: what the model does with each, and which
   ones settings name), takes statistics, and prunes leaf by leaf.
3. `calibrate`: statistics of the inputs of all matrices at once, or, by `sequential`, of one block after another.
   `owl`: sparsities by outliers. `matrices`: how weight matrices are read from a leaf, their scores and masks.
4. `wanda` (and RIA), `sparsegpt`: what is done with a matrix.

An untrained model needs no statistics: `prune`, then `at_initialization`.

An algorithm of one's own derives from `CalibratedPruning` or `PruningAtInitialization`, whose docstrings say what it
overrides. Its tests: rows of `ALGORITHMS` in `tests/oneshot/test_trained.py`, or of `REFERENCES` in
`tests/oneshot/test_at_initialization.py`; the reference goes to `references.py`.
"""

from jaxpruner.oneshot.at_initialization import SNIP as SNIP
from jaxpruner.oneshot.at_initialization import GraSP as GraSP
from jaxpruner.oneshot.at_initialization import PruningAtInitialization as PruningAtInitialization
from jaxpruner.oneshot.at_initialization import SynFlow as SynFlow
from jaxpruner.oneshot.calibrate import CalibratedMatrices as CalibratedMatrices
from jaxpruner.oneshot.calibrate import Calibration as Calibration
from jaxpruner.oneshot.calibrate import InputStatistics as InputStatistics
from jaxpruner.oneshot.calibrate import calibrate as calibrate
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning as CalibratedPruning
from jaxpruner.oneshot.matrices import wanda_scores as wanda_scores
from jaxpruner.oneshot.owl import owl_sparsities as owl_sparsities
from jaxpruner.oneshot.prune import plan as plan
from jaxpruner.oneshot.prune import prune as prune
from jaxpruner.oneshot.sparsegpt import SparseGPT as SparseGPT
from jaxpruner.oneshot.sparsegpt import prune_by_sparsegpt as prune_by_sparsegpt
from jaxpruner.oneshot.wanda import RIA as RIA
from jaxpruner.oneshot.wanda import Wanda as Wanda
from jaxpruner.oneshot.wanda import ria_scores as ria_scores
