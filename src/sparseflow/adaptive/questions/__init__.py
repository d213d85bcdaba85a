"""Questions with known answers as the task of a study.

`task` defines what a study needs of a task; `file` reads questions from JSON lines; `runner` answers them
under a plan; `file_task` makes a task of them.
"""
