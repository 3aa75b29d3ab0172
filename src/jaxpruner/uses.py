"""How a model uses its parameters: the public names of `trace`."""

from jaxpruner.trace import UnsupportedPrimitive as UnsupportedPrimitive
from jaxpruner.trace import Use as Use
from jaxpruner.trace import UseGraph as UseGraph
from jaxpruner.trace import param_uses as param_uses
from jaxpruner.trace import with_input_axes as with_input_axes
from jaxpruner.trace.taps import run_with_taps as run_with_taps
