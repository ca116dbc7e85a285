"""The attempts at a plan of a call.

attempts         the graphs to plan, each where none before it fits
graph_planner    the plan of an attempt: with slices, or without if that is faster
refusal          the error where none fits
"""

from .attempts import Attempt as Attempt
from .attempts import Attempts as Attempts
from .graph_planner import GraphPlanner as GraphPlanner
from .graph_planner import Planned as Planned
from .graph_planner import PricedAttempts as PricedAttempts
from .graph_planner import PricedStep as PricedStep
from .graph_planner import Refused as Refused
