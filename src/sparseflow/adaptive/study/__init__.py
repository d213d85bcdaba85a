"""Studies: train controllers of a model and compare them with baselines, on a task and a profile of plans.

::

    out_dir/outcomes/                     correctness of every plan on every sample; latencies of their sizes
    out_dir/controllers/seed-0/ …         trainings by GRPO; in supervised/ by imitating the oracle
    out_dir/controllers.safetensors       controllers of the seed with the best validation score
    out_dir/plan_quality.json             accuracy of plans, for selection without controllers
    out_dir/results.json, report.html     results, and their page

An interrupted study is resumed by the same call.
"""

from __future__ import annotations

from sparseflow.adaptive.questions.task import SampleCounts
from sparseflow.adaptive.study.page import write_page
from sparseflow.adaptive.study.run import StudyConfig, evaluate, train

__all__ = ["SampleCounts", "StudyConfig", "evaluate", "train", "write_page"]
