"""Fitting a training step into a memory budget: measuring, predicting, choosing, reporting."""

from actnn.planning.estimate import Estimate, Row, estimate
from actnn.planning.fit import Planner, fit
from actnn.planning.plan import Plan
from actnn.planning.report import Report, report
from actnn.planning.sizes import format_bytes, parse_bytes

__all__ = [
    "Estimate",
    "Plan",
    "Planner",
    "Report",
    "Row",
    "estimate",
    "fit",
    "format_bytes",
    "parse_bytes",
    "report",
]
