"""Model inputs from chat messages and images.

- `messages`: chat messages, prompts, limits and API errors
- `images`: decoding of images
- `processors`: images to model inputs, per architecture
- `chat`: the chat template
- `model_folder`: opening a model saved by transformers
"""
