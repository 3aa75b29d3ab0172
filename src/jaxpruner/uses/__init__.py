"""How a model uses each of its parameters: the traced program is walked through once."""

from jaxpruner.uses.graph import UnsupportedPrimitive as UnsupportedPrimitive
from jaxpruner.uses.graph import Use as Use
from jaxpruner.uses.graph import UseGraph as UseGraph
from jaxpruner.uses.input_axes import with_input_axes as with_input_axes
from jaxpruner.uses.taps import run_with_taps as run_with_taps
from jaxpruner.uses.tracing import param_uses as param_uses
