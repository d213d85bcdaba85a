"""Background load on a CPU or a GPU, held at the share that was asked for.

`Stressor` starts one process a CPU (or one for a GPU) that works and rests in cycles of about 100 ms. Each
process measures what share of its device it really got and adjusts its duty until that is what was asked for.

What a level means: the share of its device's time that the stressor uses *while nothing else wants the
device*, of each CPU it is pinned to. That is also what a reader of live load sees before a model starts. As
soon as other work competes, a fair scheduler gives both less than they want; a loop that stays closed would
then demand more and more, and every level would end as a stressor that never rests. So reach the level first
(`wait_until_steady`), then keep the duty still while measuring (`held`); what the stressor got meanwhile is
told by `between`.
"""

from __future__ import annotations

from sparseflow.core.load.stressor import KINDS, Stressor

__all__ = ["KINDS", "Stressor"]
