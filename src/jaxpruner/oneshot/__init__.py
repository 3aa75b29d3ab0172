"""Models pruned once: trained ones by what their inputs do, untrained ones by derivatives of a loss.

Calibrated pruning speaks of four things. `WeightMatrices` say where a model reads a leaf as matrices, and how.
`CalibratedMatrices` are these with the statistics of their inputs. A `Block` holds the matrices that are pruned
together when blocks are pruned in turn. `PrunedLeaves` are the parameters while they are changed in place.

A trained model goes through these files, in this order:

1. `one_call`: `prune` makes the pruner of that name. `plan` makes it, too, and asks it what it would do.
2. `calibrated_pruning`: `instant_sparsify`, which calls all that follows.
3. `leaf_targets`: what each leaf is to reach (`given_masks`: masks from elsewhere; `named_leaves`: what settings name).
4. `followed_leaves`: which leaves the model contracts with data, and why the others stay dense.
   `weight_matrices`: how it reads matrices from them (`contracted_axes`: which axes are summed over; `matrix_layout`:
   which axes of an array are inputs and outputs).
   `calibrated_plan`: tells all this beforehand, as a table.
5. `at_once_or_in_blocks`: prunes all leaves at once, or one block after another.
   `calibration`: statistics of all leaves at once. `sequential`: of one block after another (`blocks`: which and when).
   Both take them through `shared_inputs` (which matrices meet the same value), `moments` (what one contraction adds)
   and `input_statistics` (the record, and its checks).
   `owl_blocks`, `owl`: sparsities by outliers.
6. `pruning_run`: prunes matrices, in the order of `pruning_queue`. For each it calls the pruner's `prepare` and
   `prune_matrices`; `pruned_leaves` reads the weights before, and writes them back after.

The files of `Wanda`, `RIA` and `SparseGPT` hold these hooks; `output_portions` lets matrices share Wanda's program. The
mathematics on matrices stands apart and knows of no model: `matrix_scores` (scores), `matrix_masks` (masks of scores),
`sparsegpt_matrices` (SparseGPT block by block), `elimination` (SparseGPT within a block), `cholesky` (its factors) and
`least_squares` (for whole inputs that are gone).

An untrained model needs no statistics: `one_call`, then `pruning_at_initialization`, then `snip`, `grasp` or `synflow`.
Any other algorithm that is given a model goes from `one_call` to `along_inputs`. All three look at `batches` first.

What a subclass of `CalibratedPruning` overrides:

- `prune_matrices`: the weights and the mask of some matrices; the only hook that each algorithm needs.
- `score_matrices` of `Wanda` and `RIA`: the scores by which weights are ranked, and channels in `structure`.
- `kind`: which statistics are taken, `'second_moment'` or `'gram'`.
- `per`: what is ranked together, unless the user says so.
- `begin`: looks at the model before any of it is pruned.
- `prepare`: computes something of the statistics once for all leaves that share them, such as a decomposition.
- `reconstruct_matrices`: changes the weights that masks from elsewhere keep.
- `doubt`, `warn_of_doubts`: what to warn of in one leaf, and the one warning for all leaves.
- `check_type`: refuses further sparsity types.

Its tests: rows of `CALIBRATED` in `tests/oneshot/test_nothing_silent.py`, of the first test in
`tests/oneshot/test_pruners.py`, and of `SCORES` there if it ranks by scores; the reference goes to `references.py`.

What a subclass of `PruningAtInitialization` overrides:

- `calculate_scores`: the scores by what was summed over the batches, in `grads`; each algorithm needs it.
- `passes`: what is summed, one function for each pass over the batches; gradients of the loss, if it is left out.
- `function`: which function the user gives, `'loss_fn'` or `'apply_fn'`.
- `as_loss`: makes the loss of that function, and may replace the batches.
- `rounds`: how often weights are scored and pruned, unless the user says so.

Its tests: rows of `REFERENCES`, `GIVEN` and `CASES` in `tests/oneshot/test_pruning_at_initialization.py`.
"""

from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning as CalibratedPruning
from jaxpruner.oneshot.calibration import CalibratedMatrices as CalibratedMatrices
from jaxpruner.oneshot.calibration import Calibration as Calibration
from jaxpruner.oneshot.calibration import calibrate as calibrate
from jaxpruner.oneshot.grasp import GraSP as GraSP
from jaxpruner.oneshot.input_statistics import InputStatistics as InputStatistics
from jaxpruner.oneshot.matrix_layout import MatrixLayout as MatrixLayout
from jaxpruner.oneshot.matrix_scores import ria_scores as ria_scores
from jaxpruner.oneshot.matrix_scores import wanda_scores as wanda_scores
from jaxpruner.oneshot.one_call import plan as plan
from jaxpruner.oneshot.one_call import prune as prune
from jaxpruner.oneshot.owl import outlier_shares as outlier_shares
from jaxpruner.oneshot.owl import owl_sparsities as owl_sparsities
from jaxpruner.oneshot.pruning_at_initialization import (
    PruningAtInitialization as PruningAtInitialization,
)
from jaxpruner.oneshot.ria import RIA as RIA
from jaxpruner.oneshot.snip import SNIP as SNIP
from jaxpruner.oneshot.sparsegpt import SparseGPT as SparseGPT
from jaxpruner.oneshot.sparsegpt_matrices import prune_by_sparsegpt as prune_by_sparsegpt
from jaxpruner.oneshot.synflow import SynFlow as SynFlow
from jaxpruner.oneshot.wanda import Wanda as Wanda
