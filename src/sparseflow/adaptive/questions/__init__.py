"""Questions with known answers as the task of a study.

- `task`: `StudyTask`, what a study needs of a task
- `file`: questions in JSON lines
- `runner`: answers questions under a plan
- `file_task`: `StudyTask` of a file of questions
"""
