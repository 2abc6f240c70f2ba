"""Replicas that come and go. Only a run with `elastic.lighthouse` imports this room."""

from lezo_ds.replicas.quorum import FEW_LINES, Replicas, StepLostError, reaches
from lezo_ds.replicas.transport import Lines, whole_lines

__all__ = ["FEW_LINES", "Lines", "Replicas", "StepLostError", "reaches", "whole_lines"]
