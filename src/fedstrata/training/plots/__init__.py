"""Plots: curves of runs, rankings of methods, searches of hyperparameters, and diagnostics of local steps.

Every function takes plain data and a path, and returns the path; the suffix of the path chooses the format.
"""

from fedstrata.training.plots.axes import AXES as AXES
from fedstrata.training.plots.curves import RANGES as RANGES
from fedstrata.training.plots.curves import Runs as Runs
from fedstrata.training.plots.curves import plot as plot
from fedstrata.training.plots.diagnostics import plot_diagnostics as plot_diagnostics
from fedstrata.training.plots.figures import new_figure as new_figure
from fedstrata.training.plots.figures import picture_at as picture_at
from fedstrata.training.plots.figures import write_figure as write_figure
from fedstrata.training.plots.ranking import Ranked as Ranked
from fedstrata.training.plots.ranking import plot_ranking as plot_ranking
from fedstrata.training.plots.searches import Trial as Trial
from fedstrata.training.plots.searches import plot_response as plot_response
from fedstrata.training.plots.searches import plot_search as plot_search
