"""The serving layer under random schedules, against a plain fp64 simulation of each request."""

from gdn.testing.serving.scenario import Scenario
from gdn.testing.serving.truth import Truth
from gdn.testing.serving.truth import Weights

__all__ = ["Scenario", "Truth", "Weights"]
