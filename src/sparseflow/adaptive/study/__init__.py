"""Studies: controllers of a model, trained and judged against their rivals by a task and a profile of plans.

::

    folder/outcomes/                     what every plan made of every sample; latencies of their sizes
    folder/controllers/seed-0/ …         trainings by GRPO, and in supervised/ by imitating the oracle
    folder/controllers.safetensors       those of the seed that did best on the validation split
    folder/worth.json                    accuracy of plans, for choosing without controllers
    folder/judged.json, report.html      what was found, and its page

A study that was stopped goes on where it was when the same call is made again.
"""

from __future__ import annotations

from sparseflow.adaptive.questions.task import SampleCounts
from sparseflow.adaptive.study.page import write_page
from sparseflow.adaptive.study.run import StudyConfig, evaluate, train

__all__ = ["SampleCounts", "StudyConfig", "evaluate", "train", "write_page"]
