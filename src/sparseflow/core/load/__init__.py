"""Background load on a CPU or a GPU at a requested level.

`Stressor` starts one process per CPU, or one for a GPU. Each process works and idles in cycles of about
100 ms, measures its share of the device's time and adjusts its duty until the share equals the level.

The level is the share of the device's time that the stressor uses (of each CPU it is pinned to). If other
work competes, a fair scheduler gives both less than they request, and a closed control loop would increase
the duty until the stressor never idles. Therefore reach the level first (`wait_until_steady`, or `reach_load`
to count other work as a part of the level), then freeze the duty while measuring (`hold_duty`);
`measure_share_between` returns the share that the stressor used meanwhile.
"""
