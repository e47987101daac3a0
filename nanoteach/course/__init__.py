"""The course's own machinery: exercises, their checks, and the learner's progress.

Knows: which functions of the package a learner writes anew, and how an answer takes their place.
Does not know: anything about serving. The engine never imports it.
"""

from nanoteach.course.display import Live, quiz, show
from nanoteach.course.exercises import exercise
from nanoteach.course.parts import installed
from nanoteach.course.progress import open_notebook, predict, predictions, reveal

__all__ = [
    "Live",
    "exercise",
    "installed",
    "open_notebook",
    "predict",
    "predictions",
    "quiz",
    "reveal",
    "show",
]
