"""Design of the hardware for a model: config, decisions and their cost, placement, search and saved plans."""
