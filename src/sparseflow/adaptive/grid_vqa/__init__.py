"""Grid-VQA: questions about small real images on a canvas, and a mixture of experts that learns to answer.

One to nine images lie on a grid; what is asked can be told from the canvas alone, never from the question.
Some items are so small that only the finest crops show them, some answers are long. `training.train` makes a
model in the folder layout of transformers; `evaluate` says how often each plan answers right.
"""
