"""Cost models: learning what work costs from measurements, and saying how far off a prediction may be."""
