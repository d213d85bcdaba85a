"""What is mapped: layers, segments of consecutive layers, and splits of layers over several slots."""
