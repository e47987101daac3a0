"""nanoteach: an LLM inference engine that is also a course."""

from nanoteach.engine import Engine
from nanoteach.types import RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "RequestOutput", "SamplingParams"]
