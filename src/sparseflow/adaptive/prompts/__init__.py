"""From chat messages and images to the inputs of a model.

- `messages`: chat messages, prompts, limits and API errors
- `images`: decoding of images
- `processors`: images to model inputs, per architecture
- `chat`: the chat template
- `model_folder`: opening a model saved by transformers
"""
