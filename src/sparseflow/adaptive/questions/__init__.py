"""A user's own questions, from a file, as the task of a study: for any model that there is an adapter for."""

from __future__ import annotations

from sparseflow.adaptive.questions.file import Question, read
from sparseflow.adaptive.questions.task import Questions

__all__ = ["Question", "Questions", "read"]
