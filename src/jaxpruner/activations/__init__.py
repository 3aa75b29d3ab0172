"""Pruned activations: functions to call inside a model, and layers of an existing model made to prune theirs."""

from jaxpruner.activations.models import sparsify_activations as sparsify_activations
from jaxpruner.activations.models import summarize_activations as summarize_activations
from jaxpruner.activations.pruning import prune_act_struct as prune_act_struct
from jaxpruner.activations.pruning import prune_act_unstruct as prune_act_unstruct
from jaxpruner.activations.pruning import pruning_act_struct as pruning_act_struct
from jaxpruner.activations.pruning import puning_act_unstruct as puning_act_unstruct
