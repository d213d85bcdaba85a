"""Grid-VQA: synthetic questions about small real images on a grid, and a mixture-of-experts model that
answers them.

One to nine images are placed on a grid. Answers follow from the canvas only, never from the question. Some
items are so small that only the finest crops resolve them, and some answers are long. `train.train` makes a
model in the transformers directory layout; `evaluate` measures how often each plan answers correctly.
"""
