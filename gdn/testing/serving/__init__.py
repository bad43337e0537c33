"""The serving layer under random schedules, against a plain fp64 simulation of each request."""

from gdn.testing.serving.scenario import Scenario
from gdn.testing.serving.stage import Stage
from gdn.testing.serving.truth import Truth

__all__ = ["Scenario", "Stage", "Truth"]
