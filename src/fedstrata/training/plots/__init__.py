"""Plots: curves of runs, and diagnostics of local steps.

Every function takes plain data and a path, and returns the path; the suffix of the path chooses the format.
"""

from fedstrata.training.plots.axes import AXES as AXES
from fedstrata.training.plots.curves import RANGES as RANGES
from fedstrata.training.plots.curves import Runs as Runs
from fedstrata.training.plots.curves import plot as plot
from fedstrata.training.plots.diagnostics import plot_diagnostics as plot_diagnostics
from fedstrata.training.plots.figures import new_figure as new_figure
from fedstrata.training.plots.figures import write_figure as write_figure
