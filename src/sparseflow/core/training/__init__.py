"""What trainings of all wings share: processes that learn together, checkpoints, and a history of numbers."""
